"""The state of one patch: its settings, and all data that is kept while the model runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.overrides

from ..attention.correction import Pair
from ..attention.merged import Attention, MergeOptions, attend, correction_of
from ..merging import kernels
from ..merging.grid import Grid, Layout, tokens_in
from ..merging.plan import MergePlan
from ..reporting.ledger import COSTS, FEW_TOKENS, NO_GRID, NOT_NOW, OTHER_PARTS, TOO_WRONG, Ledger, LevelTally
from ..reporting.report import Report
from ..settings.config import MergeConfig, MergeRule, describe
from ..settings.rules import LevelRules, ever_merges, notes_on, ways_of
from ..settings.schedule import NoiseSchedule
from . import work
from .decision import MergeMap, ModelCall, decide
from .match import draw_of, find_plans, match
from .own_error import ATTN, BLOCK, Noted
from .plan_cache import KeptPlans, Plans
from .time import Clock, ModelTime


class State:
    """The settings of one model's patch and its data between calls. It holds no module.

    Use `begin` at each call of the model, then `attend` for its attentions and `fewer_tokens.around` for its blocks. A
    host may call `set_time` before each call.

    Args:
        config: the settings.
        levels: an empty tally for each level of the model, the finest first; they are filled in place. A level is all
            blocks whose tokens have one size.
        schedule: the model's own noise schedule; None if it is not known: Stable Diffusion's is then used.
        outside: the number of weights outside blocks by which each cell of the latent is multiplied, on average.
    """

    is_installed = True  # the model merges as this state says

    def __init__(
        self, config: MergeConfig, levels: Sequence[LevelTally], schedule: NoiseSchedule | None = None,
        outside: float = 0.0,
    ) -> None:  # fmt: skip
        self.config, self._outside = config, outside
        downsamples = [tally.downsample for tally in levels]
        self.clock = Clock(config, downsamples, schedule)
        self.knows_schedule = schedule is not None
        for number, level in enumerate(levels):
            level.level, level.covered = number, ever_merges(self.clock.rules, number, level.downsample)
        self.ever_merges = any(level.covered for level in levels)  # if the picture is large enough
        # how rules merge in each level that they reach, see `wrap_set.Ways`
        self.ways = {level.level: ways_of(self.clock.rules, level.level, level.downsample)
                     for level in levels if level.covered}  # fmt: skip
        self.ledger = Ledger(list(levels), notes_on(config, self.ever_merges, downsamples))
        limits = [rule.max_timestep if rule.min_timestep is None else None for rule in self.clock.rules
                  if rule.merge_blocks and not rule.is_off]  # fmt: skip
        merges_blocks = any("blocks" in ways for ways in self.ways.values()) and None not in limits
        self._blocks_below = max(limits) if merges_blocks else None  # the timestep, if only that limits whole blocks
        self._counts_steps = any(rule.most_steps is not None for rule in self.clock.rules)
        self.time = ModelTime(self.clock, self._counts_steps or any(rule.keep for rule in self.clock.rules))
        self.wants_time = self.time.is_wanted  # whether what merges depends on the time of a call
        # by attention function or `Place`, why it stays unmerged; `attend_call` and `around` fill it
        self.refused: dict[Hashable, str] = {}
        self.trials: dict[Hashable, bool | None] = {}  # of attention functions, see `AttentionCall.takes_bias`
        self.pays: Any = None  # `measuring.pays.Pays`, or None: the number of tokens decides
        self._maps: dict[int, MergeMap] | None = None  # by level, on the model's device: a copy to the CPU would wait
        # the results of `decide`. Keys hold the rules' ids, which stay theirs because the clock keeps the rules
        self._decisions: dict[tuple, tuple[LevelRules, str]] = {}
        self._borne: dict[tuple, LevelRules] = {}  # the results of `_bearable`
        blocks = sum(level.blocks for level in levels)
        self._weights = [level.blocks / max(1, blocks) or 1.0 for level in levels]  # of their attentions in the model

    # --- the seam -----------------------------------------------------------------------------------------------------

    def begin(self, timestep: Any, latent: Any, called: Hashable = None) -> ModelCall:
        """Begin a call of the model, and return its record, for `attend` and `fewer_tokens.around`.

        Args:
            timestep: a number, or a tensor ``[]`` or ``[B]``, on Stable Diffusion's schedule (0 to 1000); 1000 times
                sigma for a flow model. It gives the time, if `set_time` does not; values that differ give none. It
                always decides random draws, by the first sample's value.
            latent: ``[B, C, (frames,) H, W]``. Its values are read only to find copies of one latent in a batch.
            called: the host's name for the call at this timestep, such as its conditions' names; None: order decides.
        """
        self.ledger.calls += 1
        now, kept = self.time.next_call(timestep, latent, called)
        gate = None if self.pays is None else self.pays.gate(latent)
        rules, too_wrong = (now.rules, frozenset()) if kept is None else self._bearable(now.rules, kept)
        why_off = now.why_off
        if self._blocks_below is not None and not [rule for rule in now.live if rule.merge_blocks]:
            self.ledger.too_early += NOT_NOW in why_off
        if self._counts_steps and kept is not None:
            rules, why_off = self._in_first_steps(rules, why_off, kept.step)
        call = ModelCall(self, timestep, rules, why_off, gate, kept, too_wrong)
        if torch.is_tensor(latent) and latent.dim() >= 4 and self.ever_merges:
            batch = latent.shape[0] * math.prod(latent.shape[2:-2])  # of pictures: frames are pictures of their own
            self.ledger.rest += int(batch * math.prod(latent.shape[-2:]) * self._outside)
            for tally in self.ledger.levels:
                if not tally.covered and tally.blocks:  # `attend` is not called there, but the total counts its work
                    tokens = math.prod(-(-side // tally.downsample) for side in latent.shape[-2:])
                    self.ledger.add_whole(tally.level, batch, tokens)
        return call

    def attend(
        self, call: ModelCall, name: Hashable, level: int, layout: Layout, attention: Attention
    ) -> torch.Tensor | None:
        """Compute a self-attention with merged keys and values; with merged queries as well if the rule's side is qkv.

        `name` is the same at every step and unique in the model. `level` is 0 for the finest. `layout` is the position
        of the picture's tokens in the sequence. The output ``[B, S, H, d]`` is returned, and counted as merged; if it
        is None, the reason is counted, and the host has to compute the attention.
        """
        q = attention.q
        batch, tokens = q.shape[:2]
        turn = call.latest_runs[name] = call.latest_runs.get(name, -1) + 1
        picture = layout.grid.height * layout.grid.width
        known = self._decisions.get((id(call.rules[level]), call.why_off[level], call.gate, picture, q.device))
        rules, why = known or self.decide(call, level, picture, q.device)  # without a call at every attention
        rule = rules.attn
        if rule is None and ("attn", level) in call.too_wrong:
            why = TOO_WRONG
        elif rule is None:
            why = why or (OTHER_PARTS if call.rules[level].attn is None else FEW_TOKENS)
        elif layout.first + picture > tokens or attention.k.shape[1] != tokens:
            why = NO_GRID
        elif torch._C._len_torch_function_stack():
            why = foreign_mode()
        if why:
            self.count_unmerged(level, why, batch, tokens)
            return None
        kept, key, merged, cost = call.kept_plans, ((name, turn), batch, layout, tokens), None, 0
        plans = None if kept is None or not rule.keep else kept.plans.get((kept.ordinal, *key))
        is_own = plans is not None and plans.rule is rule and plans.device == q.device
        if not is_own or abs(plans.timestep - kept.timestep) > rule.keep:  # as in `KeptPlans.plans_for`
            plans, merged, cost = self._match(call, key, level, layout, attention, rule)
        plan = plans.plan
        if plan is None:
            self.count_unmerged(level, plans.why, batch, tokens)
            return None
        queries = rule.side == "qkv"
        out, way = attend(attention, MergeOptions(plan, rule.proportional, queries, plans.correction), merged)
        left = (plan.num_groups if queries else tokens, plan.num_groups)
        sizes, cost = (batch, tokens, tokens), cost + plans.work
        self.ledger.merge(level, "attn", sizes, left, way if rule.proportional else "", cost=cost)
        if self._maps is not None:
            self.note_map(level, layout, plan)
        return out

    def decide(self, call: ModelCall, level: int, tokens: int, device: torch.device) -> tuple[LevelRules, str]:
        """Return (rules that merge in a level, the reason if none does, else "") for a picture of so many `tokens`.

        Of `device` only the type counts. An answer is kept for the same rules, reason, gate, `tokens` and `device`.
        """
        rules, why_off, gate = call.rules[level], call.why_off[level], call.gate
        key = (id(rules), why_off, gate, tokens, device)
        if key not in self._decisions:
            self._decisions[key] = decide(rules, why_off, tokens, device.type, gate)
        return self._decisions[key]

    def count_inside(self, call: ModelCall, level: int, seen: int = 0) -> None:
        """Count a self-attention of a block that runs on merged tokens just now.

        `seen` is the number of tokens that it sees, with those of a text that are not in the block's input; 0: no more.
        """
        batch, tokens, left = call.inside
        weights = self.ledger.levels[level].per_token
        if seen > left:
            tokens, left = tokens + seen - left, seen
        self.ledger.merge(level, "attn", (batch, tokens, tokens), (left, left), weights=weights)

    def count_unmerged(self, level: int, why: str, batch: int = 0, tokens: int = 0, part: str = "attn") -> None:
        """Count an unmerged "attn", "crossattn", "mlp" or "block", with the reason, and its sizes if they are known."""
        self.ledger.skip(level, part, why, batch, tokens)

    def _match(
        self, call: ModelCall, key: tuple, level: int, layout: Layout, attention: Attention, rule: MergeRule
    ) -> tuple[Plans, Pair | None, int]:
        """Return `find_plans` for the whole batch, with a new correction if the rule wants one, and keep it.

        The second result is the keys and values that were merged to fit the correction, or None; the third is the work
        of a new match and correction. If that is more than merging saves, the plans have no plan, but the reason.
        """
        q, k, v = attention[:3]
        (batch, tokens, heads, width), cost = q.shape, 0
        self.ledger.levels[level].channels = heads * width
        corrects, is_kept = rule.corrects and v.shape[3] == width, call.kept_plans is not None and rule.keep
        features = k[0, 0].numel() * (2 if rule.metric == "keys+values" else 1)

        def match_rows(rows: slice, old: MergePlan | None) -> MergePlan | None:
            nonlocal cost
            plan = match(k[rows], v[rows], layout, rule, draw_of(call, level, rule, k.device), old)
            if plan is not None:
                groups = plan.num_groups - tokens + tokens_in(layout)
                cost += k[rows].shape[0] * work.of_match(rule, layout.grid, groups, features, old is not None)
            return plan

        merged = None
        serves = bool(is_kept) and self.time.serves_several(rule.keep)
        if work.pays(rule, layout, tokens, heads, width, features, corrects, serves):
            plans = find_plans(call, key, rule, k.device, match_rows)
        else:
            plans = Plans(None, call.kept_plans and call.kept_plans.timestep, rule, k.device, why=COSTS)
        if plans.plan is not None and corrects:
            correction, merged = correction_of(attention, plans.plan, layout)
            self.note_error(call, ATTN, level, plans.plan.num_groups / tokens, correction.error)
            cost += batch * work.of_fit(correction.num_queries, tokens, plans.plan.num_groups, heads, width)
            added = batch * work.of_correction(plans.plan.num_groups if rule.side == "qkv" else tokens, heads, width)
            plans = plans._replace(correction=correction, work=added)
        if is_kept:
            call.kept_plans.plans[(call.kept_plans.ordinal, *key)] = plans
        return plans, merged, cost

    def _bearable(
        self, rules: tuple[LevelRules, ...], kept: KeptPlans
    ) -> tuple[tuple[LevelRules, ...], frozenset[tuple[str, int]]]:
        """Return the rules of each level that keep the model's own error in bounds, and `ModelCall.too_wrong`."""
        found, too_wrong = [], []
        for level, now in enumerate(rules):
            changes = {part: kept.own_error.rule_for(kind, level, rule, kept.timestep, weight)
                       for part, kind, weight in (("attn", ATTN, self._weights[level]), ("block", BLOCK, 1.0))
                       if (rule := getattr(now, part)) is not None and rule.max_error is not None}  # fmt: skip
            too_wrong += [(part, level) for part, rule in changes.items() if rule is None]
            changes = {part: rule for part, rule in changes.items() if rule is not getattr(now, part)}
            if changes:
                bounded = self.ledger.levels[level].bounded
                bounded.update((part, 1 - rule.effective_ratio if rule else 1.0) for part, rule in changes.items())
                key = id(now), *((part, id(rule)) for part, rule in changes.items())
                now = self._borne.setdefault(key, now._replace(**changes))
            found.append(now)
        return tuple(found), frozenset(too_wrong)

    def _in_first_steps(
        self, rules: tuple[LevelRules, ...], why_off: tuple[str, ...], step: int
    ) -> tuple[tuple[LevelRules, ...], tuple[str, ...]]:
        """Return rules and `ModelCall.why_off` without the rules that a sampling uses in earlier steps only."""
        found, whys = [], [*why_off]
        for level, now in enumerate(rules):
            late = {part: None for part, rule in now._asdict().items()
                    if rule is not None and rule.most_steps is not None and step > rule.most_steps}  # fmt: skip
            if late:
                now = self._borne.setdefault((id(now), *late), now._replace(**late))
                whys[level] = whys[level] or NOT_NOW
            found.append(now)
        return tuple(found), tuple(whys)

    def note_error(self, call: ModelCall, kind: str, level: int, share: float, squares: torch.Tensor) -> None:
        """Note what a fit leaves of its exact answers, see `own_error.Noted`, if a sampling goes on."""
        kept = call.kept_plans
        if kept is not None:
            noted = Noted(kind, level, kept.timestep, share, squares)
            kept.own_error.note(noted)
            self.ledger.note_error(noted)

    def note_map(self, level: int, layout: Layout, plan: MergePlan) -> None:
        """If maps are kept, keep that of the picture's tokens (of a video, the first frame's) as a level's latest."""
        if self._maps is None:
            return
        grid = Grid(layout.grid.height // layout.grid.frames, layout.grid.width)
        group = plan.group[:, layout.first : layout.first + grid.height * grid.width]
        self._maps[level] = MergeMap(grid, group, plan.num_groups)

    # --- for hosts: time, maps, report --------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """True if a rule is in force at the time of the latest call, or at the time that a host has set since."""
        return bool(self.time.now.live)

    @contextmanager
    def sampling(self, pictures: int | None = None, timesteps: Sequence[float] | None = None) -> Iterator[State]:
        """Make this thread's calls of the model the steps of one picture, or of one batch, inside the ``with``.

        It yields this state. Merge plans are kept inside over steps (``keep``) and dropped at the end. Outside no plan
        is kept. A patched diffusers pipeline needs no such call. `pictures` and `timesteps`: see `set_time`; without
        timesteps, they are read from the pipeline's scheduler, if it is known.
        """
        _check_pass(pictures, timesteps)
        with self.time.sample(lambda batch: (pictures, 0) if pictures else None, timesteps):
            yield self

    def set_time(
        self, *, percent: float | None = None, timestep: float | None = None, sigma: float | None = None,
        sampling: Hashable = None, pictures: int | None = None, timesteps: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """Set the time of the next calls on one of three scales. A timestep goes before a sigma if both are given.

        If a percent is given too, it decides limits in percent, and the timestep or sigma decides limits in timesteps.
        Without a time, each call's time is read from the model's timestep argument, and `sampling` keeps no plan.

        Args:
            percent: 0 at pure noise, 1 at the end; on the scale of ComfyUI's ``percent_to_sigma``.
            timestep: on Stable Diffusion's schedule, 0 to 1000.
            sigma: the standard deviation of the noise, relative to data of unit variance.
            sampling: a value that identifies this picture's sampling, the same at each of its steps. Plans are kept
                over steps (``keep``) only if it is given.
            pictures: how many pictures are made. Give it if calls hold copies of the pictures' latents in the same
                order, in one batch or in several, as classifier-free guidance does. Copies then share their matches.
            timesteps: the timesteps of all steps of this sampling, on Stable Diffusion's schedule; the same object at
                each step. A sampling that begins late (image to image, hires fix) then has the same share of early
                steps as a whole picture. Give None if this sampling continues a picture that another has begun.

        Raises:
            TypeError: a time, or an element of `timesteps`, is no number.
            ValueError: a value is out of range, or `pictures` is no int.
        """
        _check_time("percent", percent, 1.0)
        _check_time("timestep", timestep)
        _check_time("sigma", sigma)
        _check_pass(pictures, None if timesteps is self.time.timesteps else timesteps)  # checked at its first step
        self.time.set(percent, timestep, sigma, sampling, pictures, timesteps)

    def keep_maps(self, keep: bool = True) -> None:
        """Keep the latest map of each level from now on, for `maps`; False stops this. Earlier maps are dropped."""
        self._maps = {} if keep else None

    def maps(self) -> dict[int, MergeMap]:
        """Return the latest map of each level by its number, copied to the CPU; empty unless `keep_maps` was called."""
        return {level: latest._replace(group=latest.group.cpu()) for level, latest in (self._maps or {}).items()}

    def reset_counts(self) -> None:
        """Clear counts and maps, so that the next report is about the next picture alone. Maps stay on or off."""
        self.ledger.reset()
        self.keep_maps(self._maps is not None)

    def report(self) -> Report:
        """Return a copy of the counts since the start or the latest `reset_counts`, as a `Report`."""
        ledger, notes = self.ledger, (*self.ledger.notes, *kernels.notes())
        if ledger.calls and ledger.too_early == ledger.calls:  # as in a picture of one step
            notes += (f"whole blocks merge later than in these steps: below timestep {self._blocks_below:g}",)
        ledger.read_errors()
        levels = tuple(deepcopy(ledger.levels))
        return Report(self.is_installed, describe(self.config), ledger.calls, levels, notes, rest=ledger.rest)


def _check_time(name: str, value: float | None, most: float = math.inf) -> None:
    """Raise a TypeError if a value is no number, a ValueError if it is infinite or not 0 to `most`; None is allowed."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; use a number")
    if not 0 <= value <= most or value == math.inf:
        raise ValueError(f"{name}={value!r} is no time; use a number from 0 {'up' if most == math.inf else 'to 1'}")


def _check_pass(pictures: int | None, timesteps: Sequence[float] | None) -> None:
    """Raise a ValueError or a TypeError unless both are None or possible: an int from 1, finite numbers from 0."""
    if pictures is not None and (isinstance(pictures, bool) or not isinstance(pictures, int) or pictures < 1):
        raise ValueError(f"pictures={pictures!r} is no number of pictures; use a whole number from 1 up, or None")
    for value in timesteps or ():
        _check_time("timesteps", value)


def foreign_mode() -> str:
    """Return why not to merge if a torch function mode, other than torch's own for devices, is active, else ""."""
    # such as guidance that perturbs attention, which fails if there are fewer keys than queries
    modes = torch.overrides._get_current_function_mode_stack()
    names = [type(mode).__name__ for mode in modes if type(mode).__module__ != "torch.utils._device"]
    return f"{' and '.join(names)} looks at its functions" if names else ""
