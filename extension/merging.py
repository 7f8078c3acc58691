"""Merging during the passes of a job: puts the patch on the model, takes it off, and records the results."""
# Other extensions start jobs, or copies of jobs, inside jobs. So the data of a job belong to one ``p``, its processing
# object, and a pass that begins inside another one only interrupts it.

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ..tome_core.hosting import MergeConfig, Patch, Report, UnsupportedModelError, patch, pictures, why_not_at
from . import host
from .job_settings import PASSES, JobSettings
from .sampler_times import Counts, SamplerTimes

logger = logging.getLogger(__name__)
BY_ITSELF = "a script drew the picture by itself (img2img alternative test does)"
JOB = "_tome_core_job"  # the attribute of a ``p`` with its `Job`


@dataclass
class PassRecord:
    """The results of a job's first passes, or of its hires passes, over all batches."""

    counts: list[Counts] = field(default_factory=list)  # one for each batch
    reports: list[Report] = field(default_factory=list)  # on each patch
    refusals: list[str] = field(default_factory=list)  # reasons why a model was not patched
    own: str = ""  # the factor by which merging makes the user's own pictures faster; "" if it is not known

    @property
    def report(self) -> Report:
        """The engine's report over all batches, with the calls and `own` of this record."""
        calls = sum(each.calls for each in self.counts)
        return replace(Report.join(self.reports), calls=calls, patched=bool(self.reports), own=self.own)


class Job:
    """The settings and records of a job `p`, held weakly. `error`: why nothing merges, if a value is wrong, else ""."""

    def __init__(self, p: Any, settings: JobSettings, error: str = "") -> None:
        self.p = weakref.ref(p)
        self.settings = settings
        self.error = error
        self.fact: Any = None  # the report for API callers, over all jobs of a request
        self.merged = False  # in the current batch
        self.has_sampled = False  # a pass of the current batch has begun, even if it must not merge
        self.records: defaultdict[bool, PassRecord] = defaultdict(PassRecord)  # by "is the hires pass"
        self._left: dict[bool, str] = {}

    def config(self, hires: bool, curve: str | None = None) -> MergeConfig | None:
        """Return the engine's settings for a pass, seed 0 replaced by the batch's first; None if they merge nothing."""
        p = self.p()
        seeds = getattr(p, "seeds", None) or getattr(p, "all_seeds", None) or [0]  # of the current batch
        return self.settings.config(hires, int(seeds[0]), curve or host.curve())

    def refuse(self, reason: str, has_hires: bool) -> None:
        """Record why the passes that are to merge did not; `has_hires`: the job has a hires pass."""
        for hires in PASSES if has_hires else (False,):
            if self.config(hires) is not None:
                self.records[hires].refusals.append(reason)

    def why_unmerged(self, hires: bool) -> str:
        """Return why a pass will not merge, kept from the first answer; "" if it will, or if its size is unknown."""
        if hires not in self._left:
            self._left[hires] = self._why_unmerged(hires)
        return self._left[hires]

    def _why_unmerged(self, hires: bool) -> str:
        """Compute `why_unmerged` again: "left alone", else the webui's reason, else the engine's; see there for ""."""
        p, config = self.p(), self.config(hires)
        if config is None:
            return "left alone"
        aside = host.reason_to_step_aside(hires)
        if aside is not None:
            return aside
        width, height = host.size_of(p, hires)
        if not width or not height:
            return ""
        try:
            return why_not_at(host.running_unet(p), config, height, width, 2 * p.batch_size)
        except (AttributeError, TypeError, ValueError) as error:  # an unknown kind of model
            return str(error)


def job_of(p: Any) -> Job | None:
    """Return the `Job` of a webui's job object; None if there is none, or if `p` is a copy of the job's object."""
    job = vars(p).get(JOB)
    return job if job is not None and job.p() is p else None


