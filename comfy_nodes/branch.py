"""What an ApplyToMe node puts on its branch of the graph: merging while this branch samples, and only then.

Branches of a graph share one model. So nothing is put on it: while this branch samples, each of its own calls of the
model carries a function for its attentions to ask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from . import host, measuring, slot
from .engine import hosting
from .layouts import piece_of
from .sampling import HostSampling, flow_time, relative_sigma, steps_text
from .transformers import TransformerMerging
from .unets import UnetMerging

# arguments of outer_sample(noise, latent_image, sampler, sigmas, denoise_mask, callback, ...), by place and name
_NOISE, _SAMPLER, _SIGMAS, _CALLBACK = (0, "noise"), (2, "sampler"), (3, "sigmas"), (5, "callback")
# of apply_model(x, t, c_concat, c_crossattn, control, transformer_options, ...); t: a sigma for each sample
_X, _T, _OPTIONS = (0, "x"), (1, "t"), (5, "transformer_options")
_TITLE = "ToMe"

Merging = UnetMerging | TransformerMerging


class Outcome(NamedTuple):
    """What is left of a sampling. lines: the report for people, ten at most; line: for the log; report: the engine's.

    maps: level -> (down-sampling, what merged last).
    """

    lines: tuple[str, ...] = (f"{_TITLE}: the model was not called",)
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

    def apply_model(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around BaseModel.apply_model: this call of the model merges, within a sampling and outside of any."""
        return (self._sampling or Sampling(self.config)).call(executor, args, kwargs)

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a whole sampling: counts begin with it, and the report follows."""
        sigmas = _argument(*_SIGMAS, args, kwargs)
        time = HostSampling(_argument(*_SAMPLER, args, kwargs), sigmas, _argument(*_NOISE, args, kwargs))
        sampling = Sampling(self.config, time)
        args, kwargs = _replace(*_CALLBACK, time.hear(_argument(*_CALLBACK, args, kwargs)), args, kwargs)
        outer, self._sampling = self._sampling, sampling
        stopped = True  # an interrupt is an exception, too
        try:
            out = executor(*args, **kwargs)
            stopped = False
            return out
        finally:
            self._sampling = outer
            planned = len(sigmas) - 1 if hasattr(sigmas, "__len__") and len(sigmas) else None
            steps = steps_text(time.steps_done, planned, stopped, time.steps_computed)
            measures = self._measures and outer is None and not stopped
            self.latest = sampling.end(steps, self._beside, measures)
            host.say("\n".join(self.latest.lines), self._node_id, self.latest.line)


class Sampling:
    """One sampling of a branch: what it merges in, and what is counted of it."""

    def __init__(self, config: Any, time: HostSampling | None = None) -> None:
        self._config = config
        self._time, self._is_named = time or HostSampling(), time is not None
        self._models: dict[Any, Merging | str] = {}  # or why it steps aside
        self._live: dict[float, bool] = {}  # sigma -> was merging on

    def call(self, executor: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of the model, merged."""
        model, options = executor.class_obj, _argument(*_OPTIONS, args, kwargs) or {}
        x, t = _argument(*_X, args, kwargs), _argument(*_T, args, kwargs)
        unet = model.diffusion_model
        # several GPUs sample in threads, each with a model of its own
        merging = self._models.get(unet) or self._models.setdefault(unet, self._make(unet, options))
        if isinstance(merging, str):
            return executor(*args, **kwargs)
        state, flow = merging.state, flow_time(t, model.model_sampling) if merging.flows else None
        if state.wants_time:
            self._tell_time(merging, model.model_sampling, x, t, options)
        latent, names = host.as_computed(model, x), options.get("uuids")
        time = model.model_sampling.timestep(t) if flow is None else flow
        call = state.begin(time, latent, tuple(names) if names else None)
        with merging.answering(call, latent, options) as ask:
            args, kwargs = _replace(*_OPTIONS, slot.fill(options, ask), args, kwargs)
            out = executor(*args, **kwargs)
        self._time.note_call(options)
        return out

    def end(self, steps: str, beside: Sequence[str], measures: bool) -> Outcome:
        """What is left of it. steps: how many, in words; beside: what else is to be said."""
        strangers = [why for why in self._models.values() if isinstance(why, str)]
        merged = [one for one in self._models.values() if not isinstance(one, str)]
        if not merged:
            lines = tuple(f"{_TITLE}: {why}" for why in strangers)
            return Outcome(lines, lines[0]) if lines else Outcome()
        measured = []
        for one in merged:
            one.state.set_time()
            if measures:
                measured.append(measuring.measure(one.state, one.told))
        report = replace(hosting.Report.join(one.state.report() for one in merged), patched=True)
        live = [f"between start and end at {sum(self._live.values())} of {len(self._live)} noise levels"]
        more = [*filter(None, measured), *(live if self._live else ()), *strangers, *beside]
        line = f"{_TITLE}: {', '.join(filter(None, [steps, report.headline]))}"
        return Outcome(tuple(report.lines(_TITLE, [steps], more)), line, report, _maps_of(merged[0].state))

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

    def _tell_time(self, merging: Merging, model_sampling: Any, x: Any, t: Any, options: dict[str, Any]) -> None:
        time, state, config = self._time, merging.state, self._config
        sigma = time.sigma(t, options)
        if not 0 <= sigma < math.inf:  # nobody's picture should depend on how we take it
            state.set_time()
            return
        flow = flow_time(sigma, model_sampling) if merging.flows else None
        start, end, percent = config.start_percent, config.end_percent, None
        if config.uses_percent:  # the engine is told a percent that is in the range or out of it as the level is
            within = time.is_between(start, end, sigma, model_sampling)
            percent = start if within else 0.0 if start > 0 else 1.0
        state.set_time(
            percent=percent, timestep=flow, sigma=relative_sigma(sigma, model_sampling) if flow is None else None,
            sampling=self if self._is_named else None, pictures=time.pictures_in(x, options),
            timesteps=time.timesteps(model_sampling, options, merging.flows),
        )  # fmt: skip
        if percent is not None:
            self._live[sigma] = state.is_live


def layout_of(model: Any) -> str:
    """Whose strengths a model has, see `tome_core.strength`. Raises TypeError or ValueError where it cannot merge."""
    unet = hosting.find_unet(model)
    return hosting.layout_of(unet) if piece_of(unet) is None else hosting.TRANSFORMER


def _maps_of(state: Any) -> dict[int, tuple[int, Any]]:
    levels = state.report().levels
    return {level: (levels[level].downsample, one) for level, one in sorted(state.maps().items())}


def _argument(place: int, name: str, args: tuple, kwargs: dict) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _replace(place: int, name: str, value: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with this one instead, where it was: by place, else by name."""
    if len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}
