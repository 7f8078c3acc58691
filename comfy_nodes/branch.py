"""The wrappers that an ApplyToMe node puts on a model, so that a branch, the graph after the node, merges."""
# all branches share one model, so it is not patched: each call has an attention function in its transformer_options

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

from . import host, slot_calls, slot_function
from .host import hosting
from .sampling import HostSampling, is_flow, timestep_of
from .transformers import TransformerMerging, patch_size_of
from .unets import UnetMerging

_TITLE = "ToMe"
_PAST_US = ("nothing merged: another node (DeepCache is one) calls the model directly, not through Apply ToMe; remove "
            "that node to merge")  # fmt: skip
_STOPPED = "the sampling stopped before anything merged"
_IN_FIRST = "stopped in the first step"
_NOT_CALLED = "the model was not called"
_OUT_OF_REACH = "this model computes its attention by code of its own, which the node does not reach"
_UNUSED = ("nothing merged: no sampler used this model. If one ran, a node between, such as ModelMergeSimple, dropped "
           "Apply ToMe: put it after that node")  # fmt: skip
# keys in transformer_options of other patches that change how long a call takes
_BESIDE = ("patches", "patches_replace", "easycache", "lazycache")
Merging = UnetMerging | TransformerMerging


class Outcome(NamedTuple):
    """The result of one sampling, for the nodes that show it, or the reason why there was none."""

    lines: Sequence[str]  # one or two, for the ApplyToMe node
    details: Sequence[str]  # of the full report; equal to `lines` if no model could merge
    data: dict[str, Any]  # the report as JSON values; the names are always the same
    report: Any  # the engine's `Report`, never None, also if no model could merge
    # of each level that merged, latent cells per token along a side and the latest `MergeMap`; {} after an exception
    maps: dict[int, tuple[int, Any]]

    @classmethod
    def unsampled(cls, lines: Sequence[str], facts: dict[str, Any], stepped_aside: Sequence[str] = ()) -> Outcome:
        """Return what nodes show without a sampling, with reasons to step aside. `facts`: see `facts_of`."""
        report = hosting.Report.join([])
        return cls(lines, lines, _data_of(lines[0], facts, stepped_aside, HostSampling(), report), report, {})


