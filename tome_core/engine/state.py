"""The state of one patch: settings in force on one model, and everything that is remembered while it runs.

An adapter opens each call of its model (`begin`), and gives every self-attention there to `attend`, as its host would
compute it. `around` is tomesd's way, for whatever else is to run on merged tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..attention.merged import Attention, Merge, attend, correction_of
from ..merging import kernels
from ..merging.grid import Draw, Grid
from ..merging.layout import Layout
from ..merging.plan import MergePlan
from ..reporting.gains import PIXELS
from ..reporting.ledger import NO_GRID, OTHER_PARTS, TOO_SMALL, Ledger, LevelTally
from ..reporting.report import Report, make_report
from ..settings.config import MergeConfig, describe, notes_on
from ..settings.schedule import NoiseSchedule, ever_merges
from .around import merge_around
from .call import Call, Latents, MergeMap
from .clock import Clock
from .decision import Decision, Merging, decide
from .match import match
from .plan_cache import Guidance
from .plans import Plans, Request, match_or_reuse, stamp_of
from .tensor_checks import foreign_mode, is_mapped
from .time import ModelTime

_MAPPED = "torch.vmap maps over the call"
_MOST_DECISIONS = 1024  # kept; pictures of ever new sizes must not fill the memory

Own = TypeVar("Own", bound="State")


class State:
    """Settings in force on one model. It holds no module.

    Args:
        config: the settings.
        levels: an empty tally for each level of the model, the finest first.
        schedule: the model's own noise schedule, if it is known.
    """

    is_installed = True  # the model merges as this state says

    def __init__(
        self, config: MergeConfig, levels: Sequence[LevelTally], schedule: NoiseSchedule | None = None
    ) -> None:
        self.config = config
        downsamples = [one.downsample for one in levels]
        self.clock = Clock(config, downsamples, schedule)
        self.knows_schedule = schedule is not None
        self._covered = [ever_merges(self.clock.rules, level, down) for level, down in enumerate(downsamples)]
        self._notes = notes_on(config, self._covered, downsamples)
        self.ledger = Ledger(list(levels), self._notes)
        self.time = ModelTime(self.clock, any(rule.keep for rule in self.clock.rules))
        self._uses_pixels = any(rule.min_pixels for rule in self.clock.rules)
        self.pays: Any = None  # says whether merging pays, see `measuring.pays`
        self.latest: Latents | None = None  # of the calls that were counted
        self._maps: dict[int, tuple[Grid, MergePlan]] | None = None  # on their device: fetching would wait
        self._decisions: dict[tuple, Decision] = {}  # rules are known by their id, and the clock keeps them

    # --- the seam -----------------------------------------------------------------------------------------------------

    def begin(self, timestep: Any, latent: Any, called: Hashable = None) -> Call:
        """A call of the model starts.

        Args:
            timestep: a number, or a tensor ``[]`` or ``[B]``; a flow model's is 1000 times its sigma.
            latent: ``[B, C, (frames,) H, W]``. Its values are compared for copies alone.
            called: what the host calls it by among the calls at its time, such as the names of its conditions; else
                their order tells them apart.
        """
        if is_mapped():
            return Call(timestep, self.clock.nothing, (_MAPPED,) * len(self._covered), None, "", {})
        self.ledger.calls += 1
        if torch.is_tensor(latent) and latent.dim() == 4:
            self.latest = Latents(latent.shape, latent.dtype, latent.device)
        now, kept = self.time.next_call(timestep, latent, called)
        rules, why_off = now.rules, now.why_off
        if self._uses_pixels and torch.is_tensor(latent) and latent.dim() in (4, 5):
            pixels = latent.shape[-2] * latent.shape[-1] * PIXELS**2
            rules = self.clock.for_pixels(now.live, pixels)
        if self.pays is not None:
            rules, why_off = self.pays.apply(rules, why_off, latent, self.clock.apply_gate)
        return Call(timestep, rules, why_off, kept, now.phase, {})

    def attend(
        self, call: Call, name: Hashable, level: int, layout: Layout, attention: Attention
    ) -> torch.Tensor | None:
        """The output of a self-attention with merged keys and values.

        Args:
            call: of `begin`.
            name: of the attention, the same at every step and different from all others of its model.
            level: of its tokens, counted from the finest.
            layout: where the picture's tokens lie among those of the attention.
            attention: the call, as its host would compute it.

        Returns:
            ``[B, S, H, d]``; None if it is left alone, which is counted: the host computes it then.
        """
        q = attention.q
        batch, tokens, heads, width = q.shape
        turn = call.turns[name] = call.turns.get(name, -1) + 1
        grid, rules = layout.grid, call.rules[level]
        picture = grid.height * grid.width
        decision = self._decisions.get((id(rules), call.why_off[level], picture, heads * width, q.device))
        if decision is None:
            decision = self.decide(call, level, picture, heads * width, q.device)
        merging, why = decision.attn, decision.why_not
        if merging is None:
            why = why or OTHER_PARTS
        elif layout.first + picture > tokens or attention.k.shape[1] != tokens:
            why = NO_GRID
        elif torch._C._len_torch_function_stack():
            why = foreign_mode()
        if why:
            self.ledger.skip(call, level, "attn", why, batch * tokens * tokens)
            return None
        kept, rule, key = call.kept, merging.rule, ((name, turn), batch, layout, tokens)
        old = None if kept is None or not rule.keep else kept.plans.get((kept.ordinal, *key))
        is_own = old is not None and old.rule is rule and old.device == q.device
        if is_own and abs(old.timestep - kept.timestep) <= rule.keep:
            plans = old.plans
        else:
            plans = self._match(call, key, level, layout, attention, merging)
        plan = plans.plan
        if plan is None:
            self.ledger.skip(call, level, "attn", TOO_SMALL, batch * tokens * tokens)
            return None
        how = Merge(plan, merging.mode, merging.proportional, merging.queries, plans.correction)
        out, way = attend(attention, how, plans.merged)
        left = (plan.num_groups if merging.queries else tokens, plan.num_groups)
        self.ledger.merge(call, level, "attn", (batch, tokens, tokens), left, way if merging.proportional else "")
        if self._maps is not None:
            self._keep_map(level, layout, plan)
        return out

    def around(
        self, call: Call, name: Hashable, level: int, part: str, grid: Grid, x: torch.Tensor,
        function: Callable[[Callable], torch.Tensor], plans: dict, keys: int = 0,
    ) -> torch.Tensor | None:  # fmt: skip
        """tomesd's way: a part of a block called with merged tokens, its output unmerged.

        Args:
            part: "attn", "crossattn" or "mlp".
            x: what the tokens are matched by, ``[B, N, C]``: the block's input.
            function: calls the part; its argument merges a tensor ``[B, N, C]``.
            plans: of this call of the block, one for each rule; filled in.
            keys: how many the unmerged call has, if it is an attention.

        Returns:
            As `attend`.
        """
        decision = self.decide(call, level, grid.height * grid.width, x.shape[2], x.device)
        merging, why = getattr(decision, part), decision.why_not
        if merging is None:
            if why or part == "attn":
                self.leave_alone(call, level, why or OTHER_PARTS, x.shape[0], x.shape[1], x.shape[1], part)
            return None
        draw = self._draw(call, level, merging.rule, x)
        out, plan, why = merge_around(call, name, grid, x, merging, draw, function, plans)
        if why:
            self.leave_alone(call, level, why, x.shape[0], x.shape[1], x.shape[1], part)
            return None
        left = plan.num_groups
        self.ledger.merge(call, level, part, (x.shape[0], x.shape[1], keys), (left, left if part == "attn" else keys))
        if self._maps is not None:
            self._maps[level] = grid, plan
        return out

    def decide(self, call: Call, level: int, tokens: int, channels: int, device: torch.device) -> Decision:
        """How the parts of a block merge in this call; tokens: of the picture in this level."""
        key = (id(call.rules[level]), call.why_off[level], tokens, channels, device)
        found = self._decisions.get(key)
        if found is None:
            if len(self._decisions) >= _MOST_DECISIONS:
                self._decisions.clear()
            found = decide(call.rules[level], call.why_off[level], tokens, channels, device.type)
            self._decisions[key] = found
        return found

    def leave_alone(
        self, call: Call | None, level: int, why: str, batch: int, queries: int, keys: int, part: str = "attn"
    ) -> None:
        """Count a part of a block that is not to be merged, or cannot be."""
        self.ledger.skip(call, level, part, why, batch * queries * keys if part == "attn" else 0)

    def _match(
        self, call: Call, key: tuple, level: int, layout: Layout, attention: Attention, merging: Merging
    ) -> Plans:
        """A new match, or one renewed, or shared with what guidance has matched."""
        rule, kept, device = merging.rule, call.kept, attention.q.device
        name, batch, *where = key
        keeps = kept is not None and rule.keep
        old = kept.find(key, rule, device, merging.renews) if keeps else None

        def match_rows(rows: slice | None, before: Plans | None) -> Plans:
            k, v = (one if rows is None else one[rows] for one in (attention.k, attention.v))
            return Plans(match(k, v, layout, rule, self._draw(call, level, rule, k), before and before.plan))

        def correct(plans: Plans) -> Plans:
            if plans.plan is None or not merging.corrected or attention.v.shape[3] != attention.q.shape[3]:
                return plans
            return Plans(plans.plan, *correction_of(attention, plans.plan, layout))

        request = Request(
            rule, device, batch, merging.renews, lambda count: (name, count, *where), match_rows, correct
        )
        return match_or_reuse(kept, request, old)

    def _keep_map(self, level: int, layout: Layout, plan: MergePlan) -> None:
        """Of a film its first frame's."""
        grid = Grid(layout.grid.height // layout.grid.frames, layout.grid.width)
        group = plan.group[:, layout.first : layout.first + grid.height * grid.width]
        self._maps[level] = grid, MergePlan(group, plan.num_groups)

    @staticmethod
    def _draw(call: Call, level: int, rule: Any, x: torch.Tensor) -> Draw | None:
        return Draw(rule.seed, level, stamp_of(call.stamp, x)) if rule.use_rand else None

    # --- what a host tells, and asks ----------------------------------------------------------------------------------

    @property
    def ever_merges(self) -> bool:
        """Is there a rule that merges at some time, whatever the picture's size?"""
        return any(self._covered)

    @property
    def wants_time(self) -> bool:
        """Does anything hang on the time of a call?"""
        return self.time.is_wanted

    @property
    def is_live(self) -> bool:
        """Does any rule hold at the time that was told last?"""
        return bool(self.time.now.live)

    @contextmanager
    def sampling(self: Own, pictures: int | None = None, timesteps: Sequence[float] | None = None) -> Iterator[Own]:
        """While in here, this thread's calls of the model are the steps of one picture, or of one batch.

        Matches are kept inside (``keep``) and let go of at the end; outside of any sampling nothing is kept. A
        diffusers pipeline's loop is a sampling by itself.

        Args:
            pictures, timesteps: as of `set_time`; a diffusers pipeline tells them by itself.
        """
        _check_pictures(pictures)
        _check_timesteps(timesteps)
        with self.time.sample(lambda batch: Guidance(pictures) if pictures else None, timesteps):
            yield self

    def set_time(
        self, *, percent: float | None = None, timestep: float | None = None, sigma: float | None = None,
        sampling: Hashable = None, pictures: int | None = None, timesteps: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """Tell the time before a call of the model, on whichever scale is at hand; without arguments, stop telling.

        Args:
            percent: 0..1, ComfyUI's ``percent_to_sigma`` scale.
            timestep: of Stable Diffusion's schedule.
            sigma: the noise's standard deviation relative to data of unit variance.
            sampling: whatever tells this picture's sampling from all others, the same at each of its steps. Matches are
                kept over steps (``keep``) only if it is given.
            pictures: how many are made, if calls are made of copies of their latents in the same order, in one batch or
                in several, as guidance makes them for a prompt and a negative one. Copies share their matches then:
                guidance multiplies how differently its two predictions were changed.
            timesteps: of Stable Diffusion's schedule, of all steps of this sampling, the same object at each of them. A
                pass that begins late, as image to image and hires passes do, then leaves the share of the work that a
                whole picture leaves. Give none if it goes on with a picture that another sampling has begun.

        Raises:
            TypeError, ValueError: for a number that is no such time.
        """
        _check_time("percent", percent, 1.0)
        _check_time("timestep", timestep)
        _check_time("sigma", sigma)
        _check_pictures(pictures)
        _check_timesteps(timesteps)
        self.time.set(percent, timestep, sigma, sampling, pictures, timesteps)

    def keep_maps(self, keep: bool = True) -> None:
        """From now on keep the latest map of each level on its device, for `maps`."""
        self._maps = {} if keep else None

    def maps(self) -> dict[int, MergeMap]:
        """Level -> what an attention of it merged last; empty unless `keep_maps` was called before the model ran.

        Brings them to the CPU, which waits for the device.
        """
        kept = self._maps or {}
        return {level: MergeMap(grid, plan.group.cpu(), plan.num_groups) for level, (grid, plan) in kept.items()}

    def reset_counts(self) -> None:
        """Begin the report, and the maps, anew: for a host whose users ask about one picture at a time."""
        self.ledger.reset()
        if self.pays is not None:
            self.pays.used.clear()
        self.keep_maps(self._maps is not None)

    def report(self) -> Report:
        """What was merged so far, where, and what was skipped and why."""
        settings = tuple(describe(self.config, rule) for rule in self.config.rules)
        gains = () if self.pays is None else tuple(self.pays.used)
        notes = (*kernels.notes(), *self._more_notes())
        return make_report(self.ledger, self._covered, settings, self.is_installed, notes, gains)

    def _more_notes(self) -> tuple[str, ...]:
        return ()


def _check_time(name: str, value: float | None, most: float = math.inf) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; use a number")
    if not 0 <= value <= most or value == math.inf:
        raise ValueError(f"{name}={value!r} is no time; use a number from 0 {'up' if most == math.inf else 'to 1'}")


def _check_pictures(value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"pictures={value!r} is no number of pictures; use a whole number from 1 up, or None")


def _check_timesteps(values: Sequence[float] | None) -> None:
    for value in () if values is None else values:
        _check_time("timesteps", value)
