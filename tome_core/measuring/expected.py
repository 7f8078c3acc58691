"""The share of a UNet's work that settings leave out in a picture, told before it is drawn, without a model call."""

from __future__ import annotations

from typing import Any

from ..attention.correction import count_answers
from ..engine import work
from ..engine.decision import decide
from ..engine.merged_tokens import count_samples
from ..engine.time import Clock
from ..merging.grid import Grid, Layout
from ..models import Adapter, adapter_of, find_models
from ..reporting.ledger import COSTS, FEW_TOKENS, Ledger
from ..reporting.report import Report
from ..settings.config import MergeConfig, MergeRule
from ..settings.presets import TRANSFORMER
from .pays import empty_latent, pays_of

_STEPS = 20


def expected_share(model: Any, config: MergeConfig, height: int, width: int, steps: int = _STEPS) -> float | None:
    """Return the share of a UNet's work, 0 to 1, that settings leave out in pictures of a size in pixels.

    It is what `Report.work_saved` would tell of a sampling of so many `steps`, evenly spaced in time, if nothing else
    kept a call from merging. None for a transformer, whose text decides too, and for parts that merge as in tomesd.
    `model` is one that `patch` takes; an UnsupportedModelError or a TypeError is raised if it cannot be patched.
    """
    model = find_models(model)[0]
    adapter = adapter_of(model)
    clock = None if adapter.curve == TRANSFORMER else Clock(config, adapter.downsamples)
    if clock is None or any(rule.is_as_tomesd or rule.merge_crossattn or rule.merge_mlp for rule in clock.rules):
        return None
    latent, estimate = empty_latent(model, 2, height, width), pays_of(clock.rules, model, adapter)
    gate = None if estimate is None else estimate.gate(latent)
    ledger, outside, levels = Ledger(adapter.tallies(), ()), adapter.outside, _levels_of(adapter)
    timesteps = [999 - 1000 * step / steps for step in range(steps)]
    boundary, matched = clock.boundary_in(timesteps), {}
    for timestep in timesteps:
        active = clock.at(clock.moment(timestep), boundary)
        ledger.rest += int(latent.shape[2] * latent.shape[3] * outside)
        for level, (heads, stretches) in enumerate(levels):
            grid = Grid(*(-(-side // adapter.downsamples[level]) for side in latent.shape[2:]))
            rules, _ = decide(active.rules[level], FEW_TOKENS, grid.height * grid.width, latent.device.type, gate)
            _count(ledger, level, grid, heads, stretches, rules.attn, rules.block, timestep, 1000 / steps, matched)
    return Report(False, levels=tuple(ledger.levels), rest=ledger.rest).work_saved


def _levels_of(adapter: Adapter) -> list[tuple[int, int]]:
    """Return the number of heads, and of transformers, at each level, the finest first."""
    places = [[place for place in adapter.places if place.halvings == depth] for depth in adapter.levels]
    heads = [max((getattr(getattr(place.block, "attn1", None), "heads", 1) for place in there), default=1)
             for there in places]  # fmt: skip
    return [(count, len({id(place.transformer) for place in there}))
            for count, there in zip(heads, places, strict=True)]  # fmt: skip


def _count(
    ledger: Ledger, level: int, grid: Grid, heads: int, stretches: int, attn: MergeRule | None, block: MergeRule | None,
    timestep: float, spacing: float, matched: dict[tuple[int, MergeRule], float],
) -> None:  # fmt: skip
    """Count a call of all blocks of a level, of one sample, in which these rules are in force.

    `spacing` is the distance of two steps; `matched` has the timestep of the latest match by level and rule.
    """
    tally, tokens = ledger.levels[level], grid.height * grid.width
    later = tally.blocks - stretches if block is not None else 0
    if later:
        samples = count_samples(grid) if block.correction else 0
        left = work.groups_of(block, grid) + samples
        cost = work.of_way_back(tokens, samples, tally.channels)
        cost += _work_of_match(level, block, grid, tally.channels, timestep, matched)
        ledger.merge(level, "attn", (later, tokens, tokens), (left, left), "", tally.per_token, stretches * cost)
    alone, width = tally.blocks - later, tally.channels // heads
    features = tally.channels * 2 if attn is not None and attn.metric == "keys+values" else tally.channels
    sizes = tokens, heads, width, features
    if attn is None or not work.pays(attn, Layout(grid), *sizes, attn.corrects, attn.keep >= spacing):
        ledger.skip(level, "attn", COSTS, alone, tokens)
        return
    groups = work.groups_of(attn, grid)
    queries, is_new = groups if attn.side == "qkv" else tokens, _is_new(level, attn, timestep, matched)
    cost = _work_of_match(level, attn, grid, features, timestep, matched)
    if attn.corrects:
        cost += work.of_correction(queries, heads, width)
        cost += work.of_fit(count_answers(tokens, width), tokens, groups, heads, width) if is_new else 0
    ledger.merge(level, "attn", (alone, tokens, tokens), (queries, groups), cost=alone * cost)


def _is_new(level: int, rule: MergeRule, timestep: float, matched: dict[tuple[int, MergeRule], float]) -> bool:
    """Tell whether a rule matches again at a timestep."""
    last = matched.get((level, rule))
    return last is None or not rule.keep or abs(last - timestep) > rule.keep


def _work_of_match(
    level: int, rule: MergeRule, grid: Grid, features: int, timestep: float, matched: dict[tuple[int, MergeRule], float]
) -> int:
    """Return the work of a rule's match at a timestep, 0 if an earlier one is kept, and note the match."""
    if not _is_new(level, rule, timestep, matched):
        return 0
    is_renewed = bool(rule.refine) and (level, rule) in matched
    matched[level, rule] = timestep
    return work.of_match(rule, grid, work.groups_of(rule, grid), features, is_renewed)
