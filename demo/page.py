"""`python install.py page`: the same picture without merging and with it, in a browser, for this machine alone."""

import argparse
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    # Started as a file, its own folder is on the path; the package around it is wanted instead.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from demo import command

HOST = "127.0.0.1"
QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
         "NO_PROXY": HOST, "no_proxy": HOST}  # fmt: skip
# fonts that are there: no other machine is asked for one
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
_TICK = 1 / 64  # s; Windows counts processor time so coarsely


class Stopped(Exception):
    """The error by which `Studio.draw` ends after `Studio.stop` or when the page closes."""


class Wanted(NamedTuple):
    """What the controls ask for. how: keywords of `tome_core.patch`, ``{"strength": ...}`` or ``{"config": ...}``."""

    prompt: str
    seed: int
    steps: int
    how: dict[str, Any]


class Drawn(NamedTuple):
    """A picture without merging and with it, uint8 ``[H, W, 3]``, the seconds of both in this order, and the report.

    maps: for each level that merged, the merged picture with one colour for the tokens of a group, and a title.
    """

    plain: Any
    merged: Any
    seconds: tuple[float, float]
    report: str
    maps: list[tuple[Any, str]]


class Studio:
    """What draws pictures from a source of `demo.source`; the caller holds `drawing` during a `draw`.

    The event `ends` is set when the page closes: a `draw` that runs then raises Stopped.
    """

    def __init__(self, source: Any) -> None:
        self.source, self.ends, self._stop = source, threading.Event(), threading.Event()
        self.drawing = threading.Lock()

    def stop(self) -> None:
        """Let a running `draw` raise Stopped after its present step; later draws are not affected."""
        self._stop.set()

    def draw(self, wanted: Wanted, tell: Callable[[float, str], None]) -> Drawn:
        """Draw the picture unmerged, then merged, each after one untimed step. Raises Stopped, unpatched, after `stop`.

        tell: the function that gets, after each step, the share that is done, 0 to 1, and what is being done.
        """
        import tome_core

        done = 0

        def on_step(doing: str) -> None:
            nonlocal done
            done += 1
            tell(min(1.0, done / (2 * wanted.steps + 2)), doing)
            if self._stop.is_set() or self.ends.is_set():
                raise Stopped

        self._stop.clear()
        one_step = wanted._replace(steps=1)
        self._picture(one_step, lambda: on_step("warming up"))
        plain, unmerged = self._picture(wanted, lambda: on_step("without merging"))
        with tome_core.patch(self.source.target, host_clock=True, **wanted.how) as merging:
            merging.keep_maps()
            self._picture(one_step, lambda: on_step("warming up"), merging)
            merging.reset_counts()
            merged, seconds = self._picture(wanted, lambda: on_step("with merging"), merging)
            report, maps = str(merging.report()), self._maps(merged, merging)
        return Drawn(plain, merged, (unmerged, seconds), report, maps)

    def _picture(self, wanted: Wanted, on_step: Callable[[], None], merging: Any = None) -> tuple[Any, float]:
        """Return a picture, uint8 [H, W, 3], and seconds, processor time on a CPU. merging: the patch to tell times."""
        from demo.source import tell_times

        heard = on_step if merging is None else tell_times(self.source, wanted.steps, merging, on_step)
        # a CPU is shared with other programs, which hardly disturb processor time
        clock = time.process_time if self.source.device.type == "cpu" else time.perf_counter
        began = clock()
        picture = self.source.picture(wanted.prompt, wanted.seed, wanted.steps, heard)
        return picture, max(clock() - began, _TICK)

    def _maps(self, picture: Any, merging: Any) -> list[tuple[Any, str]]:
        """Return `Drawn.maps` of a picture, uint8 ``[H, W, 3]``, by the maps that `merging` kept as it was drawn."""
        maps, row = [], self.source.prompt_row
        for level, groups in sorted(merging.maps().items()):
            group = groups.group[row if len(groups.group) > 1 else 0].cpu().numpy()
            title = f"Level {level}: {len(group)} tokens became {groups.num_groups}"
            maps.append((mosaic(picture, groups.grid[:2], group), title))
        return maps


def mosaic(picture: Any, grid: tuple[int, int], group: Any) -> Any:
    """Paint a picture, uint8 [H, W, 3], with the mean colour of its group in the place of each token.

    grid: height and width in tokens. group: the group of each token, whole numbers from 0 up [height * width].
    """
    import numpy as np

    (height, width), (down, across) = picture.shape[:2], grid
    rows, columns = np.arange(height) * down // height, np.arange(width) * across // width
    cells = group.reshape(grid)[rows][:, columns]
    count = np.maximum(np.bincount(cells.ravel()), 1)
    means = np.stack([np.bincount(cells.ravel(), picture[..., colour].ravel()) / count for colour in range(3)], -1)
    return means[cells].round().astype(np.uint8)


