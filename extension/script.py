"""The life of a job, as the webui tells it. Everything else is asked of the modules beside.

The webui swallows what a hook raises and goes on, so a hook first makes sure that nothing is patched.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from . import attentions, host, measuring, merge_map, metadata, options
from .merging import Job, armed, job_of, set_job
from .settings import field, read
from .summary import line_of

logger = logging.getLogger(__name__)
PARENT = __package__.rpartition(".")[0]


class TokenMerging(host.Script):
    """The panel and the hooks. One object a tab; what belongs to a job hangs on its ``p``."""

    def title(self) -> str:
        """The name API callers use, in lower case."""
        return field("enabled").label

    def show(self, is_img2img: bool) -> Any:
        """In both tabs, without being selected."""
        return host.ALWAYS_VISIBLE

    def ui(self, is_img2img: bool) -> list[Any]:
        """The controls, in the order of the API's arguments. Called several times; has no effect but these."""
        from .ui import Panel  # with gradio, which is slow to import

        panel = Panel(is_img2img, self.elem_id)
        self.infotext_fields = panel.paste_fields()
        self.paste_field_names = list(metadata.KEYS.values())
        return panel.controls

    def before_process(self, p: Any, *values: Any) -> None:
        """A job begins. What an aborted one left behind goes first."""
        armed.disarm()
        host.restore_built_in(p)
        job = _job_from(p, values)
        set_job(p, job)
        if job.is_on:
            host.silence_built_in(p)

    def process(self, p: Any, *values: Any) -> None:
        """The infotext is about to be written for the first time."""
        p.extra_generation_params = metadata.without_ours(p.extra_generation_params or {})
        job = job_of(p)
        if job is None:  # a caller that left the first hook out
            self.before_process(p, *values)
            job = job_of(p)
        if job.error:
            logger.error("%s", job.error)
            host.comment(p, f"ToMe: {job.error}")
        elif job.is_on:
            p.extra_generation_params |= metadata.written(job.wish, host.has_hires(p))

    def process_batch(self, p: Any, *values: Any, **facts: Any) -> None:
        """A batch begins; before webui 1.10 this is the last call before its first pass."""
        armed.disarm()
        job = job_of(p)
        if job is not None:  # the map lies on the first picture; asked now, when a request's own settings are in force
            job.keeps_maps = options.is_on(options.MAP) and not facts.get("batch_number", 0)
        if not host.HAS_SAMPLING_HOOK:
            armed.arm(p, hires=False)

    def process_before_every_sampling(self, p: Any, *values: Any, **facts: Any) -> None:
        """A pass is about to start. Forge says so twice before the hires pass."""
        armed.arm(p, host.is_hires(p))

    def before_hr(self, p: Any, *values: Any) -> None:
        """The first pass is over."""
        armed.disarm()
        if not host.HAS_SAMPLING_HOOK:
            armed.arm(p, hires=True)

    def post_sample(self, p: Any, *values: Any) -> None:
        """All passes of a batch are over; other extensions' own jobs may follow."""
        armed.disarm()

    def postprocess_batch(self, p: Any, *values: Any, **facts: Any) -> None:
        """The same, for webuis without `post_sample`."""
        armed.disarm()

    def postprocess(self, p: Any, processed: Any, *values: Any) -> None:
        """The job is over. Not called after an exception."""
        armed.disarm()
        job = job_of(p)
        if job is None:
            return
        if job.error:
            host.add_fact(processed, {"ToMe error": job.error})
        elif job.wish.values["enabled"]:
            _tell(p, job, processed)
            if options.is_on(options.MEASURE):
                measuring.measure(job)


def _job_from(p: Any, values: tuple) -> Job:
    try:
        wish = read(values, metadata.changes_of(p))
    except (ValueError, TypeError) as error:
        return Job(p, None, f"not merged, because a setting is wrong: {error}")
    return Job(p, wish)


def _tell(p: Any, job: Job, processed: Any) -> None:
    line = line_of(job, host.has_hires(p))
    if options.is_on(options.CONSOLE):
        logger.info("%s", line)
    if options.is_on(options.NOTE):
        host.add_message(processed, f"ToMe: {line}")
    maps = next((job.records[hires].maps for hires in (True, False) if hires in job.records), {})
    if maps and processed.images:
        first = min(getattr(processed, "index_of_first_image", 0), len(processed.images) - 1)
        processed.images.append(merge_map.draw(processed.images[first], maps, host.first_row(p)))


def on_step(params: Any) -> None:
    """The webui's denoiser is about to call the model."""
    armed.step(params)


def add_axes() -> None:
    """The webui is about to build its pages, or to serve its API: every script is loaded."""
    plot = host.plot_module()
    if plot is not None:
        metadata.add_axes(plot)


def unload() -> None:
    """Leave nothing behind, so that the next load gets this version's files and not the last one's."""
    armed.disarm()
    for name in [name for name in sys.modules if name == PARENT or name.startswith(f"{PARENT}.")]:
        del sys.modules[name]


def register() -> type[TokenMerging]:
    """Be called back, and give the class; called by the shim each time that the webui runs it."""
    host.set_up_console(PARENT)
    attentions.describe()
    measuring.remember()
    host.listen(cfg_denoiser=on_step, ui_settings=options.register, before_ui=add_axes, script_unloaded=unload)
    return TokenMerging