class BranchMerging:
    """The two wrappers of an ApplyToMe node: one around each sampling, one around each call of the model.

    If `config` is None, the node is off: samplings are timed, and do not merge. `line` is the node's values as text,
    `facts` the same by name, see `facts_of`. If `node_id` is None, the report is shown in the log only. `name` is the
    node's name there, see `host.name_in`.
    """

    def __init__(self, config: Any, line: str, facts: dict[str, Any], node_id: Any, name: str) -> None:
        self.config, self._settings_and_facts = config, (line, facts)
        self._node_id, self._name = node_id, name
        self.latest: Outcome | None = None  # of the latest sampling; None before the first, or if the node is off
        self._shown: tuple[Any, list[str]] = (None, [])  # lines of one prompt, because two passes may use one node
        self._sampling: Sampling | None = None  # the innermost sampling in progress
        self._is_used = False  # a sampling, or a call of the model, came here

    def __deepcopy__(self, memo: dict) -> BranchMerging:
        """Return this object itself, so that a copy of a model's options keeps it."""
        return self

    def apply_model(
        self, executor: Any, x: Any, t: Any, c_concat: Any = None, c_crossattn: Any = None, control: Any = None,
        transformer_options: dict[str, Any] | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Wrap ``BaseModel.apply_model``: call it with options that merge if the node is on, and return its output."""
        self._is_used = True
        try:
            sampling = self._sampling or Sampling(self.config)
        except Exception as error:
            if not hosting.is_ours(error):
                raise
            return executor(x, t, c_concat, c_crossattn, control, transformer_options or {}, **kwargs)
        sampling.is_alone = sampling.is_alone and control is None
        return sampling.call(
            executor.class_obj, x, t, transformer_options or {},
            lambda options, **more: executor(x, t, c_concat, c_crossattn, control, options, **kwargs, **more),
        )  # fmt: skip

    def outer_sample(
        self, executor: Any, noise: Any, latent_image: Any, sampler: Any, sigmas: Any, denoise_mask: Any = None,
        callback: Any = None, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Wrap ComfyUI's ``CFGGuider.outer_sample``; return its result. Report at the end, even after an exception."""
        self._is_used = True
        try:
            time = HostSampling(sampler, sigmas, noise)
            sampling, timed_steps = Sampling(self.config, time), time.timed_steps.counting_callback(callback)
        except Exception as error:
            if not hosting.is_ours(error):
                raise
            return executor(noise, latent_image, sampler, sigmas, denoise_mask, callback, *args, **kwargs)
        outer, self._sampling = self._sampling, sampling
        try:
            return executor(noise, latent_image, sampler, sigmas, denoise_mask, timed_steps, *args, **kwargs)
        except BaseException:
            time.stopped = True
            raise
        finally:
            self._sampling = outer
            if outer is not None:
                outer.is_alone = False
            hosting.quietly(self._end, sampling)

    def wait(self) -> None:
        """Show that the node merges in samplers after it; at the end of the prompt say so if none has used it."""
        host.show(f"{_TITLE}: {self._settings_and_facts[0]}, merges in samplers after this node", self._node_id)
        host.at_end_of_prompt(self._say_if_unused)

    def _say_if_unused(self) -> None:
        """Show and log that no sampler used the node's model, unless one did."""
        if not self._is_used:
            host.say(f"{_TITLE}: {self._settings_and_facts[0]}, {_UNUSED}", self._node_id, self._name)

    def _end(self, sampling: Sampling) -> None:
        """Report a sampling that has ended; if the node is off, only keep its time."""
        if self.config is None:
            sampling.remember()
        else:
            self._report(sampling.end(*self._settings_and_facts))

    def _report(self, outcome: Outcome) -> None:
        """Keep an outcome in `latest`, log its lines, and show them below the node's other lines of the same prompt."""
        self.latest, queue, (last, shown) = outcome, getattr(host.server(), "last_prompt_id", None), self._shown
        self._shown = queue, [*(shown if queue is not None and queue == last else ()), *outcome.lines]
        host.say("\n".join(outcome.lines), None, self._name)
        host.show("\n".join(self._shown[1]), self._node_id)


class Sampling:
    """One sampling; without `time`, one call of the model outside any. Without a config, calls are only timed."""

    def __init__(self, config: Any, time: HostSampling | None = None) -> None:
        self._config, self._time, self._name = config, time or HostSampling(), time
        self._models: dict[Any, Merging | hosting.Reason] = {}  # or the reason why a model does not merge
        self._usual: frozenset[str] | None = None  # the keys of the first call's options
        self.is_alone = True  # no other patch is known that changes how long a call takes

    def call(self, model: Any, x: Any, t: Any, options: dict[str, Any], run: Any) -> Any:
        """Return ``run(options, **more)``, merged if possible. x: latents ``[B, C, (frames,) H, W]``; t: sigmas.

        `model` is a BaseModel, `options` its transformer_options. `more` has a keyword that marks the graph if the
        model is compiled and merges, else nothing.
        """
        with ExitStack() as scope:
            begun = None
            try:
                begun = self._begin(scope, model, x, t, options)
            except Exception as error:
                if not hosting.is_ours(error):
                    raise
            if begun is None:
                return run(options)
            merging, ask = begun
            out = slot_function.call(run, options, ask, **(slot_function.GRAPH if merging.is_compiled else {}))
        hosting.quietly(self._time.note_call, options)
        return out

    def _begin(
        self, scope: ExitStack, model: Any, x: Any, t: Any, options: dict[str, Any]
    ) -> tuple[Merging, slot_function.Ask] | None:
        """Time a call; return its merging, with what answers its attentions until `scope` ends, or None."""
        unet, schedule = model.diffusion_model, model.model_sampling
        # several GPUs sample in threads, each with its own model
        merging = self._models.get(unet) or self._models.setdefault(unet, self._make(unet, options))
        given = frozenset(name for name, value in options.items() if value is not None and value is not False)
        self.is_alone = self.is_alone and not any(_is_filled(options.get(name)) for name in _BESIDE)
        names = {*map(str, given), *(str(key) for kind in options.get("wrappers", {}).values() for key in kind)}
        self._time.timed_steps.call(x, slot_calls.other_names_in_slot(options), *sorted(names))
        if isinstance(merging, hosting.Reason):
            return None
        if merging.state.wants_time:
            self._tell_time(merging, schedule, x, t, options)
        # in the dtype in which a BaseModel passes them to its model
        latent = x.to(getattr(model, "manual_cast_dtype", None) or model.get_dtype())
        names = options.get("uuids")
        self._usual = self._usual or given
        timestep = 1000.0 * t if merging.flow_timesteps and is_flow(schedule) else schedule.timestep(t)
        call = merging.state.begin(timestep, latent, tuple(names) if names else None)
        if given - self._usual:  # guidance that perturbs this call may reorder its tokens, so kept plans do not fit
            call.kept_plans = None
        return merging, scope.enter_context(merging.answering(call, latent, options))

    def end(self, settings: str, facts: dict[str, Any]) -> Outcome:
        """Return the result, and `remember` the time; call it once, at the end, with BranchMerging's line and facts."""
        time = self._time
        strangers = [why for why in self._models.values() if isinstance(why, hosting.Reason)]
        merged = [merging for merging in self._models.values() if not isinstance(merging, hosting.Reason)]
        for merging in merged:
            merging.state.set_time()
        report = hosting.Report.join(merging.state.report() for merging in merged)
        report = replace(report, patched=bool(merged), own=self.remember(report))
        # the report says why nothing merged if it has counts, or no level that a rule reaches
        has_report = any(level.merged or level.skipped or level.traced for level in report.levels) or (
            bool(merged) and not any(level.covered for level in report.levels))  # fmt: skip
        if has_report:
            first, more = report.headline, [report.hindered, *strangers, *report.hints]
            if time.stopped and not time.steps["steps"]:
                first = _IN_FIRST
        elif time.steps["steps"] and not self._models:
            first, more = _PAST_US, []
        else:
            why = _STOPPED if time.stopped else _OUT_OF_REACH if merged else _NOT_CALLED
            first, *more = strangers or [f"nothing merged: {why}"]
        more = [*filter(None, more), *facts["unknown"]]
        line = f"{_TITLE}: {', '.join(filter(None, [settings, time.text, first]))}"
        # a strength's settings tell a person nothing, and hints are in `more`
        notes = tuple(note for note in report.notes if note not in report.hints)
        shown = replace(report, notes=notes, settings=report.settings if facts["strength"] is None else ())
        details = shown.lines(_TITLE, [settings, time.text], more)
        data = _data_of(line, facts, strangers, time, report)
        maps = {}
        if merged and not time.stopped:
            latest, levels = merged[0].state.maps(), merged[0].state.report().levels
            maps = {level: (levels[level].downsample, merge_map) for level, merge_map in sorted(latest.items())}
        lines = [line, *(["; ".join(more)] if more else [])]
        return Outcome(lines, details if has_report else lines, data, report, maps)

    def remember(self, report: Any = None) -> str:
        """Keep the time of a whole, undisturbed sampling of one model, unmerged without a `report`; return the gain."""
        if self._time.stopped or not self.is_alone or len(self._models) != 1:
            return ""
        (unet,), time = self._models, self._time
        return hosting.pictures.remember(time.timed_steps, unet, self._config, report, time.sampler)

    def _make(self, model: Any, options: dict[str, Any]) -> Merging | hosting.Reason:
        """Return a new merging of a model (a transformer if it has a patch size, else a UNet), or why it has none."""
        if self._config is None:
            return hosting.Reason("off")
        try:
            kind = UnetMerging if patch_size_of(model) is None else TransformerMerging
            merging = kind(model, self._config, options)
        except (hosting.UnsupportedModelError, TypeError) as error:
            return hosting.Reason(f"stepped aside: {error}")
        merging.state.keep_maps()
        return merging

    def _tell_time(self, merging: Merging, schedule: Any, x: Any, t: Any, options: dict[str, Any]) -> None:
        """Set the engine's time by sigmas `t` in a model_sampling `schedule`; clear it if `t` is < 0 or not finite."""
        time, state, start = self._time, merging.state, self._config.start_percent
        sigma, percent = time.sigma(t, options), None
        if not 0 <= sigma < math.inf:  # no picture may depend on how we read a strange level
            state.set_time()
            return
        if self._config.uses_percent:  # the engine gets a percent that is inside the range exactly if the level is
            within = time.is_between(start, self._config.end_percent, sigma, schedule)
            percent = start if within else 0.0 if start > 0 else 1.0
        state.set_time(
            percent=percent, timestep=timestep_of(sigma, schedule, merging.flow_timesteps), sampling=self._name,
            pictures=time.pictures_in(x, options), timesteps=time.timesteps(schedule, options, merging.flow_timesteps),
        )  # fmt: skip


def facts_of(strength: Any = None, start: Any = None, end: Any = None, unknown: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of an ApplyToMe for `Outcome.data`, by name, None for all but numbers.

    `unknown` are texts on inputs that the node does not have.
    """
    numbers = {"strength": strength, "start": start, "end": end}
    given = {name: value if type(value) in (int, float) else None for name, value in numbers.items()}
    return {**given, "unknown": list(unknown)}


def _data_of(line: str, facts: dict, stepped_aside: Sequence[str], time: HostSampling, report: Any) -> dict[str, Any]:
    """Return `Outcome.data`: the node's first line and `facts_of`, and what is known of a sampling."""
    return {**facts, "line": line, "stepped_aside": list(stepped_aside), **time.steps, **report.as_data()}


def curve_of(model: Any) -> str:
    """Return the name of a BaseModel's curve; a TypeError or a ValueError is raised if it is no model we can merge."""
    unet = hosting.find_unet(model)
    return hosting.curve_of(unet) if patch_size_of(unet) is None else hosting.TRANSFORMER


def _is_filled(value: Any) -> bool:
    """Tell whether a value of transformer_options is not empty. A dictionary is empty if all its values are."""
    return any(map(_is_filled, value.values())) if isinstance(value, dict) else bool(value)