class Pass:
    """A running pass of a job, from `start` to `stop`: its patch, if it merges, and its times."""

    def __init__(self, job: Job, hires: bool) -> None:
        self.job, self.hires = job, hires
        self.handle: Patch | None = None  # None if the pass does not merge
        self._config: MergeConfig | None = None
        self._tried: Any = lambda: None  # weak reference to the current UNet, patched or not
        self._models = 0  # models of the pass, plus disturbances of its time; only 1 is timed
        self._pass = ExitStack()  # for SD.Next, which has no denoiser callback
        self._times = SamplerTimes(None, False)

    def start(self, unet: Any) -> None:
        """Patch the job's model, if this pass is to merge, and count and time its steps."""
        self._put_on(unet)
        self._times = SamplerTimes(self.job.p(), self.handle is not None and self.handle.wants_time)

    def step(self, params: Any) -> None:
        """Prepare a call: patch the current model, set its noise level as the time, and note the call for the timing.

        `params` are what the webui tells about a step. During calls of another job the model is unpatched instead.
        """
        p = self.job.p()
        running = getattr(getattr(params, "denoiser", None), "p", None)
        if p is None or (running is not None and running is not p):  # another extension samples in between
            self.interrupt()
            return
        self._follow(host.running_unet(p))
        if self.handle is not None and self.handle.wants_time:
            time, timesteps = host.to_unit_variance(p, self._times.time(params)), self._times.timesteps(p)
            self.handle.set_time(**time, sampling=self._times, pictures=p.batch_size, timesteps=timesteps)
        self._times.planned = host.planned_steps(params)
        self._note_call(getattr(params, "x", None), *host.timing_conditions(p, params))

    def interrupt(self) -> None:
        """Take the patch off for another job's calls, and leave this pass out of the timing."""
        self._models += 1
        if self.handle is not None:
            self.handle.uninstall()

    def go_on(self) -> None:
        """Put the patch on again after `interrupt`."""
        if self.handle is not None:
            self.handle.install()

    def stop(self, is_whole: bool) -> None:
        """Take the patch off the model; put the counts of a pass to merge into the job's record.

        The time of an undisturbed pass is kept for comparison if it `is_whole`: it ended normally.
        """
        report = self._take_off()
        self._times.take_off()
        is_whole = is_whole and not host.is_stopped()
        record = PassRecord() if self._config is None else self.job.records[self.hires]
        record.counts.append(self._times.counts(is_whole))
        if is_whole and self._models == 1:
            steps, sampler = self._times.timed_steps, self._times.sampler
            record.own = pictures.remember(steps, self._tried(), self._config, report, sampler)

    def _follow(self, unet: Any) -> None:
        """Put the patch on this UNet, if need be again; take it off a UNet that a refiner or hires model replaced."""
        if self._tried() is not unet:
            self._take_off()
            self._put_on(unet)
        elif self.handle is not None and not self.handle.is_installed:
            self.go_on()  # after a call for another job, or another program has taken it off

    def _put_on(self, unet: Any) -> None:
        """Patch a UNet (in SD.Next its pipeline) with the pass's settings, if it is to merge, or record why not."""
        self._tried, self._models, p = weakref.ref(unet), self._models + 1, self.job.p()
        self._config = self.job.config(self.hires, host.curve(unet))
        reason = host.reason_of_unet(unet)
        if self._config is None:
            self._models += bool(reason)
            return
        if reason:
            self.job.records[self.hires].refusals.append(reason)
            return
        pipeline = host.running_pipeline(p)
        try:
            self.handle = patch(pipeline or unet, self._config, host_clock=True)
        except (UnsupportedModelError, TypeError) as error:
            self.job.records[self.hires].refusals.append(str(error))
            return
        if pipeline is not None:
            self._pipeline = pipeline  # kept alive here, because the engine's reference is weak
            self._pass.enter_context(pipeline.unet.register_forward_hook(lambda *_: self._note_call_of(pipeline)))
            self._pass.enter_context(self.handle.sampling(p.batch_size))  # all calls are one sampling

    def _note_call_of(self, pipeline: Any) -> None:
        """Count a call of SD.Next's pipeline."""
        self._times.planned = pipeline.steps
        self._note_call()

    def _note_call(self, *kind: Any) -> None:
        """Count a call, as merged if a rule is in force. `kind`: the latents, then what else its time depends on."""
        self._times.note_call(self.handle is not None and self.handle.is_live, *kind)

    def _take_off(self) -> Report | None:
        """Remove the patch and return its report; None without one. A report on calls or with notes goes to the job."""
        handle, self.handle = self.handle, None
        self._pass.close()
        if handle is None:
            return None
        handle.remove()
        report = handle.report()
        if report.calls or report.notes:
            record = self.job.records[self.hires]
            record.reports.append(report)
            self.job.merged = self.job.merged or report.merged_anything
        return report


_running: list[Pass] = []  # of all tabs; a pass that began inside another one comes after it


def begin(p: Any, hires: bool) -> None:
    """Begin a pass of the job `p`: patch the model, or only time the pass if the settings leave it unmerged.

    Nothing begins if `p` has no `Job`, if a pass of it runs, or if the pass must not merge; if it was to merge, the job
    records the reason. A pass to leave unmerged is not timed if the webui's own merging is on.
    """
    job = job_of(p)
    if job is None or job in [each.job for each in _running]:
        return
    job.has_sampled, ratio = True, host.built_in_ratio(p, hires)
    wants = job.config(hires) is not None
    # if the webui's own merging is on, a reason from the engine leaves the pass to the webui
    reason = job.why_unmerged(hires) if wants and ratio else host.reason_to_step_aside(hires)
    unet, reason = (None, reason) if reason else _unet_of(p)
    if reason and wants:
        job.records[hires].refusals.append(reason)
    if reason or (ratio and not wants):
        return
    if _running:
        _running[-1].interrupt()
    _running.append(Pass(job, hires))
    _running[-1].start(unet)


def step(params: Any) -> None:
    """Prepare a call of the model for the pass that runs, by what the webui tells about the step; see `Pass.step`."""
    if _running:
        _running[-1].step(params)


def end(p: Any = None, is_whole: bool = False) -> None:
    """End the pass of the job `p`, if one runs, and all that began inside, or end all; `is_whole`: see `Pass.stop`."""
    depths = [depth for depth, each in enumerate(_running) if p is None or each.job.p() is p]
    _end_to(min(depths, default=len(_running)), is_whole)


@contextmanager
def during(p: Any, hires: bool) -> Iterator[None]:
    """Return a context manager for a pass of the job `p`. Errors of this package's own are logged; `p` goes on."""
    depth, is_whole = len(_running), False
    try:
        _safely(begin, p, hires)
        yield
        is_whole = True
    finally:
        _safely(_end_to, depth, is_whole)


def _end_to(depth: int, is_whole: bool) -> None:
    """End the innermost passes until `depth` are left. The pass around them goes on, in the middle of its step."""
    if len(_running) > depth:
        while len(_running) > depth:
            _running.pop().stop(is_whole)
        for outer in _running[-1:]:
            outer.go_on()


def _unet_of(p: Any) -> tuple[Any, str]:
    """Return a job's UNet and "", or None and the reason why it cannot be patched."""
    try:
        return host.running_unet(p), ""
    except (AttributeError, TypeError, ValueError) as error:  # an unknown kind of model
        return None, str(error)


def _safely(function: Callable, *args: Any) -> None:
    """Call a function, and log its error, as the webui does with a hook's."""
    try:
        function(*args)
    except Exception:
        logger.exception("this pass may be unmerged, because of an error, which please report")
