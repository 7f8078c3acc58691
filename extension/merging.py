"""Merging during the passes of a job: puts the patch on the model, takes it off, and records the results."""
# The webui calls no hook after an exception, and other extensions start jobs, or copies of jobs, inside jobs. So the
# data of a job belong to one ``p``, its processing object, there is at most one patch, and the next hook takes it off.

import weakref
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from ..tome_core.hosting import MergeConfig, Patch, Report, UnsupportedModelError, patch, pictures, why_not_at
from . import host
from .job_settings import JobSettings
from .sampler_times import SamplerTimes

JOB = "_tome_core_job"  # the attribute of a ``p`` with its `Job`


@dataclass
class PassRecord:
    """The results of a job's first passes, or of its hires passes, over all batches."""

    counts: Counter[str] = field(default_factory=lambda: Counter(calls=0, steps=0, steps_merged=0))
    reports: list[Report] = field(default_factory=list)  # on each patch
    refusals: list[str] = field(default_factory=list)  # reasons why a model was not patched
    own: str = ""  # the factor by which merging makes the user's own pictures faster; "" if it is not known

    @property
    def report(self) -> Report:
        """The engine's report over all batches, with the calls and `own` of this record."""
        return replace(Report.join(self.reports), calls=self.counts["calls"], patched=bool(self.reports), own=self.own)


class Job:
    """The settings and records of a job `p`, held weakly. `error`: why nothing merges, if a value is wrong, else ""."""

    def __init__(self, p: Any, settings: JobSettings, error: str = "") -> None:
        self.p = weakref.ref(p)
        self.settings = settings
        self.error = error
        self.fact: Any = None  # the report for API callers, over all jobs of a request
        self.merged = False  # in the current batch
        self.records: defaultdict[bool, PassRecord] = defaultdict(PassRecord)  # by "is the hires pass"
        self._left: dict[bool, str] = {}

    def config(self, hires: bool, curve: str | None = None) -> MergeConfig | None:
        """Return the engine's settings for a pass, seed 0 replaced by the batch's first; None if they merge nothing."""
        p = self.p()
        seeds = getattr(p, "seeds", None) or getattr(p, "all_seeds", None) or [0]  # of the current batch
        return self.settings.config(hires, int(seeds[0]), curve or host.curve())

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


class CurrentPass:
    """The patch that `arm` puts on the model for the current pass until `disarm`, and its times. All tabs share it."""

    def __init__(self) -> None:
        self.job: Job | None = None  # None if no pass is armed
        self.hires = False
        self.handle: Patch | None = None  # None if the armed pass does not merge
        self._tried: Any = None  # weak reference to the UNet of the armed pass, patched or not
        self._times: SamplerTimes | None = None  # also identifies the armed pass
        self._models = 0  # models of the pass, plus disturbances of its time; only 1 is timed
        self._pass = ExitStack()  # for SD.Next, which has no denoiser callback

    def arm(self, p: Any, hires: bool) -> None:
        """Disarm, then patch the model for the next pass, or only time the pass if the settings leave it unmerged.

        Nothing is armed if `p` has no `Job`, or if the pass must not merge; if it was to merge, the job records the
        reason. A pass to leave unmerged is not timed if the webui's own merging is on or no model is loaded.
        """
        self.disarm()
        job, ratio = job_of(p), host.built_in_ratio(p, hires)
        if job is None:
            return
        wants, self._models = job.config(hires) is not None, 0
        # if the webui's own merging is on, a reason from the engine leaves the pass to the webui
        reason = job.why_unmerged(hires) if wants and ratio else host.reason_to_step_aside(hires)
        if reason and wants:
            job.records[hires].refusals.append(reason)
        if reason or (not wants and (ratio or host.loaded_unet() is None)):
            return
        self.job, self.hires = job, hires
        self._put_on(host.running_unet(p))
        self._times = SamplerTimes(p, self.handle is not None and self.handle.wants_time)

    def step(self, params: Any) -> None:
        """Prepare a call: patch the current model, set its noise level as the time, and note the call for the timing.

        `params` are what the webui tells about a step. During calls of another job the model is unpatched instead.
        """
        if self.job is None:
            return
        p = self.job.p()
        running = getattr(getattr(params, "denoiser", None), "p", None)
        if p is None or (running is not None and running is not p):  # another extension samples in between
            self._models += 1  # its time must not count
            if self.handle is not None:
                self.handle.uninstall()
            return
        self._follow(host.running_unet(p))
        if self.handle is not None and self.handle.wants_time:
            time, timesteps = host.to_unit_variance(p, self._times.time(params)), self._times.timesteps(p)
            self.handle.set_time(**time, sampling=self._times, pictures=p.batch_size, timesteps=timesteps)
        self._note_call(getattr(params, "x", None), *host.timing_conditions(p, params))

    def disarm(self, is_whole: bool = False) -> None:
        """Take the patch off the model; put the counts of a pass to merge into the job's record. May be called again.

        The time of an undisturbed pass is kept for comparison if it `is_whole`: it ended normally.
        """
        report = self._take_off()
        if self._times is not None:
            self._times.take_off()
            record = PassRecord() if self._config is None else self.job.records[self.hires]
            record.counts.update(self._times.counts())
            if is_whole and self._models == 1 and not host.is_stopped():
                steps, sampler = self._times.timed_steps, self._times.sampler
                record.own = pictures.remember(steps, self._tried(), self._config, report, sampler)
        self.job = self._times = None

    def _follow(self, unet: Any) -> None:
        """Put the patch on this UNet, if need be again; take it off a UNet that a refiner or hires model replaced."""
        if self._tried() is not unet:
            self._take_off()
            self._put_on(unet)
        elif self.handle is not None and not self.handle.is_installed:
            self.handle.install()  # a call for another job has taken it off, or another program

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
            self._pass.enter_context(pipeline.unet.register_forward_hook(lambda *_: self._note_call()))
            self._pass.enter_context(self.handle.sampling(p.batch_size))  # all calls are one sampling

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


armed = CurrentPass()
