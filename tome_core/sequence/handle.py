"""Merging in a transformer's attentions, for a host that stands where they are called."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ..attention.core import Attended
from ..compiling import compiles_here
from ..merging.grid import Draw, Grid
from ..merging.plan import MergePlan
from ..reporting.ledger import LevelTally
from ..reporting.reasons import NO_GRID, TOO_SMALL
from ..running.call import Call
from ..running.decision import Merging
from ..running.handle import Handle
from ..running.matching import renews
from ..running.search import Plans, Search, stamp_of
from ..settings.config import MergeConfig
from ..settings.phases import plain_rules
from ..settings.rule import MergeRule
from .attend import Host, attend, correction_of, merge
from .layout import Layout, Tensors, by_token, in_form, tokens_in
from .matching import match

logger = logging.getLogger(__name__)
UNPROVEN = (
    "transformers' strengths and presets were chosen on one small transformer of Flux's layout; nobody has measured "
    "what they change in this model, so look at your pictures"
)


class AttentionCall(NamedTuple):
    """One attention of a call. name: the same for it at every step, different from all others of its model."""

    name: Hashable
    host: Host
    tensors: Tensors
    layout: Layout


class SequenceMerging(Handle):
    """Merges the keys and values of a transformer's attentions, as its settings say; holds no model.

    A host makes one for each model, tells it the time (`set_time`; a flow model's timestep is 1000 times its sigma),
    opens each call of the model (`begin`) and gives it every attention there (`attend`), where q, k and v are made,
    with norm and positions:

        merging = SequenceMerging(tome_core.preset("balanced"), downsample=2, blocks=57)
        merging.set_time(timestep=1000 * sigma, sampling=this_sampling, pictures=1)
        call = merging.begin(sigma, latent)
        host = Host(lambda q, k, v, bias: sdpa(q, k, v, bias), BY_HEAD, FLAT, scale=width**-0.5)
        out = merging.attend(call, "double 3", host, q, k, v, heads=24, layout=Layout(Grid(64, 64), first=512))
        if out is None: ...  # left alone, and counted: the host's own call

    downsample: latent tokens for each token of the model, along a side. blocks: how many attentions a call has.
    """

    def __init__(self, config: MergeConfig, downsample: int = 2, blocks: int = 0) -> None:
        tally = LevelTally(downsample, blocks)
        super().__init__(config, plain_rules(config, [downsample]), [tally])
        self.is_installed = True
        _say_once()

    def begin(self, timestep: Any, latent: torch.Tensor, called: Hashable = None) -> Call:
        """A call of the model starts. timestep: a number, or ``[]`` or ``[B]``; latent: ``[B, C, (frames,) H, W]``.

        called: what the host calls it by among those at its time, such as the names of its conditions; else their
        order tells them apart.
        """
        return self.run.begin(timestep, latent, threading.get_ident(), called=called)

    def leave_alone(self, call: Call, why: str, batch: int, queries: int, keys: int) -> None:
        """Count an attention of the model that is not to be merged, or cannot be."""
        self.run.ledger.skip(call, 0, "attn", why, batch * queries * keys)

    def attend(
        self, call: Call, name: Hashable, host: Host, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int,
        layout: Layout, key_heads: int | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """The attention's output in the host's form, or None where it is left alone, which is counted.

        q, k, v: of the same tokens, in the host's form. layout: where among them the picture's lie; all others keep
        their own keys and values. key_heads: of k and v, where they have fewer. Never asks for a mask.
        """
        kv = key_heads or heads
        tensors = Tensors(*(by_token(one, host.form, count) for one, count in ((q, heads), (k, kv), (v, kv))))
        asked = AttentionCall(name, host, tensors, layout)
        batch, tokens = tensors.q.shape[:2]
        merging = self._merging(call, asked)
        if isinstance(merging, str):
            self.leave_alone(call, merging, batch, tokens, tokens)
            return None
        plans = self._plans(call, asked, merging)
        if plans.plan is None:
            self.leave_alone(call, TOO_SMALL, batch, tokens, tokens)
            return None
        found, queries = _attend(asked, merging, plans)
        before, after = (batch, tokens, tokens), (queries, plans.plan.num_groups)
        self.run.ledger.merge(call, 0, "attn", before, after, found.way if merging.proportional else "")
        if self.run.maps is not None:  # of a film its first frame's
            grid = Grid(layout.grid.height // layout.grid.frames, layout.grid.width)
            group = plans.plan.group[:, layout.first : layout.first + grid.height * grid.width]
            self.run.maps[0] = grid, MergePlan(group, plans.plan.num_groups)
        return found.out

    def _merging(self, call: Call, asked: AttentionCall) -> Merging | str:
        """How it merges; why not."""
        q, layout = asked.tensors.q, asked.layout
        tokens = tokens_in(layout)
        if torch.compiler.is_compiling() and compiles_here():
            return "the model is compiled"
        if layout.first + tokens > q.shape[1] or asked.tensors.k.shape[1] != q.shape[1]:
            return NO_GRID
        key = (id(call.rules[0]), call.why_off[0], tokens, q.device)
        decision = self.run.decisions.get(key)
        if decision is None:
            decision = self.run.decide(key, call, 0, tokens, q.shape[2] * q.shape[3], q.device.type)
        return decision.attn or decision.why_not or "its rule merges other parts, which no transformer has"

    def _plans(self, call: Call, asked: AttentionCall, merging: Merging) -> Plans:
        rule, kept, q = merging.rule, call.kept, asked.tensors.q
        if kept is None or not rule.keep:
            return _correct(asked, merging, self._match(call, asked, rule, None, None))
        old = kept.find(_key(asked, q.shape[0]), rule, q.device, renews(rule))
        if old is not None and old.is_fresh:
            return old.kept.plans
        return Search(
            rule, q.device, q.shape[0], renews(rule), partial(_key, asked),
            partial(self._match, call, asked, rule), partial(_correct, asked, merging),
        ).among(kept, old)  # fmt: skip

    def _match(self, call: Call, asked: AttentionCall, rule: MergeRule, rows: slice | None, old: Plans | None) -> Plans:
        q, k, v = asked.tensors if rows is None else (one[rows] for one in asked.tensors)
        draw = Draw(rule.seed, 0, stamp_of(call.stamp, q)) if rule.use_rand else None
        return Plans(match(k, v, asked.layout, rule, draw, old and old.plan))


def _key(asked: AttentionCall, batch: int) -> tuple:
    return asked.name, "sequence", batch, asked.layout, asked.tensors.q.shape[1]


def _correct(asked: AttentionCall, merging: Merging, plans: Plans) -> Plans:
    if plans.plan is None or not merging.corrected:
        return plans
    correction, made = correction_of(asked.tensors, plans.plan, asked.layout, asked.host.scale)
    return plans._replace(correction=correction, merged=made)


def _attend(asked: AttentionCall, merging: Merging, plans: Plans) -> tuple[Attended, int]:
    """The output, and how many queries were asked: merged ones where the rule's side is theirs too."""
    plan, host, tensors = plans.plan, asked.host, asked.tensors
    asking = tensors if merging.side == "kv" else tensors._replace(q=merge(tensors.q, plan))
    found = attend(host, asking, plan, merging.proportional, plans.correction, plans.merged)
    if asking is tensors:
        return found, tensors.q.shape[1]
    out = by_token(found.out, host.out_form, tensors.q.shape[2])
    whole = plan.unmerge(out.flatten(2)).unflatten(2, out.shape[2:])
    return found._replace(out=in_form(whole, host.out_form)), plan.num_groups


@cache
def _say_once() -> None:
    logger.warning("%s", UNPROVEN)
