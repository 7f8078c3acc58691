"""What an ApplyToMe node puts on its branch of the graph: merging while this branch samples, and only then.

Branches of a graph share one model. So nothing is put on it: while this branch samples, each of its own calls of the
model carries a function for its attentions to ask.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from . import host, slot
from .host import hosting
from .sampling import HostSampling, is_flow, steps_text, timestep_of
from .transformers import TransformerMerging, piece_of
from .unets import UnetMerging

logger = logging.getLogger(__name__)
_TITLE = "ToMe"
_NOT_MEASURED = "the gain was not measured"
Merging = UnetMerging | TransformerMerging


class Outcome(NamedTuple):
    """What is left of a sampling. lines: the report for people, ten at most; line: for the log; report: the engine's.

    maps: level -> (down-sampling, what merged last).
    """

    lines: Sequence[str] = (f"{_TITLE}: the model was not called",)
    line: str = lines[0]
    report: Any = hosting.Report(patched=False)
    maps: dict[int, tuple[int, Any]] = {}  # noqa: RUF012 (never changed)


class BranchMerging:
    """The two wrappers of one ApplyToMe: around each sampling, and around each call of the model.

    config: the settings. node_id: where the report is shown. beside: what the report is to say of the node's inputs.
    measures: is what merging gains to be measured after a sampling? latest: what is left of the sampling before.
    """

    def __init__(self, config: Any, node_id: Any, beside: Sequence[str] = (), measures: bool = False) -> None:
        self.config, self.latest = config, Outcome()
        self._node_id, self._beside, self._measures = node_id, tuple(beside), measures
        self._sampling: Sampling | None = None  # the innermost that goes on

    def __deepcopy__(self, memo: dict) -> BranchMerging:
        # nodes that copy a model's options mean the settings
        return self

    def apply_model(
        self, executor: Any, x: Any, t: Any, c_concat: Any = None, c_crossattn: Any = None, control: Any = None,
        transformer_options: dict[str, Any] | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Around BaseModel.apply_model: this call of the model merges, within a sampling and outside of any.

        x: latents; t: a sigma for each of them.
        """

        def run(options: dict[str, Any]) -> Any:
            return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)

        sampling = self._sampling or Sampling(self.config)
        return sampling.call(executor.class_obj, x, t, transformer_options or {}, run)

    def outer_sample(
        self, executor: Any, noise: Any, latent_image: Any, sampler: Any, sigmas: Any, denoise_mask: Any = None,
        callback: Any = None, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Around a whole sampling: counts begin with it, and the report follows."""
        time = HostSampling(sampler, sigmas, noise)
        sampling = Sampling(self.config, time)
        outer, self._sampling = self._sampling, sampling
        stopped = True  # an interrupt is an exception, too
        try:
            out = executor(noise, latent_image, sampler, sigmas, denoise_mask, time.hear(callback), *args, **kwargs)
            stopped = False
            return out
        finally:
            self._sampling = outer
            steps = steps_text(time.steps_done, sigmas, stopped, len(time.computed))
            self.latest = sampling.end(steps, self._beside, stopped, self._measures and outer is None)
            host.say("\n".join(self.latest.lines), self._node_id, self.latest.line)


class Sampling:
    """One sampling of a branch: what it merges in, and what is counted of it. time: None outside of any."""

    def __init__(self, config: Any, time: HostSampling | None = None) -> None:
        self._config, self._time, self._name = config, time or HostSampling(), time
        self._models: dict[Any, Merging | str] = {}  # or why it steps aside
        self._live: dict[float, bool] = {}  # sigma -> was merging on

    def call(self, model: Any, x: Any, t: Any, options: dict[str, Any], run: Any) -> Any:
        """What ``run(transformer_options)`` gives, a call of the model; merged."""
        unet, schedule = model.diffusion_model, model.model_sampling
        # several GPUs sample in threads, each with a model of its own
        merging = self._models.get(unet) or self._models.setdefault(unet, self._make(unet, options))
        if isinstance(merging, str):
            return run(options)
        if merging.state.wants_time:
            self._tell_time(merging, schedule, x, t, options)
        latent, names = host.as_computed(model, x), options.get("uuids")
        timestep = 1000.0 * t if merging.flows and is_flow(schedule) else schedule.timestep(t)
        call = merging.state.begin(timestep, latent, tuple(names) if names else None)
        with merging.answering(call, latent, options) as ask:
            out = run(slot.fill(options, ask))
        self._time.note_call(options)
        return out

    def end(self, steps: str, beside: Sequence[str], stopped: bool, measures: bool) -> Outcome:
        """What is left of it. steps: how many, in words; beside: what else is to be said."""
        strangers = [why for why in self._models.values() if isinstance(why, str)]
        merged = [one for one in self._models.values() if not isinstance(one, str)]
        if not merged:
            lines = [f"{_TITLE}: {why}" for why in strangers]
            return Outcome(lines, lines[0]) if lines else Outcome()
        measured = []
        for one in merged:
            one.state.set_time()
            if measures and not stopped:
                measured.append(_measure(one))
        report = replace(hosting.Report.join(one.state.report() for one in merged), patched=True)
        live = [f"between start and end at {sum(self._live.values())} of {len(self._live)} noise levels"]
        more = [*filter(None, measured), *(live if self._live else ()), *strangers, *beside]
        line = f"{_TITLE}: {', '.join(filter(None, [steps, report.headline]))}"
        first, levels = merged[0].state, merged[0].state.report().levels
        maps = {level: (levels[level].downsample, one) for level, one in sorted(first.maps().items())}
        return Outcome(report.lines(_TITLE, [steps], more), line, report, {} if stopped else maps)

    def _make(self, model: Any, options: dict[str, Any]) -> Merging | str:
        try:
            if host.is_compiled(model, options):
                return "stepped aside: the model is compiled"
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
        if percent is not None:
            self._live[sigma] = state.is_live


def layout_of(model: Any) -> str:
    """Whose strengths a model has, see `tome_core.strength`. Raises TypeError or ValueError where it cannot merge."""
    unet = hosting.find_unet(model)
    return hosting.layout_of(unet) if piece_of(unet) is None else hosting.TRANSFORMER


def _measure(merging: Merging) -> str:
    """What merging gains in calls as the sampling's latest, in a sentence; "" if that was known. Never fails."""
    state = merging.state
    if not hasattr(state, "measure_latest"):
        return f"{_NOT_MEASURED}: that is done with UNets alone"
    if state.latest is None:
        return f"{_NOT_MEASURED}: nothing was called that merging is for"
    logger.info("%s: measuring what merging gains here, once for pictures of this size", _TITLE)
    timed = hosting.clock_for(state.latest["device"])

    def clock() -> float:
        if host.is_interrupted():  # which ends a measurement and no picture: that is done
            raise RuntimeError("it was cancelled")
        return timed()

    try:
        gain = state.measure_latest(clock=clock, told=merging.told, brings_weights=True)
    except Exception as error:  # whatever else is on the model; nobody asked for more than a picture
        return f"{_NOT_MEASURED}: {error}"
    return "" if gain is None else f"measured: {gain.line}"
