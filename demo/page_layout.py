"""Where the page's parts stand, and which of `page_events` answers to which of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gradio as gr

from demo import page_controls as controls
from demo.page_events import NAMES, PICTURE, Events, Seen
from tome_core import form
from tome_core.settings.presets import MARKS

# fonts that are there: no other machine is asked for one. Gradio's own grey of the help texts is hard to read
THEME = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]).set(
    block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_300"
)
CSS = """
.wrong { outline: 2px solid #c2410c; }
.says strong, .wrong [data-testid=block-info] ~ div { color: #c2410c; }
.says progress { width: 100%; }
.report pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.below { background: var(--block-background-fill); min-height: 0; }
#maps .grid-wrap { height: auto; max-height: none; }
.marks { display: flex; justify-content: space-between; padding: 0 12px 8px; font-size: .8em; text-align: center; }
.marks span { width: 4.5em; margin: 0 -1em; }
.plot svg { width: 100%; max-width: 560px; display: block; margin: auto; font-size: 11px; fill: currentColor; }
.plot figcaption, .grid figcaption { font-size: .85em; }
.plot .grid { stroke: currentColor; opacity: .15; }
.plot .curve, .plot .now { fill: none; stroke: #ea580c; stroke-width: 2; }
.plot .mark { fill: #ea580c; }
.plot .run { fill: #2563eb; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.grid img { width: 100%; image-rendering: pixelated; }
"""
# moves the line between the pictures: gradio's own can be dragged, and cannot be reached with the keyboard
MOVE = "(at) => ({__type__: 'update', slider_position: at})"
Answer = Callable[..., Any]  # one of `Events`' methods: the values by name, what the tab remembers, and who asks
_QUIET = {"show_progress": "hidden", "api_visibility": "private"}
# what makes no sense is refused in our words: gradio's own checks let some of it pass and fail at other
_AS_GIVEN = {**_QUIET, "preprocess": False}


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
            self.parts["seen"] = gr.State(Seen())
            self._connect()

    def _put(self, name: str, kind: Any, *arguments: Any, **more: Any) -> None:
        self.parts[name] = kind(*arguments, elem_id=name, **more)

    def _ask(self) -> None:
        start = self.events.start
        with gr.Group():
            self._put("strength", gr.Slider, 0, 1, start.strength, step=0.05, label="Strength",
                      info=self.events.help("strength"))  # fmt: skip
            # equally far apart, as off is from the first
            marks = "".join(f"<span>{one:g}<br>{name}</span>" for name, one in {"off": 0.0, **MARKS}.items())
            gr.HTML(f'<div class="marks">{marks}</div>', padding=False, elem_classes=["below"])
        self._put("by", gr.Markdown, visible=False)
        self._put("prompt", gr.Textbox, start.prompt, label=PICTURE["prompt"][0], info=self.events.help("prompt"))
        with gr.Row():
            self._put("generate", gr.Button, "Generate", variant="primary", min_width=120)
            self._put("stop", gr.Button, "Stop", interactive=False, min_width=120)
        self._put("says", gr.HTML, elem_classes=["says"])
        self._put("plot", gr.HTML, padding=False)
        with gr.Accordion("Compare strengths", open=False, elem_id="comparing"):
            self._put("strengths", gr.Textbox, ", ".join(f"{one:g}" for one in MARKS.values()), label="Strengths",
                      info=self.events.help("strengths"))  # fmt: skip
            self._put("compare", gr.Button, "Compare")
        with gr.Accordion("Expert", open=False, elem_id="expert"):
            with gr.Row():
                for name, value in (("picture_seed", start.seed), ("steps", start.steps)):
                    self._put(name, gr.Number, value, label=PICTURE[name][0], min_width=120)
            gr.Markdown("What the strength stands for, and what it leaves alone.")
            values = form.values_of(start.config)
            for field in sorted(form.FIELDS, key=lambda one: one.advanced):
                self.parts[field.name] = controls.make(field, values[field.name])

    def _answer(self) -> None:
        self._put("grid", gr.HTML, visible=False, padding=False)
        self._put("slider", gr.ImageSlider, label="Without merging | with it", interactive=False, buttons=[])
        with gr.Column(visible=False) as self.parts["answer"]:
            self._put("position", gr.Slider, 0, 100, 50, step=1, label="Line between the two, in % from the left")
            self._put("figures", gr.Markdown)
            with gr.Row():
                self._put("difference", gr.Image, label="Difference, eight times as strong", interactive=False,
                          buttons=[], min_width=200)  # fmt: skip
                self._put("maps", gr.Gallery, label="What merged, in one colour", columns=1, buttons=[], min_width=200,
                          height="auto", interactive=False)  # fmt: skip
            with gr.Accordion("Report", open=False):
                self._put("report", gr.HTML, elem_classes=["report"])
        with gr.Accordion("These settings elsewhere", open=False, elem_id="elsewhere"):
            for title, name, language in (("diffusers", "script", "python"), ("webui API", "payload", "json"),
                                          ("ComfyUI node", "node", "json")):  # fmt: skip
                with gr.Tab(title):
                    self._put(name, gr.Code, language=language, interactive=False, wrap_lines=True, show_label=False)
            self._put("link", gr.Textbox, label="A link to the page as it is", interactive=False, buttons=["copy"])

    def _connect(self) -> None:
        parts, events = self.parts, self.events
        given, told = [parts[name] for name in ("seen", *NAMES)], list(parts.values())

        def on(names: Iterable[str], answer: Answer) -> None:
            touched = [parts[name] for name in names]
            # a text that is pasted fires no `input`
            touches = [one.input for one in touched] + [one.blur for one in touched if isinstance(one, gr.Textbox)]
            gr.on(touches, self._quick(answer), given, told, trigger_mode="always_last", **_AS_GIVEN)

        on((*PICTURE, *(one.name for one in form.FIELDS if one.beside_strength)), events.touched)
        on((one.name for one in form.FIELDS if not one.beside_strength), events.set_by_hand)
        on(["strength"], events.moved)
        for presses, answer in (([parts["generate"].click, parts["prompt"].submit], events.made),
                                ([parts["compare"].click, parts["strengths"].submit], events.compared)):  # fmt: skip
            gr.on(presses, self._long(answer), given, told, trigger_mode="once", concurrency_limit=1,
                  concurrency_id="pictures", **_AS_GIVEN)  # fmt: skip
        parts["stop"].click(self._stopped, queue=False, **_QUIET)
        parts["position"].input(None, parts["position"], parts["slider"], js=MOVE, **_QUIET)
        self.blocks.load(self._opened, None, told, **_QUIET)

    def _quick(self, answer: Answer) -> Callable[..., dict[Any, Any]]:
        def heard(request: gr.Request, seen: Seen, *given: Any) -> dict[Any, Any]:
            return self._tell(answer(_name(given), seen, _address(request)))

        return heard

    def _long(self, answer: Answer) -> Callable[..., Iterator[dict[Any, Any]]]:
        def heard(request: gr.Request, seen: Seen, *given: Any) -> Iterator[dict[Any, Any]]:
            for found in answer(_name(given), seen, request.session_hash):
                yield self._tell(found)

        return heard

    def _tell(self, found: dict[str, Any]) -> dict[Any, Any]:
        return {self.parts[name]: value for name, value in found.items()}

    def _stopped(self, request: gr.Request) -> None:
        self.events.stopped(request.session_hash)

    def _opened(self, request: gr.Request) -> dict[Any, Any]:
        return self._tell(self.events.opened(dict(request.query_params), _address(request)))


def _name(given: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(NAMES, given, strict=True))


def _address(request: gr.Request) -> str:
    return f"http://{request.headers['host']}/"
