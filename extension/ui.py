"""The panel in txt2img and img2img, made from the fields. Only what gradio 3.41 and 4.40 both have."""

from __future__ import annotations

from typing import Any

import gradio as gr

from . import host, metadata, options
from .settings import (
    ARGUMENTS,
    CUSTOM,
    DEFAULTS,
    FILLED,
    FILLED_WITH,
    NO_PRESET,
    OWN,
    SAME,
    START,
    field,
    preset_values,
)

_ROWS = (("level", "merge_what"), ("start_percent", "end_percent"), ("min_pixels", "method"),
         ("merge_crossattn", "merge_mlp", "use_rand"), ("sx", "sy", "seed"), ("early_until", "deep_mlp"),
         ("metric", "proportional"), ("refine", "query_ratio"), ("keep", "only_if_it_pays"))  # fmt: skip
TAKE_OVER = "Take over the webui's own token merging"
TAKE_OVER_HELP = "Puts the ratios from Settings / Optimizations into this panel. Saved settings stay as they are."


class Panel:
    """The controls of one tab, in `controls` in the order of `ARGUMENTS`. elem_id: makes a name unique to the tab."""

    def __init__(self, is_img2img: bool, elem_id: Any) -> None:
        self.is_img2img = is_img2img
        self._elem_id = elem_id
        self._made: dict[str, Any] = {}
        self._shown = options.shown(is_img2img)
        switch = field("enabled")
        is_on = options.default_of(switch, is_img2img)
        with host.accordion(is_on, switch.label, elem_id("enabled")) as enabled:
            self._made["enabled"] = enabled
            self._build()
        self.controls = [self._made[name] for name in ARGUMENTS]
        for control in (*self.controls, getattr(enabled, "accordion", enabled)):
            # defaults live in the settings tab; ui-config.json would freeze the first ones it saw
            control.do_not_save_to_config = True
        self._connect_presets()

    def paste_fields(self) -> list[tuple[Any, Any]]:
        """(control, what reads its value from an infotext), for the webui."""
        functions = metadata.paste_functions()
        names = [one.name for one in options.fields_of(self.is_img2img)]  # a hires choice would be unseen in img2img
        note = (self._made[FILLED_WITH], functions["preset"])
        return [*((self._made[name], functions[name]) for name in names), note]

    def _build(self) -> None:
        self._add("preset")
        with gr.Row():
            self._add("ratio")
            self._add("early_ratio")
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
        self._note_the_preset()
        targets = [self._made[name] for name in TAKEN_OVER]
        button.click(fn=lambda: taken_over(self.is_img2img), inputs=[], outputs=targets, show_progress=False)

    def _note_the_preset(self) -> None:
        """Keep, out of sight, which preset the controls were filled with; nothing for the API, which fills in none."""
        note = gr.Textbox(value="", label="Filled with", visible=False, elem_id=self._elem_id(FILLED_WITH))
        self._made[FILLED_WITH] = note
        _show(note, self._shown["preset"])

    def _connect_presets(self) -> None:
        """`input` is what a person does; `change` would hear our own filling-in too, and in gradio 4 some inputs do.

        Both gradios drop an event while its like is unanswered, so behind each answer is asked what came meanwhile.
        """
        enabled, preset, note = (self._made[name] for name in ("enabled", "preset", FILLED_WITH))
        filled = [self._made[name] for name in FILLED]
        quietly = {"show_progress": False, "queue": False}
        choosing = {"outputs": [enabled, note, *filled], **quietly}
        preset.input(fn=chosen, inputs=[preset], **choosing).then(fn=caught_up, inputs=[preset, note], **choosing)
        enabled.change(fn=switched, inputs=[enabled, preset], outputs=[preset, note, *filled], **quietly)
        touching = {"fn": touched, "inputs": [preset, note, *filled], "outputs": [preset, note], **quietly}
        for control in filled:
            control.input(**touching).then(**touching)

    def _add(self, name: str) -> None:
        one = field(name)
        make = getattr(gr, options.component_name(one))
        made = self._made[name] = make(
            value=options.default_of(one, self.is_img2img), label=one.label, info=one.help,
            elem_id=self._elem_id(name), **options.arguments_of(one),
        )  # fmt: skip
        _show(made, self._shown[name])


def _show(control: Any, value: Any) -> None:
    """Let the page start with this value.

    The control's own value stays: the API fills short lists with it, in which custom means the defaults and not what
    the preset beside filled in.
    """
    if value != control.value:
        made = control.get_config
        control.get_config = lambda *args, **more: {**made(*args, **more), "value": value}


def chosen(preset: str) -> list[Any]:
    """For enabled, `FILLED_WITH` and all of `FILLED`, when somebody chose a preset."""
    return [gr.update(value=False) if preset == NO_PRESET else gr.update(), *_filled(preset)]


def caught_up(preset: str, note: str) -> list[Any]:
    """For the same, when that is answered: the choice that was made meanwhile. note: of `FILLED_WITH`."""
    return [gr.update() for _ in ("enabled", FILLED_WITH, *FILLED)] if note == preset else chosen(preset)


def switched(is_on: bool, preset: str) -> list[Any]:
    """For the preset, `FILLED_WITH` and all of `FILLED`, when it is switched: on and "off" do not go together."""
    if is_on and preset == NO_PRESET:
        return [gr.update(value=START), *_filled(START)]
    return [gr.update() for _ in ("preset", FILLED_WITH, *FILLED)]


def touched(preset: str, note: str, *values: Any) -> list[Any]:
    """For the preset and `FILLED_WITH`, when somebody may have changed what it filled in. values: of `FILLED`.

    note: of `FILLED_WITH`; the values are not this preset's while its filling-in is under way.
    """
    wanted = preset_values(preset)
    is_other = wanted and note == preset and list(wanted.values()) != list(values)
    return [gr.update(value=CUSTOM) if is_other else gr.update() for _ in ("preset", FILLED_WITH)]


def _filled(preset: str) -> list[Any]:
    values = preset_values(preset)
    return [gr.update(value=preset), *(gr.update(value=values[name]) if values else gr.update() for name in FILLED)]


TAKEN_OVER = ("enabled", "preset", FILLED_WITH, "hires", "hires_ratio", *FILLED)


def taken_over(is_img2img: bool) -> list[Any]:
    """Values for `TAKEN_OVER` that do what the webui's own merging is set to."""
    first, hires = host.built_in_ratios(is_img2img)
    same = first == hires
    values = {**DEFAULTS, "enabled": first > 0 or hires > 0, "preset": CUSTOM, FILLED_WITH: CUSTOM,
              "ratio": first, "hires": SAME if same else OWN, "hires_ratio": hires}  # fmt: skip
    return [values[name] for name in TAKEN_OVER]