def enlarge(picture: Any) -> Any:
    """Repeat each pixel of an array ``[H, W, 3]`` as many whole times as keep both sides within 512, at least 1."""
    from demo.comparison_sheet import LARGEST

    times = max(1, LARGEST // max(picture.shape[:2]))
    return picture.repeat(times, 0).repeat(times, 1)


def figures(drawn: Drawn, on_cpu: bool) -> str:
    """Say times, PSNR and share of detail kept, or that the pictures are equal. on_cpu: call times processor time."""
    from demo.comparison import detail
    from demo.metrics import psnr

    plain, merged = drawn.seconds
    of = " of processor time" * on_cpu
    times = f"{plain:.2f} s{of} without merging, {merged:.2f} s with it: {plain / merged:.2f} times as fast"
    if (drawn.plain == drawn.merged).all():
        return f"{times}; the same picture, bit for bit."
    kept = detail([drawn.plain], [drawn.merged])
    return f"{times}; PSNR {psnr(drawn.plain, drawn.merged):.1f} dB, {kept:.0%} of the detail."


def read(values: dict[str, Any], curve: str, checks_prompt: bool) -> Wanted:
    """Return the Wanted of the controls' values: merged by the strength, changed by the form if "own" is on.

    values: by the control's name; None in the form keeps the strength's. curve: as `tome_core.strength` takes it.
    checks_prompt: refuse words that the embedded model does not know. Raises ValueError or TypeError for a wrong value.
    """
    import tome_core
    from demo import prompt
    from tome_core import form

    if checks_prompt:
        prompt.parse(values["prompt"])
    try:
        seed, steps = command.SEED(f"{values['seed']:.15g}"), command.STEPS(f"{values['steps']:.15g}")
    except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
        raise ValueError(f"Seed and steps: {error}") from None
    of_strength = tome_core.strength(values["strength"], curve=curve)
    if not values["own"]:
        return Wanted(values["prompt"], seed, steps, {"strength": values["strength"]})
    config = form.change(of_strength, {name: values[name] for name in form.NAMES})
    return Wanted(values["prompt"], seed, steps, {"config": config})


def component(field: Any, value: Any) -> Any:
    """Make the gradio component of a field of `tome_core.form`: Dropdown for choices, Checkbox for a switch.

    Of numbers, those that may be unset or exceed the control's maximum get a Number, the others a Slider.
    """
    import gradio as gr

    common = {"value": value, "label": field.label, "info": field.help, "elem_id": field.name, "interactive": True}
    if field.choices:
        return gr.Dropdown(choices=list(field.choices), **common)
    if isinstance(field.default, bool):
        return gr.Checkbox(**common)
    if field.may_be_unset or field.limit != field.maximum:
        return gr.Number(step=field.step, **common)  # no bounds: the form has its own words for a value that is outside
    return gr.Slider(field.minimum, field.maximum, step=field.step, **common)


def make_page(studio: Studio, strength: float, few_words: bool = True) -> Any:
    """Make the page, gradio's Blocks, that starts with this strength.

    few_words: the hint at the prompt's text box lists the known words, and a prompt with any other is an error.
    """
    import gradio as gr

    import tome_core
    from demo.comparison_sheet import difference
    from demo.prompt import known_words
    from tome_core import form
    from tome_core.patching import curve_of
    from tome_core.settings.presets import MARKS

    curve = curve_of(studio.source.target)
    shown = form.values_of(tome_core.strength(strength, curve=curve))
    marks = ", ".join(f"{value:g} is `{name}`" for name, value in MARKS.items())
    with gr.Blocks(title="Token merging", analytics_enabled=False, delete_cache=(600, 600)) as blocks:
        gr.Markdown(f"# Token merging\nThe same picture without it and with it: {studio.source.name}.")
        with gr.Row():
            with gr.Column(min_width=300):
                parts = {
                    "strength": gr.Slider(0, 1, strength, step=0.05, label="Strength", elem_id="strength",
                                          info=f"0 is off; more saves more time and changes more. {marks}."),
                    "prompt": gr.Textbox(studio.source.prompts[0], label="Prompt", elem_id="prompt",
                                         info=f"The embedded model knows {known_words()}." if few_words else None),
                    "seed": gr.Number(0, label="Seed", elem_id="seed"),
                    "steps": gr.Number(20, label="Steps", elem_id="steps"),
                }  # fmt: skip
                with gr.Row():
                    generate = gr.Button("Generate", variant="primary", elem_id="generate")
                    stop = gr.Button("Stop", elem_id="stop")
                with gr.Accordion("Own settings", open=False):
                    parts["own"] = gr.Checkbox(label="Use these instead of the strength", elem_id="own")
                    parts |= {field.name: component(field, shown[field.name]) for field in form.FIELDS}
            with gr.Column(min_width=300, scale=2):
                slider = gr.ImageSlider(label="Without merging | with it", interactive=False, elem_id="slider")
                said = gr.Markdown(elem_id="figures")
                gallery = gr.Gallery(label="What differs, eight times as strong, and what merged, in one colour",
                                     columns=2, height="auto", interactive=False, elem_id="gallery")  # fmt: skip
                report = gr.Textbox(label="Report", lines=8, elem_id="report")

        def drawn(*given: Any, progress: Any = gr.Progress()) -> tuple:  # noqa: B008 - how gradio asks for it
            try:
                wanted = read(dict(zip(parts, given, strict=True)), curve, few_words)
                with studio.drawing:
                    result = studio.draw(wanted, lambda share, doing: progress(share, desc=doing))
            except (TypeError, ValueError) as error:
                raise gr.Error(str(error), print_exception=False) from None
            except Stopped:
                raise gr.Error("Stopped.", print_exception=False) from None
            pictures = enlarge(result.plain), enlarge(result.merged)
            tiles = [(enlarge(tile), title) for tile, title in result.maps]
            times = figures(result, studio.source.device.type == "cpu")
            return pictures, times, [(difference(*pictures), "What differs"), *tiles], result.report

        def filled(value: float) -> list:
            return list(form.values_at(value, curve).values())

        gr.on([generate.click, parts["prompt"].submit], drawn, list(parts.values()),
              [slider, said, gallery, report], concurrency_limit=1)  # fmt: skip
        stop.click(studio.stop, queue=False)
        parts["strength"].release(filled, parts["strength"], [parts[name] for name in form.values_at(strength, curve)],
                                  show_progress="hidden")  # fmt: skip
    return blocks


def serve(blocks: Any, studio: Studio, port: int | None, opens_browser: bool) -> None:
    """Serve the page; a KeyboardInterrupt closes it and passes on. port: None is any free port; OSError if in use."""
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    # gradio's own grey of the help texts is hard to read
    theme = gr.themes.Default(**FONTS).set(
        block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_300")  # fmt: skip
    # another site's page cannot reach this one under a name of its own that leads here
    stacked = [Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])]
    try:
        blocks.launch(
            server_name=HOST, server_port=port, share=False, inbrowser=opens_browser, ssr_mode=False, footer_links=[],
            enable_monitoring=False, mcp_server=False, pwa=False, max_file_size=1, strict_cors=True,
            app_kwargs={"middleware": stacked}, prevent_thread_lock=True, theme=theme,
            num_workers=0,  # of gradio's, which would take uploads at ports of their own, from any site
        )  # fmt: skip
        while blocks.is_running:
            time.sleep(0.1)
    finally:
        studio.ends.set()  # first, because the server waits a while for those who wait for a picture
        blocks.close(verbose=False)
        with studio.drawing:  # Python aborts if it ends while a thread is in torch
            pass


