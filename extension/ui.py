"""The panel in txt2img and img2img, made from the fields. Only what gradio 3.41 and 4.40 both have."""

from __future__ import annotations

from typing import Any

import gradio as gr

from . import host, metadata, options
from .settings import FIELDS, OWN, SAME, Field, field

_ROWS = (("level", "merge_what"), ("start_percent", "end_percent"), ("min_pixels", "method"),
         ("merge_crossattn", "merge_mlp", "use_rand"), ("sx", "sy", "seed"))  # fmt: skip
TAKE_OVER = "Take over the webui's own token merging"
TAKE_OVER_HELP = "Puts the ratios from Settings / Optimizations into this panel. Saved settings stay as they are."


class Panel:
    """The controls of one tab, in `controls` in the order of `FIELDS`. elem_id: makes a name unique to the tab."""

    def __init__(self, is_img2img: bool, elem_id: Any) -> None:
        self.is_img2img = is_img2img
        self._elem_id = elem_id
        self._made: dict[str, Any] = {}
        switch = field("enabled")
        is_on = options.default_of(switch, is_img2img)
        with host.accordion(is_on, switch.label, elem_id("enabled")) as enabled:
            self._made["enabled"] = enabled
            self._build()
        self.controls = [self._made[one.name] for one in FIELDS]
        for control in (*self.controls, getattr(enabled, "accordion", enabled)):
            # defaults live in the settings tab; ui-config.json would freeze the first ones it saw
            control.do_not_save_to_config = True

    def paste_fields(self) -> list[tuple[Any, Any]]:
        """(control, what reads its value from an infotext), for the webui."""
        functions = metadata.paste_functions()
        return [(self._made[name], function) for name, function in functions.items()]

    def _build(self) -> None:
        with gr.Row():
            self._add("preset")
            self._add("ratio")
        with gr.Row(visible=not self.is_img2img):
            self._add("hires")
            self._add("hires_ratio")
        button = gr.Button(TAKE_OVER, size="sm", elem_id=self._elem_id("take_over"))
        gr.HTML(f"<p>{TAKE_OVER_HELP}</p>")
        with gr.Accordion("Advanced", open=False, elem_id=self._elem_id("advanced")):
            for row in _ROWS:
                with gr.Row():
                    for name in row:
                        self._add(name)
        targets = [self._made[name] for name in ("enabled", "ratio", "hires", "hires_ratio")]
        button.click(fn=lambda: taken_over(self.is_img2img), inputs=[], outputs=targets, show_progress=False)

    def _add(self, name: str) -> None:
        one = field(name)
        make = getattr(gr, options.component_name(one))
        arguments = options.arguments_of(one) | _help(one)
        value = options.default_of(one, self.is_img2img)
        self._made[name] = make(value=value, label=one.label, elem_id=self._elem_id(name), **arguments)


def _help(one: Field) -> dict[str, str]:
    return {"info": one.help}


def taken_over(is_img2img: bool) -> list[Any]:
    """Values for enabled, ratio, hires and hires ratio that do what the webui's own merging is set to."""
    first, hires = host.built_in_ratios(is_img2img)
    same = first == hires
    return [first > 0 or hires > 0, first, SAME if same else OWN, hires]
