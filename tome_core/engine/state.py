"""The state of one patch: settings in force on one model, and everything that is remembered while it runs.

An adapter opens each call of its model (`begin`), and gives every self-attention there to `attend`, as its host would
compute it. `around` is tomesd's way, for whatever else is to run on merged tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.overrides

from ..attention.correction import Pair
from ..attention.merged import Attention, Merge, attend, correction_of
from ..merging import kernels
from ..merging.grid import Draw, Grid, Layout
from ..merging.methods import METHODS, MatchOptions
from ..merging.plan import MergePlan
from ..reporting.ledger import NO_GRID, OTHER_PARTS, TOO_SMALL, Ledger, LevelTally
from ..reporting.report import Report
from ..settings.config import MergeConfig, MergeRule, describe, notes_on
from ..settings.schedule import LevelRules, NoiseSchedule, ever_merges
from .decision import Call, MergeMap, decide
from .match import match
from .plan_cache import Plans
from .time import Clock, ModelTime


class State:
    """Settings in force on one model. It holds no module.

    ever_merges: there is a rule that merges at some time, whatever the picture's size. wants_time: something hangs on
    the time of a call.

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
        for number, level in enumerate(levels):
            level.level, level.covered = number, ever_merges(self.clock.rules, number, level.downsample)
        self.ever_merges = any(level.covered for level in levels)
        self.ledger = Ledger(list(levels), notes_on(config, self.ever_merges, downsamples))
        self.time = ModelTime(self.clock, any(rule.keep for rule in self.clock.rules))
        self.wants_time = self.time.is_wanted
        self.refused: dict[Hashable, str] = {}  # by attention function, why it is left alone while the patch is on
        self.pays: Any = None  # says whether merging pays, see `measuring.pays`; else the number of tokens does
        self._by_tokens = (None,) * len(levels)
        self._maps: dict[int, MergeMap] | None = None  # on their device: fetching would wait
        # of `decide`. Rules stand in its keys by their id, which no others get: the clock keeps them
        self._decisions: dict[tuple, tuple[LevelRules, str]] = {}

    # --- the seam -----------------------------------------------------------------------------------------------------

    def begin(self, timestep: Any, latent: Any, called: Hashable = None) -> Call:
        """A call of the model starts.

        Args:
            timestep: a number, or a tensor ``[]`` or ``[B]``; a flow model's is 1000 times its sigma.
            latent: ``[B, C, (frames,) H, W]``. Its values are looked at only to find copies of one latent in a batch.
            called: what the host calls it by among the calls at its time, such as the names of its conditions; else
                their order tells them apart.
        """
        self.ledger.calls += 1
        now, kept = self.time.next_call(timestep, latent, called)
        gates = self._by_tokens if self.pays is None else self.pays.gates(now.rules, latent)
        call = Call(self, timestep, now.rules, now.why_off, gates, kept)
        if torch.is_tensor(latent) and latent.dim() == 4 and self.ever_merges:
            for one in self.ledger.levels:
                if not one.covered and one.blocks:  # nobody asks there, but its attention is part of the whole
                    tokens = math.prod(-(-side // one.downsample) for side in latent.shape[2:])
                    self.ledger.add_whole(one.level, one.blocks * len(latent) * tokens**2)
        return call

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
        batch, tokens = q.shape[:2]
        turn = call.turns[name] = call.turns.get(name, -1) + 1
        picture = layout.grid.height * layout.grid.width
        known = self._decisions.get((id(call.rules[level]), call.why_off[level], call.gates[level], picture, q.device))
        rules, why = known or self.decide(call, level, picture, q.device)
        rule = rules.attn
        if rule is None:
            why = why or OTHER_PARTS
        elif layout.first + picture > tokens or attention.k.shape[1] != tokens:
            why = NO_GRID
        elif torch._C._len_torch_function_stack():
            why = foreign_mode()
        if why:
            self.ledger.skip(level, "attn", why, batch * tokens * tokens)
            return None
        kept, key, merged = call.kept, ((name, turn), batch, layout, tokens), None
        exact = 0
        plans = None if kept is None or not rule.keep else kept.plans.get((kept.ordinal, *key))
        is_own = plans is not None and plans.rule is rule and plans.device == q.device
        if not is_own or abs(plans.timestep - kept.timestep) > rule.keep:  # as in `KeptPlans.serve`
            plans, merged = self._match(call, key, level, layout, attention, rule)
            exact = 0 if plans.correction is None else plans.correction.asked
        plan = plans.plan
        if plan is None:
            self.ledger.skip(level, "attn", TOO_SMALL, batch * tokens * tokens)
            return None
        queries = rule.side == "qkv"
        out, way = attend(attention, Merge(plan, rule.proportional, queries, plans.correction), merged)
        left = (plan.num_groups if queries else tokens, plan.num_groups)
        way = way if rule.proportional else ""
        self.ledger.merge(level, "attn", (batch, tokens, tokens), left, way, exact)
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
            plans: by the id of a rule, the plans that parts of the block have in this call; a missing one is added.
            keys: how many the unmerged call has, if it is an attention.

        Returns:
            As `attend`.
        """
        rules, why = self.decide(call, level, grid.height * grid.width, x.device)
        rule, plan = getattr(rules, part), None
        if rule is None:
            why = why or (OTHER_PARTS if part == "attn" else "")
        else:
            if id(rule) not in plans:
                plans[id(rule)] = self._match_input(call, name, level, grid, x, rule)
            plan = plans[id(rule)]
            out, why = (None, TOO_SMALL) if plan is None else _run_merged(function, x, plan)
        if why:
            self.leave_alone(level, why, x.shape[0], x.shape[1], x.shape[1], part)
        if why or plan is None:
            return None
        left = plan.num_groups
        self.ledger.merge(level, part, (x.shape[0], x.shape[1], keys), (left, left if part == "attn" else keys))
        if self._maps is not None:
            self._keep_map(level, Layout(grid), plan)
        return out

    def decide(self, call: Call, level: int, tokens: int, device: torch.device) -> tuple[LevelRules, str]:
        """The rules by which the parts of a block merge in this call; and why there are none, "" if there are.

        tokens: of the picture in this level.
        """
        rules, why_off, gate = call.rules[level], call.why_off[level], call.gates[level]
        key = (id(rules), why_off, gate, tokens, device)
        if key not in self._decisions:
            self._decisions[key] = decide(rules, why_off, tokens, device.type, gate)
        return self._decisions[key]

    def leave_alone(self, level: int, why: str, batch: int, queries: int, keys: int, part: str = "attn") -> None:
        """Count a part of a block that is not to be merged, or cannot be."""
        self.ledger.skip(level, part, why, batch * queries * keys if part == "attn" else 0)

    def _match(
        self, call: Call, key: tuple, level: int, layout: Layout, attention: Attention, rule: MergeRule
    ) -> tuple[Plans, Pair | None]:
        """A new match, or one renewed; and merged keys and values ``[B, G, H*d]``, if the correction has made them.

        The match of one copy of the latents serves all of them, in this call and in others at its time, because
        guidance multiplies how differently merging has changed its two predictions.
        """
        (q, k, v), (name, batch, *where) = attention[:3], key
        kept = call.kept if rule.keep else None
        copies, matched, place = 1, 0, ("alone", kept and kept.ordinal)
        if kept is not None and kept.shared is not None and batch % kept.shared[0] == 0:  # not of a piece of the batch
            copies, matched, place = kept.shared[1:]
        count, renews = batch // copies, rule.refine and METHODS[rule.method].compares

        def match_rows(old: MergePlan | None) -> MergePlan | None:
            own_k, own_v = (one[matched * count : (matched + 1) * count] for one in (k, v))
            draw = _draw(call, level, rule, own_k)
            return match(own_k, own_v, layout, rule, draw, old if renews else None)

        if kept is None:
            found = Plans(match_rows(None), None, rule, q.device)
        else:
            found = kept.serve((place, name, count, *where), rule, q.device, match_rows)
        plan, correction, merged = found.plan and found.plan.repeat(copies), None, None
        if plan is not None and rule.corrects and v.shape[3] == q.shape[3]:
            correction, merged = correction_of(attention, plan, layout)
        found = found._replace(plan=plan, correction=correction)
        if kept is not None:
            kept.plans[(kept.ordinal, *key)] = found
        return found, merged

    def _match_input(
        self, call: Call, name: Hashable, level: int, grid: Grid, x: torch.Tensor, rule: MergeRule
    ) -> MergePlan | None:
        """A match of a block's input, or what is kept of an earlier one."""
        turn = call.turns[name, id(rule)] = call.turns.get((name, id(rule)), -1) + 1

        def match_all(_: MergePlan | None) -> MergePlan | None:
            options = MatchOptions(rule.effective_ratio, rule.sx, rule.sy, _draw(call, level, rule, x))
            return METHODS[rule.method].match(x, grid, options)

        if call.kept is None or not rule.keep:
            return match_all(None)
        key = (call.kept.ordinal, name, "around", turn, x.shape[0], grid)
        return call.kept.serve(key, rule, x.device, match_all).plan

    def _keep_map(self, level: int, layout: Layout, plan: MergePlan) -> None:
        """Of a film its first frame's."""
        grid = Grid(layout.grid.height // layout.grid.frames, layout.grid.width)
        group = plan.group[:, layout.first : layout.first + grid.height * grid.width]
        self._maps[level] = MergeMap(grid, group, plan.num_groups)

    # --- what a host tells, and asks ----------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Does any rule hold at the time that was told last?"""
        return bool(self.time.now.live)

    @contextmanager
    def sampling(self, pictures: int | None = None, timesteps: Sequence[float] | None = None) -> Iterator[State]:
        """While in here, this thread's calls of the model are the steps of one picture, or of one batch.

        Matches are kept inside (``keep``) and let go of at the end; outside of any sampling nothing is kept. A
        diffusers pipeline's loop is a sampling by itself.

        Args:
            pictures, timesteps: as of `set_time`; a diffusers pipeline tells them by itself.
        """
        _check_pass(pictures, timesteps)
        with self.time.sample(lambda batch: (pictures, 0) if pictures else None, timesteps):
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
                in several, as guidance makes them for a prompt and a negative one. Copies share their matches then.
            timesteps: of Stable Diffusion's schedule, of all steps of this sampling, the same object at each of them. A
                pass that begins late, as image to image and hires passes do, then leaves the share of the work that a
                whole picture leaves. Give none if it goes on with a picture that another sampling has begun.

        Raises:
            TypeError, ValueError: for a number that is no such time.
        """
        _check_time("percent", percent, 1.0)
        _check_time("timestep", timestep)
        _check_time("sigma", sigma)
        _check_pass(pictures, timesteps)
        self.time.set(percent, timestep, sigma, sampling, pictures, timesteps)

    def keep_maps(self, keep: bool = True) -> None:
        """From now on keep the latest map of each level on its device, for `maps`."""
        self._maps = {} if keep else None

    def maps(self) -> dict[int, MergeMap]:
        """Level -> what an attention of it merged last; empty unless `keep_maps` was called before the model ran.

        Brings them to the CPU, which waits for the device.
        """
        return {level: one._replace(group=one.group.cpu()) for level, one in (self._maps or {}).items()}

    def reset_counts(self) -> None:
        """Begin the report, and the maps, anew: for a host whose users ask about one picture at a time."""
        self.ledger.reset()
        if self.pays is not None:
            self.pays.used.clear()
        self.keep_maps(self._maps is not None)

    def report(self) -> Report:
        """What was merged so far, where, and what was skipped and why."""
        gains = () if self.pays is None else tuple(self.pays.used)
        ledger, notes = self.ledger, (*self.ledger.notes, *kernels.notes())
        levels = tuple(deepcopy(ledger.levels))
        return Report(self.is_installed, describe(self.config), ledger.calls, levels, notes, gains)


def _check_time(name: str, value: float | None, most: float = math.inf) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; use a number")
    if not 0 <= value <= most or value == math.inf:
        raise ValueError(f"{name}={value!r} is no time; use a number from 0 {'up' if most == math.inf else 'to 1'}")


def _check_pass(pictures: int | None, timesteps: Sequence[float] | None) -> None:
    if pictures is not None and (isinstance(pictures, bool) or not isinstance(pictures, int) or pictures < 1):
        raise ValueError(f"pictures={pictures!r} is no number of pictures; use a whole number from 1 up, or None")
    for value in timesteps or ():
        _check_time("timesteps", value)


def _draw(call: Call, level: int, rule: MergeRule, x: torch.Tensor) -> Draw | None:
    """What a match of these samples draws from. Its time is ``[1]`` or ``[B]``; a film's frames have their sample's."""
    if not rule.use_rand:
        return None
    time = call.stamp
    if torch.is_tensor(time):
        time = time.detach().reshape(-1)
        if len(time) > 1:
            time = time[:1] if len(x) % len(time) else time.repeat_interleave(len(x) // len(time))
    elif time is not None:
        time = torch.full((1,), float(time), dtype=torch.float32, device=x.device)
    return Draw(rule.seed, level, time)


def _run_merged(function: Callable, x: torch.Tensor, plan: MergePlan) -> tuple[torch.Tensor | None, str]:
    """The output of a part that is called with merged tokens, unmerged; or why it cannot be."""
    try:
        out = function(plan.merge)
    except (MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception:
        return None, "refuses merged tokens"
    if not torch.is_tensor(out) or out.dim() != 3 or out.shape[:2] != (x.shape[0], plan.num_groups):
        return None, "what it returned cannot be unmerged"
    return plan.unmerge(out), ""


def foreign_mode() -> str:
    """Why an attention must see all tokens: a function mode of another program looks at its functions. "" if none does.

    Guidance that perturbs attention acts in one, and gives up if there are fewer keys than queries.
    """
    modes = torch.overrides._get_current_function_mode_stack()
    names = [type(one).__name__ for one in modes if type(one).__module__ != "torch.utils._device"]
    return f"{' and '.join(names)} looks at its functions" if names else ""
