"""The extension's script: the hooks that the webui calls during a job."""
# the webui logs a hook's exception and goes on with the job

import logging
import sys
from functools import partial
from typing import Any

from ..tome_core import hosting
from . import attentions, host, infotext, merging, sdnext, settings_tab
from .around_sampling import around_next
from .job_settings import PASSES, TITLE, JobSettings, read
from .merging import JOB, Job, job_of
from .report_line import data_of, lines_of

logger = logging.getLogger(__name__)
FACT = "ToMe report"  # for API callers
PARENT = __package__.rpartition(".")[0]


class TokenMerging(host.Script):
    """The script with panel and hooks, one per tab. `p` is the webui's job; for `values` see `job_settings.read`."""

    _request: Any = None  # the ``script_args`` of the latest request, of page or API: one list for all of its jobs
    _fact: host.CallableReport  # the report of these jobs

    def title(self) -> str:
        """Return the script's name, which API callers write in lower case."""
        return TITLE

    def show(self, is_img2img: bool) -> Any:
        """Return the webui's constant that shows the panel in both tabs, without selecting the script."""
        return host.ALWAYS_VISIBLE

    def ui(self, is_img2img: bool) -> list[Any]:
        """Make the panel, tell the webui how a paste fills it, and return its controls, in the order of `ARGUMENTS`."""
        from .ui import Panel  # imports gradio, which is slow

        panel = Panel(is_img2img, self.elem_id)
        self.infotext_fields = panel.paste_fields()
        self.paste_field_names = list(infotext.KEYS)
        return panel.controls

    def before_process(self, p: Any, *values: Any) -> None:
        """Remove the remains of an earlier job, and turn the webui's own merging off in passes that will merge."""
        _clear(p)  # a copied p has inherited some
        host.silence_built_in(p, lambda p, hires: not _job_of(p, values).why_unmerged(hires))

    def process(self, p: Any, *values: Any) -> None:
        """Begin a job before its first picture: log an error in its values; write its infotext key if it may merge."""
        job = _job_of(p, values)
        if job.error:
            logger.error("%s", job.error)
        request = getattr(p, "script_args", None)  # the same list for all jobs of a request
        if request is None or request is not self._request:
            self._request, self._fact = request, host.CallableReport()
        job.fact = self._fact
        if (job.error or job.settings.enabled) and host.CALLS_FACTS and p.extra_generation_params is not None:
            p.extra_generation_params[FACT] = job.fact  # for scripts that make a result of their own
        _write(p, job, any(job.settings.config(hires) for hires in PASSES if host.has_hires(p) or not hires))

    def process_batch(self, p: Any, *values: Any, **facts: Any) -> None:
        """Begin a batch. In SD.Next, which has no later hooks, begin its pass too, and later that of a hires pass."""
        job = job_of(p)
        if job is not None:
            job.merged = job.has_sampled = False
        if not host.HAS_SAMPLING_HOOK:
            merging.begin(p, hires=False)
            sdnext.when_hires_begins(p, lambda: _begin_hires(p))

    def process_before_every_sampling(self, p: Any, *values: Any, **facts: Any) -> None:
        """Let the next pass, hires if ``p.is_hr_pass``, begin and end with the sampler's call.

        Forge calls this twice before a hires pass.
        """
        around_next(p, partial(merging.during, hires=p.is_hr_pass))

    def postprocess_batch(self, p: Any, *values: Any, **facts: Any) -> None:
        """End a batch before the infotexts are written: write our key if this batch merged, else remove it."""
        merging.end(p, is_whole=True)  # in SD.Next; elsewhere it has ended
        vars(p).pop(sdnext.INIT_HIRES, None)
        job = job_of(p)
        if job is not None:
            if not job.has_sampled and not host.is_stopped():
                job.refuse(merging.BY_ITSELF, host.has_hires(p))
            _write(p, job, job.merged)

    def postprocess(self, p: Any, processed: Any, *values: Any) -> None:
        """End a job; `_report` it if merging is on or a value is wrong. Not called by the webui after an exception."""
        job = job_of(p)
        if job is not None and (job.error or job.settings.enabled):
            _report(p, job, processed)
        _clear(p)


