"""Where the page's parts stand, and which of `page_events` answers to which of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from demo import page_controls as controls
from demo.page_events import NAMES, PICTURE, Events

# fonts that are there: no other machine is asked for one. Gradio's own grey of the help texts is hard to read
THEME = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]).set(
    block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_300"
)
CSS = """
.wrong { outline: 2px solid #c2410c; }
.says strong, .wrong [data-testid=block-info] ~ div { color: #c2410c; }
.says progress { width: 100%; }
.report pre { white-space: pre-wrap; overflow-wrap: anywhere; }
"""
# moves the line between the pictures: gradio's own can be dragged, and cannot be reached with the keyboard
MOVE = "(at) => ({__type__: 'update', slider_position: at})"
_QUIET = {"show_progress": "hidden", "api_visibility": "private"}


class Page:
    """The blocks, in `blocks`; `parts` by name."""

    def __init__(self, events: Events) -> None:
        self.events, self.parts = events, {}
        with gr.Blocks(title="Token merging", analytics_enabled=False, delete_cache=(600, 600)) as self.blocks:
            gr.Markdown(f"# Token merging\nThe same picture without it and with it: {events.studio.source.name}.")
            with gr.Row():
                with gr.Column(min_width=300):
                    self._ask()
                with gr.Column(min_width=300, scale=2):
                    self._answer()
            self.parts["wrong"] = gr.State(())
            self._connect()

    def _put(self, name: str, kind: Any, *arguments: Any, **more: Any) -> None:
        self.parts[name] = kind(*arguments, elem_id=name, **more)

    def _ask(self) -> None:
        start = self.events.start
        self._put("prompt", gr.Textbox, start.prompt, label=PICTURE["prompt"][0], info=self.events.help("prompt"))
        with gr.Row():
            for name, value in (("picture_seed", start.seed), ("steps", start.steps)):
                self._put(name, gr.Number, value, label=PICTURE[name][0], min_width=120)
        self._put("preset", gr.Radio, [*controls.PRESET_OF, controls.CUSTOM], value=controls.preset_of(start.config),
                  label="Preset", info="Fills the settings below; touching one of them makes it Custom.")  # fmt: skip
        with gr.Row():
            self._put("generate", gr.Button, "Generate", variant="primary", min_width=120)
            self._put("stop", gr.Button, "Stop", interactive=False, min_width=120)
        self._put("says", gr.HTML, elem_classes=["says"])
        for name in controls.BASIC:
            self.parts[name] = controls.make(name, start.config.value(name))
        with gr.Accordion("Advanced", open=False, elem_id="advanced"):
            for name in controls.ADVANCED:
                self.parts[name] = controls.make(name, start.config.value(name))

    def _answer(self) -> None:
        self._put("slider", gr.ImageSlider, label="Without merging | with it", interactive=False, buttons=[])
        self._put("position", gr.Slider, 0, 100, 50, step=1, label="Line between the two, in % from the left")
        self._put("figures", gr.Markdown)
        with gr.Row():
            self._put("difference", gr.Image, label="Difference, eight times as strong", interactive=False, buttons=[],
                      min_width=200)
            self._put("maps", gr.Gallery, label="Which tokens became one", columns=1, buttons=[], min_width=200,
                      interactive=False)
        with gr.Accordion("Report", open=False):
            self._put("report", gr.HTML, elem_classes=["report"])
        with gr.Accordion("These settings elsewhere"):
            for title, name, language in (("diffusers", "script", "python"), ("webui API", "payload", "json"),
                                          ("ComfyUI node", "node", "json")):  # fmt: skip
                with gr.Tab(title):
                    self._put(name, gr.Code, language=language, interactive=False, wrap_lines=True, show_label=False)
            self._put("lost", gr.Markdown)
            self._put("link", gr.Textbox, label="A link to the page as it is", interactive=False, buttons=["copy"])

    def _connect(self) -> None:
        parts = self.parts
        given, told = [parts[name] for name in ("preset", "wrong", *NAMES)], list(parts.values())
        # a text that is pasted fires no `input`
        touches = [parts[name].input for name in NAMES]
        touches += [parts[name].blur for name in NAMES if isinstance(parts[name], gr.Textbox)]
        gr.on(touches, self._touched, given, told, trigger_mode="always_last", **_QUIET)
        parts["preset"].input(self._chosen, given, told, trigger_mode="always_last", **_QUIET)
        gr.on([parts["generate"].click, parts["prompt"].submit], self._made, given, told, trigger_mode="once",
              concurrency_limit=1, **_QUIET)  # fmt: skip
        parts["stop"].click(self._stopped, queue=False, **_QUIET)
        parts["position"].input(None, parts["position"], parts["slider"], js=MOVE, **_QUIET)
        self.blocks.load(self._opened, None, told, **_QUIET)

    def _told(self, found: dict[str, Any]) -> dict[Any, Any]:
        return {self.parts[name]: value for name, value in found.items()}

    def _touched(self, request: gr.Request, preset: str, wrong: tuple[str, ...], *given: Any) -> dict[Any, Any]:
        return self._told(self.events.touched(_named(given), tuple(wrong), _address(request)))

    def _chosen(self, request: gr.Request, preset: str, wrong: tuple[str, ...], *given: Any) -> dict[Any, Any]:
        return self._told(self.events.chosen(_named(given), preset, tuple(wrong), _address(request)))

    def _made(self, request: gr.Request, preset: str, wrong: tuple[str, ...], *given: Any) -> Iterator[dict[Any, Any]]:
        for found in self.events.made(_named(given), tuple(wrong), request.session_hash):
            yield self._told(found)

    def _stopped(self, request: gr.Request) -> None:
        self.events.stopped(request.session_hash)

    def _opened(self, request: gr.Request) -> dict[Any, Any]:
        return self._told(self.events.opened(dict(request.query_params), _address(request)))


def _named(given: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(NAMES, given, strict=True))


def _address(request: gr.Request) -> str:
    return f"http://{request.headers['host']}/"
