"""What merges in the blocks of one level: decided once for each set of rules, size and device."""

from __future__ import annotations

from typing import NamedTuple

from ..merging.methods import METHODS
from ..merging.plan import MergeMode
from ..settings.config import MergeRule
from ..settings.schedule import LevelRules
from .size_gate import pays, pays_in_mlp


class Merging(NamedTuple):
    """How one part of a block merges by a rule.

    queries: they merge with the keys and values. mode: see `MergePlan.merge`. proportional: by proportional attention.
    corrected: by a correction. renews: a plan that is too old is where the rule's next match begins.
    """

    rule: MergeRule
    queries: bool
    mode: MergeMode
    proportional: bool
    corrected: bool
    renews: bool


class Decision(NamedTuple):
    """How each part of a block merges, None if it does not. why_not: if no part does, the reason, else ""."""

    attn: Merging | None
    crossattn: Merging | None
    mlp: Merging | None
    why_not: str = ""


def decide(rules: LevelRules, why_off: str, tokens: int, channels: int, device: str) -> Decision:
    """Of the rules in force, those that pay at this size.

    Args:
        why_off: the reason if no rule is in force.
        tokens, channels: of the picture in this level.
        device: its type.
    """
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
    queries = rule.effective_side == "qkv"
    method = METHODS[rule.method]
    renews = bool(rule.refine) and method.compares
    return Merging(rule, queries, method.mode, rule.is_proportional, rule.corrects, renews)


def around_of(rule: MergeRule) -> bool:
    """Does any part of a block merge tomesd's way by this rule: the whole part called with merged tokens?"""
    return rule.merge_crossattn or rule.merge_mlp or (rule.merge_attn and is_as_tomesd(rule))


def is_as_tomesd(rule: MergeRule) -> bool:
    """Does self-attention merge tomesd's way: queries, keys and values together, without sizes?"""
    return rule.effective_side == "qkv" and not rule.is_proportional
