"""What an ApplyToMe node puts on its branch of the graph: merging while this branch samples, and only then.

Branches of a graph share one model. So nothing is put on it: while this branch samples, each of its own calls of the
model carries a function for its attentions to ask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from . import asking, host, slot
from .host import hosting
from .sampling import HostSampling, is_flow, timestep_of
from .transformers import TransformerMerging, piece_of
from .unets import UnetMerging

_TITLE = "ToMe"
_PAST_US = "nothing merged: another node (DeepCache is one) calls the model past this one; take that node off to merge"
# in transformer_options: what else changes how long a call takes, or stands in for one
_BESIDE = ("patches", "patches_replace", "easycache", "lazycache")
Merging = UnetMerging | TransformerMerging


class Outcome(NamedTuple):
    """What is left of a sampling: a line or two, all of it as text, data; maps: (down-sampling, latest), by level."""

    lines: Sequence[str]
    details: Sequence[str]
    data: dict[str, Any]
    report: Any
    maps: dict[int, tuple[int, Any]]


class BranchMerging:
    """The two wrappers of one ApplyToMe: around each sampling, and around each call of the model.

    config: None of a node that is off, whose samplings are timed and nothing else.
    line, facts: what it was asked for, for people and for programs, with what was "unknown" of it. node_id, name: where
    the report is shown, and whose it is in the log. latest: what is left of the last sampling.
    """

    def __init__(self, config: Any, line: str, facts: dict[str, Any], node_id: Any, name: str) -> None:
        self.config, self._asked = config, (line, facts)
        self._node_id, self._name = node_id, name
        self.latest: Outcome | None = None
        self._shown: tuple[Any, list[str]] = (None, [])  # in one queue: two passes may sample with one node
        self._sampling: Sampling | None = None  # the innermost that goes on

    def __deepcopy__(self, memo: dict) -> BranchMerging:
        return self  # nodes that copy a model's options mean the settings

    def apply_model(
        self, executor: Any, x: Any, t: Any, c_concat: Any = None, c_crossattn: Any = None, control: Any = None,
        transformer_options: dict[str, Any] | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Around BaseModel.apply_model: this call of the model merges, within a sampling and outside of any."""
        sampling = self._sampling or Sampling(self.config)
        sampling.is_alone = sampling.is_alone and control is None
        return sampling.call(
            executor.class_obj, x, t, transformer_options or {},
            lambda options, **more: executor(x, t, c_concat, c_crossattn, control, options, **kwargs, **more),
        )  # fmt: skip

    def outer_sample(
        self, executor: Any, noise: Any, latent_image: Any, sampler: Any, sigmas: Any, denoise_mask: Any = None,
        callback: Any = None, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Around a whole sampling: counts begin with it, and the report follows."""
        time = HostSampling(sampler, sigmas, noise)
        sampling, heard = Sampling(self.config, time), time.heard.listening(callback)
        outer, self._sampling = self._sampling, sampling
        try:
            return executor(noise, latent_image, sampler, sigmas, denoise_mask, heard, *args, **kwargs)
        except BaseException:
            time.stopped = True
            raise
        finally:
            self._sampling = outer
            if outer is not None:
                outer.is_alone = False
            if self.config is None:
                sampling.remember()
            else:
                self._tell(sampling.end(*self._asked))

    def _tell(self, outcome: Outcome) -> None:
        self.latest, queue, (last, shown) = outcome, getattr(host.server(), "last_prompt_id", None), self._shown
        self._shown = queue, [*(shown if queue is not None and queue == last else ()), *outcome.lines]
        host.say("\n".join(outcome.lines), None, self._name)
        host.show("\n".join(self._shown[1]), self._node_id)


class Sampling:
    """One sampling of a branch: what it merges in, and what is counted of it. time: None outside of any."""

    def __init__(self, config: Any, time: HostSampling | None = None) -> None:
        self._config, self._time, self._name = config, time or HostSampling(), time
        self._models: dict[Any, Merging | str] = {}  # or why it steps aside
        self._usual: frozenset[str] | None = None  # what the first call's options had
        self.is_alone = True  # nothing else is known to change how long a call takes

    def call(self, model: Any, x: Any, t: Any, options: dict[str, Any], run: Any) -> Any:
        """What ``run(transformer_options)`` gives, a call of the model; merged. run: takes more keywords, too."""
        unet, schedule = model.diffusion_model, model.model_sampling
        # several GPUs sample in threads, each with a model of its own
        merging = self._models.get(unet) or self._models.setdefault(unet, self._make(unet, options))
        given = frozenset(name for name, one in options.items() if one is not None and one is not False)
        self.is_alone = self.is_alone and not any(_holds(options.get(name)) for name in _BESIDE)
        names = {*map(str, given), *(str(key) for kind in options.get("wrappers", {}).values() for key in kind)}
        self._time.heard.call(x, slot.name_in_force(options), *sorted(names))
        if isinstance(merging, str):
            return run(options)
        if merging.state.wants_time:
            self._tell_time(merging, schedule, x, t, options)
        # in the dtype in which a BaseModel hands them to its model
        latent = x.to(getattr(model, "manual_cast_dtype", None) or model.get_dtype())
        names = options.get("uuids")
        self._usual = self._usual or given
        timestep = 1000.0 * t if merging.flows and is_flow(schedule) else schedule.timestep(t)
        call = merging.state.begin(timestep, latent, tuple(names) if names else None)
        if given - self._usual:  # guidance that perturbs this call, may shuffle its tokens: no match but its own fits
            call.kept = None
        with merging.answering(call, latent, options) as ask:
            out = asking.call(run, options, ask, **(asking.GRAPH if merging.is_compiled else {}))
        self._time.note_call(options)
        return out

    def end(self, asked: str, facts: dict[str, Any]) -> Outcome:
        """What is left of it."""
        time = self._time
        strangers = [why for why in self._models.values() if isinstance(why, str)]
        merged = [one for one in self._models.values() if not isinstance(one, str)]
        for one in merged:
            one.state.set_time()
        report = hosting.Report.join(one.state.report() for one in merged)
        report = replace(report, patched=bool(merged), own=self.remember(report))
        if merged:
            first, more = report.headline, [report.hindered, *strangers]
        else:
            first, *more = strangers or [_PAST_US if time.steps["steps"] else "the model was not called"]
        more = [*filter(None, more), *facts["unknown"]]
        line = f"{_TITLE}: {', '.join(filter(None, [asked, time.text, first]))}"
        details = report.lines(_TITLE, [asked, time.text], more)
        data = {**facts, "line": line, "stepped_aside": strangers, **time.steps, **report.as_data()}
        maps = {}
        if merged and not time.stopped:
            found, levels = merged[0].state.maps(), merged[0].state.report().levels
            maps = {level: (levels[level].downsample, one) for level, one in sorted(found.items())}
        lines = [line, *(["; ".join(more)] if more else [])]
        return Outcome(lines, details if merged else lines, data, report, maps)

    def remember(self, report: Any = None) -> str:
        """What people's own pictures say, this one among them. report: on what merged in it."""
        if self._time.stopped or not self.is_alone or len(self._models) != 1:
            return ""
        (unet,), time = self._models, self._time
        return time.heard.remember(unet, self._config, report, time.sampler)

    def _make(self, model: Any, options: dict[str, Any]) -> Merging | str:
        if self._config is None:
            return "off"
        try:
            kind = UnetMerging if piece_of(model) is None else TransformerMerging
            merging = kind(model, self._config, options)
        except (hosting.UnsupportedModelError, TypeError) as error:
            return f"stepped aside: {error}"
        merging.state.keep_maps()
        return merging

    def _tell_time(self, merging: Merging, schedule: Any, x: Any, t: Any, options: dict[str, Any]) -> None:
        time, state, start = self._time, merging.state, self._config.start_percent
        sigma, percent = time.sigma(t, options), None
        if not 0 <= sigma < math.inf:  # nobody's picture should depend on how we take it
            state.set_time()
            return
        if self._config.uses_percent:  # the engine is told a percent that is in the range or out of it as the level is
            within = time.is_between(start, self._config.end_percent, sigma, schedule)
            percent = start if within else 0.0 if start > 0 else 1.0
        state.set_time(
            percent=percent, timestep=timestep_of(sigma, schedule, merging.flows), sampling=self._name,
            pictures=time.pictures_in(x, options), timesteps=time.timesteps(schedule, options, merging.flows),
        )  # fmt: skip


def layout_of(model: Any) -> str:
    """Whose strengths a model has, see `tome_core.strength`. Raises TypeError or ValueError where it cannot merge."""
    unet = hosting.find_unet(model)
    return hosting.layout_of(unet) if piece_of(unet) is None else hosting.TRANSFORMER


def _holds(value: Any) -> bool:
    """Is there anything in what a key of transformer_options has?"""
    return any(map(_holds, value.values())) if isinstance(value, dict) else bool(value)