def parser() -> argparse.ArgumentParser:
    """Make the parser of the page's options."""
    options = argparse.ArgumentParser(
        prog="page", description="A page in the browser: the same picture without merging and with it, side by side.")
    add = options.add_argument
    add("--strength", type=command.STRENGTH, default=command.BALANCED, metavar="S",
        help="what the page starts with, from 0, which is off, to 1 (default %(default)s)")
    command.add_model(options)
    add("--port", type=command.number("port", 1, 65535, "such as 7870"), metavar="N",
        help="the page's port (default: the first free one from 7860 on)")
    add("--no-browser", action="store_true", help="only print the address")
    return options


def _interrupt(*_: Any) -> None:
    """Raise KeyboardInterrupt, and ignore later signals, so that they do not interrupt the clean-up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    """Serve the page; return 0 if Ctrl-C or SIGTERM stops it, 2 after a ValueError or OSError, which is printed."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    os.environ.update(QUIET)
    options = parser().parse_args(arguments)
    try:
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGTERM, _interrupt)
        with tempfile.TemporaryDirectory(prefix="tome_page_") as folder:
            os.environ["GRADIO_TEMP_DIR"] = folder  # its pictures go with it
            user = command.check_model(options)
            studio = Studio(command.source_of(options, user))
            few_words = user is None or user.kind == "scenes"
            serve(make_page(studio, options.strength, few_words), studio, options.port, not options.no_browser)
    except KeyboardInterrupt:
        print("page: stopped.", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"page: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