def _clear(p: Any) -> None:
    """Remove all that the extension has put on a job object."""
    for name in (JOB, *host.STAND_INS):
        vars(p).pop(name, None)


def _begin_hires(p: Any) -> None:
    """End the first pass of SD.Next's job `p`, and begin its hires pass."""
    merging.end(p, is_whole=True)
    merging.begin(p, hires=True)


def _job_of(p: Any, values: tuple) -> Job:
    """Return the `Job` of a webui's job object, made once; with an error, and off, if `read` refuses `values`."""
    job = job_of(p)
    if job is None:
        try:
            job = Job(p, read(values, settings_tab.default_of, infotext.changes_of(p), host.curve()))
        except (ValueError, TypeError) as error:
            job = Job(p, JobSettings(), f"not merged, because a setting is wrong: {error}")
        setattr(p, JOB, job)
    return job


def _write(p: Any, job: Job, merges: bool) -> None:
    """Give `p` a new ``extra_generation_params``: with the infotext key if the picture merges, else without it."""
    is_reported = job.error or job.settings.enabled  # else the report goes, too
    others = {key: value for key, value in (p.extra_generation_params or {}).items()
              if key not in infotext.KEYS and (key != FACT or is_reported)}  # fmt: skip
    # a new dict, because the cells of a plot share the old one
    key = infotext.KEYS[host.has_setting_called(infotext.KEY)]
    p.extra_generation_params = others | ({key: infotext.text_of(job.settings)} if merges else {})


def _report(p: Any, job: Job, processed: Any) -> None:
    """Show the report in console and page, as set, or `Job.error` always, on the page only; give API callers data."""
    lines = [job.error] if job.error else lines_of(job, host.has_hires(p))
    if settings_tab.is_shown(settings_tab.CONSOLE) and not job.error:
        logger.info("%s", "; ".join(lines))
    if settings_tab.is_shown(settings_tab.PAGE) or job.error:
        for line in lines:  # comments of a script's first job would become those of the whole script
            host.add_message(p, processed, f"ToMe: {line}")
    data, fact = data_of(job, lines), job.fact
    jobs = [*fact.get("jobs", ()), data]  # all jobs of the request
    fact.update({**data, "merged": any(done["merged"] for done in jobs), "jobs": jobs})
    # not for the picture's infotext, which is written already
    processed.extra_generation_params = {**(getattr(processed, "extra_generation_params", None) or {}), FACT: fact}


def on_end(p: Any) -> None:
    """End a job `p` in SD.Next, which calls this also if the job raised an exception."""
    merging.end(p)
    _clear(p)


def on_component(component: Any, elem_id: str | None = None, **facts: Any) -> None:
    """Pass a control with an element id to `ui.note`. The webui calls this for each control that is made."""
    from .ui import note  # imports gradio, which is loaded by now

    if elem_id:
        note(component, elem_id)


def unload() -> None:
    """Take all patches off and remove the extension's modules, so that the next load reads the current files."""
    merging.end()
    hosting.forget_all()
    for name in [name for name in sys.modules if name == PARENT or name.startswith(f"{PARENT}.")]:
        del sys.modules[name]


def register() -> type[TokenMerging]:
    """Set up console, attentions, gains and callbacks, and return the script's class, for scripts/token_merging.py."""
    host.set_up_console(PARENT)
    attentions.describe()
    hosting.gains.load(host.gains_file())  # times of pictures of earlier processes
    host.listen(
        cfg_denoiser=merging.step, ui_settings=settings_tab.register, before_ui=infotext.add_axes,
        script_unloaded=unload, after_component=on_component, after_process=on_end,
        infotext_pasted=infotext.Paste.note,
    )  # fmt: skip
    return TokenMerging
