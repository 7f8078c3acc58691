"""The life of a job, as the webui tells it. Everything else is asked of the modules beside.

The webui swallows what a hook raises and goes on, so a hook first makes sure that nothing is patched.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from ..tome_core import hosting
from . import attentions, host, infotext, options, sdnext
from .merging import JOB, Job, armed, job_of
from .summary import data_of, lines_of
from .wish import PASSES, TITLE, Wish, read

logger = logging.getLogger(__name__)
FACT = "ToMe report"  # for API callers
PARENT = __package__.rpartition(".")[0]


class TokenMerging(host.Script):
    """The panel and the hooks. One object a tab; what belongs to a job hangs on its ``p``."""

    _request: Any = None  # the latest, and what its jobs told
    _fact: host.Fact

    def title(self) -> str:
        """The name API callers use, in lower case."""
        return TITLE

    def show(self, is_img2img: bool) -> Any:
        """In both tabs, without being selected."""
        return host.ALWAYS_VISIBLE

    def ui(self, is_img2img: bool) -> list[Any]:
        """The controls, in the order of the API's arguments. Called several times; has no effect but these."""
        from .ui import Panel  # with gradio, which is slow to import

        panel = Panel(is_img2img, self.elem_id)
        self.infotext_fields = panel.paste_fields()
        self.paste_field_names = list(infotext.KEYS)
        return panel.controls

    def before_process(self, p: Any, *values: Any) -> None:
        """A job begins, its own settings not yet in force. What an aborted one left behind goes first."""
        armed.disarm()
        for name in (JOB, *host.STAND_INS):  # also those that this p, as a copy, inherited
            vars(p).pop(name, None)
        host.silence_built_in(p, lambda p, hires: not _job_of(p, values).why_left(hires))

    def process(self, p: Any, *values: Any) -> None:
        """The infotext is about to be written for the first time, of a picture to come."""
        job = _job_of(p, values)
        if job.error:
            logger.error("%s", job.error)
        request = getattr(p, "script_args", None)  # of all jobs of one request, copies of its first one too
        if request is None or request is not self._request:
            self._request, self._fact = request, host.Fact()
        job.fact = self._fact
        if (job.error or job.wish.enabled) and host.CALLS_FACTS and p.extra_generation_params is not None:
            p.extra_generation_params[FACT] = job.fact  # where a script finds it that makes a result of its own
        _write(p, job, any(job.wish.config(hires) for hires in PASSES if host.has_hires(p) or not hires))

    def process_batch(self, p: Any, *values: Any, **facts: Any) -> None:
        """A batch begins; in SD.Next this is the last call before its first pass."""
        armed.disarm()
        job = job_of(p)
        if job is not None:
            job.merged = False
        if not host.HAS_SAMPLING_HOOK:
            armed.arm(p, hires=False)
            sdnext.when_hires_begins(p, lambda: armed.arm(p, hires=True))

    def process_before_every_sampling(self, p: Any, *values: Any, **facts: Any) -> None:
        """A pass is about to start. Forge says so twice before the hires pass."""
        armed.arm(p, p.is_hr_pass)

    def before_hr(self, p: Any, *values: Any) -> None:
        """The first pass is over."""
        armed.disarm(is_whole=True)

    def postprocess_batch(self, p: Any, *values: Any, **facts: Any) -> None:
        """All passes of a batch are over. Its pictures' infotexts are written next; others' own jobs may follow."""
        armed.disarm(is_whole=True)
        vars(p).pop(sdnext.INIT_HIRES, None)
        job = job_of(p)
        if job is not None:
            _write(p, job, job.merged)

    def postprocess(self, p: Any, processed: Any, *values: Any) -> None:
        """The job is over. Not called after an exception."""
        armed.disarm()
        job = job_of(p)
        if job is not None and (job.error or job.wish.enabled):
            _tell(p, job, processed)


def _job_of(p: Any, values: tuple) -> Job:
    """The job of this p; made at the first question, when the settings that a request brings are in force."""
    job = job_of(p)
    if job is None:
        try:
            job = Job(p, read(values, options.of_dial, infotext.changes_of(p), host.layout()))
        except (ValueError, TypeError) as error:
            job = Job(p, Wish(), f"not merged, because a setting is wrong: {error}")
        setattr(p, JOB, job)
    return job


def _write(p: Any, job: Job, merges: bool) -> None:
    """Put our key into the infotext of pictures that merged, or are to; in a new dict, because a plot's cells share."""
    is_told = job.error or job.wish.enabled
    kept = {key: value for key, value in (p.extra_generation_params or {}).items()
            if key not in infotext.KEYS and (key != FACT or is_told)}  # fmt: skip
    key = infotext.KEYS[host.has_setting_called(infotext.KEY)]
    p.extra_generation_params = kept | ({key: infotext.text_of(job.wish)} if merges else {})


def _tell(p: Any, job: Job, processed: Any) -> None:
    lines = [job.error] if job.error else lines_of(job, host.has_hires(p))
    if options.is_shown(options.CONSOLE) and not job.error:
        logger.info("%s", "; ".join(lines))
    if options.is_shown(options.PAGE) or job.error:
        for line in lines:  # the first job's comments may become a whole plot's, which are not about all of it
            host.add_message(p, processed, f"ToMe: {line}")
    data, fact = data_of(job, lines), job.fact
    jobs = [*fact.get("jobs", [dict(fact)] if fact else []), data]  # of one request: a plot's, a script's
    fact.update({**data, "merged": any(one["merged"] for one in jobs), **({"jobs": jobs} if len(jobs) > 1 else {})})
    # not in the picture's infotext, which is written already
    processed.extra_generation_params = {**(getattr(processed, "extra_generation_params", None) or {}), FACT: fact}


def on_end(p: Any) -> None:
    """A job is over, whatever became of it."""
    if armed.job is job_of(p):
        armed.disarm()


def on_component(component: Any, elem_id: str | None = None, **facts: Any) -> None:
    """The webui has made a control of its own, or somebody else has."""
    from .ui import note  # with gradio, which is there by now

    if elem_id:
        note(component, elem_id)


def unload() -> None:
    """Leave nothing behind, so that the next load gets this version's files and not the last one's."""
    armed.disarm()
    hosting.forget_all()
    for name in [name for name in sys.modules if name == PARENT or name.startswith(f"{PARENT}.")]:
        del sys.modules[name]


def register() -> type[TokenMerging]:
    """Be called back, and give the class; called by the shim each time that the webui runs it."""
    host.set_up_console(PARENT)
    attentions.describe()
    hosting.gains.load(host.gains_file())  # what was measured before this start
    host.listen(
        cfg_denoiser=armed.step, ui_settings=options.register, before_ui=infotext.add_axes, script_unloaded=unload,
        after_component=on_component, after_process=on_end, infotext_pasted=infotext.Paste.note,
    )  # fmt: skip
    return TokenMerging
