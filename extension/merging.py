"""Merging for exactly the passes of a job: which model is patched when, and what it came to.

A webui calls nothing after an exception, and other extensions start jobs inside jobs, or copies of them. So what a
job wants hangs on its ``p``, for that object alone; one patch at most is armed, and whoever comes next takes it off.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from ..tome_core.hosting import MergeConfig, Patch, Report, UnsupportedModelError, patch, patch_of
from . import host
from .pace import Pace
from .wish import Wish

JOB = "_tome_core_job"  # attribute of a ``p``


@dataclass
class PassRecord:
    """What became of one pass, or of its repetitions over a job's batches. steps_merged: inside the time range."""

    counts: Counter[str] = field(default_factory=lambda: Counter(calls=0, steps=0, steps_merged=0))
    reports: list[Report] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    own: str = ""  # what people's own pictures say of it

    @property
    def report(self) -> Report:
        """On all of it."""
        return replace(Report.join(self.reports), calls=self.counts["calls"], patched=bool(self.reports), own=self.own)


class Job:
    """One job's wish and records. error: how its values were wrong; then it wishes for nothing."""

    def __init__(self, p: Any, wish: Wish, error: str = "") -> None:
        self.p = weakref.ref(p)
        self.wish = wish
        self.error = error
        self.fact: Any = None  # what API callers are told, of all jobs of one request
        self.merged = False  # something, in the batch that runs
        self.records: defaultdict[bool, PassRecord] = defaultdict(PassRecord)  # by: is it the hires pass
        self._left: dict[bool, str] = {}

    def config(self, hires: bool, layout: str | None = None) -> MergeConfig | None:
        """The engine's settings for a pass; None where it is left alone. layout: of the model that runs in it."""
        p = self.p()
        seeds = getattr(p, "seeds", None) or getattr(p, "all_seeds", None) or [0]  # of this batch
        return self.wish.config(hires, int(seeds[0]), layout or host.layout())

    def why_left(self, hires: bool) -> str:
        """Why a pass is left alone, as far as is known before it, and stays so; "" where it is ours."""
        if hires not in self._left:
            self._left[hires] = self._why_left(hires)
        return self._left[hires]

    def _why_left(self, hires: bool) -> str:
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
            return patch_of(host.running_unet(p), config).why_not(height, width, 2 * p.batch_size)
        except (AttributeError, TypeError, ValueError) as error:  # of a model that we do not know
            return str(error)


def job_of(p: Any) -> Job | None:
    """The job of this very object; a copy of ``p`` inherits the attribute, but not the job."""
    job = vars(p).get(JOB)
    return job if job is not None and job.p() is p else None


class Armed:
    """The one patch that is armed, if any. There is one of these for all tabs, because there is one model."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.hires = False
        self.handle: Patch | None = None
        self._tried: Any = None  # weakly, the UNet that the armed pass runs on, patched or left alone
        self._pace: Pace | None = None  # also what tells the pass that is armed from all others
        self._models = 0  # on which it ran, and whatever else makes its time none of theirs
        self._pass = ExitStack()  # in SD.Next, where no denoiser tells of its calls

    def arm(self, p: Any, hires: bool) -> None:
        """From now on the pass that is about to start merges as its job wants, or is timed without. Idempotent."""
        self.disarm()
        job, ratio = job_of(p), host.built_in_ratio(p, hires)
        if job is None:
            return
        wants, self._models = job.config(hires) is not None, 0
        # in a pass of the webui's own merging only where ours is better than that
        reason = job.why_left(hires) if wants and ratio else host.reason_to_step_aside(hires)
        if reason and wants:
            job.records[hires].refusals.append(reason)
        if reason or (not wants and (ratio or host.loaded_unet() is None)):
            return
        self.job, self.hires = job, hires
        self._put_on(host.running_unet(p))
        self._pace = Pace(p, self.handle is not None and self.handle.wants_time)

    def step(self, params: Any) -> None:
        """Before each call of the model: the right model patched, for the right job, knowing its time."""
        if self.job is None:
            return
        p = self.job.p()
        running = getattr(getattr(params, "denoiser", None), "p", None)
        if p is None or (running is not None and running is not p):  # somebody samples in between
            self._models += 1  # and costs time
            if self.handle is not None:
                self.handle.uninstall()
            return
        self._follow(host.running_unet(p))
        if self.handle is not None and self.handle.wants_time:
            time, timesteps = host.relative(p, self._pace.time(params)), self._pace.timesteps(p)
            self.handle.set_time(**time, sampling=self._pace, pictures=p.batch_size, timesteps=timesteps)
        self._note_call(getattr(params, "x", None), *host.beside(p, params))

    def disarm(self, is_whole: bool = False) -> None:
        """Take the patch off, keeping what it counted. Idempotent. is_whole: the pass has come to its end."""
        report = self._take_off()
        if self._pace is not None:
            self._pace.take_off()
            record = PassRecord() if self._config is None else self.job.records[self.hires]
            record.counts.update(self._pace.counts())
            if is_whole and self._models == 1 and not host.is_stopped():
                record.own = self._pace.heard.remember(self._tried(), self._config, report, self._pace.sampler)
        self.job = self._pace = None

    def _follow(self, unet: Any) -> None:
        """The refiner, or a hires checkpoint, may have brought another model since the pass began."""
        if self._tried() is not unet:
            self._take_off()
            self._put_on(unet)
        elif self.handle is not None:
            self.handle.install()  # cheap where it is on; brings back what somebody else put something in place of

    def _put_on(self, unet: Any) -> None:
        self._tried, self._models, p = weakref.ref(unet), self._models + 1, self.job.p()
        self._config = self.job.config(self.hires, host.layout(unet))
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
            self._pipeline = pipeline  # kept, because the engine's own reference to it is weak
            self._pass.enter_context(pipeline.unet.register_forward_hook(lambda *_: self._note_call()))
            self._pass.enter_context(self.handle.sampling(p.batch_size))  # all calls are one sampling

    def _note_call(self, *kind: Any) -> None:
        self._pace.note_call(self.handle is not None and self.handle.is_live, *kind)

    def _take_off(self) -> Report | None:
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


armed = Armed()
