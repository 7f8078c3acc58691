"""What is merged in the blocks of one transformer: decided once for each set of rules, size and device."""

from __future__ import annotations

from typing import NamedTuple

from ..merging.methods import METHODS
from ..merging.plan import MergeMode
from ..settings.rule import MergeRule
from ..settings.schedule import LevelRules
from .gate import pays, pays_in_mlp


class Merging(NamedTuple):
    """How one part merges. side: of self-attention; mode: see `MergePlan.merge`; proportional: with proportional
    attention; corrected: what merged keys lose is given back.
    """

    rule: MergeRule
    side: str
    mode: MergeMode
    proportional: bool
    corrected: bool


class Decision(NamedTuple):
    """How each part of a block merges, None where it does not. why_not: where none does, the reason, else ""."""

    attn: Merging | None
    crossattn: Merging | None
    mlp: Merging | None
    why_not: str = ""


def decide(rules: LevelRules, why_off: str, tokens: int, channels: int, device: str) -> Decision:
    """Of the rules in force, those that pay at this size. why_off: where none is in force. device: its type."""
    attn, crossattn, mlp = rules
    if attn is None and crossattn is None and mlp is None:
        return Decision(None, None, None, why_off)
    attn = attn if pays(attn, tokens, device) else None
    crossattn = crossattn if pays(crossattn, tokens, device) else None
    mlp = mlp if pays_in_mlp(mlp, tokens, channels, device) else None
    if attn is None and crossattn is None and mlp is None:
        return Decision(None, None, None, "so few tokens that merging would not pay")
    return Decision(_how(attn), _how(crossattn), _how(mlp))


def _how(rule: MergeRule | None) -> Merging | None:
    if rule is None:
        return None
    return Merging(rule, rule.effective_side, METHODS[rule.method].mode, rule.is_proportional, rule.corrects)
