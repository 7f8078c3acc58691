"""The panel in txt2img and img2img, and the webui's own controls that it goes by: sizes, Hires. fix, quicksettings.

Only what gradio 3.41 and 4.40 both have.
"""

from __future__ import annotations

import html
from functools import partial
from typing import Any

import gradio as gr
from gradio.context import Context

from ..tome_core.hosting import MARKS, form
from . import host, infotext, measuring, options
from .wish import ARGUMENTS, DEFAULTS, DIAL, FILLED_FOR, OWN, TITLE, WHERE, base_of, find_filled, read

_TIPS = {
    "strength": "Higher is faster and changes the picture more. 0 is off.",
    "where": "Which pass merges. Merging in the hires pass alone leaves the composition as it is.",
    OWN: "Use the settings below. Each of them follows Strength until you change it.",
    "measure": "Time this model at this size now, with merging and without. It takes seconds and is remembered.",
    **{one.name: one.help for one in form.FIELDS},
}  # fmt: skip
_QUIETLY = {"show_progress": False, "queue": False}
_HIRES = ("hr-checkbox", "hr_scale", "hr_resize_x", "hr_resize_y")
_OF_TAB = {"txt2img": ("width", "height", *_HIRES), "img2img": ("width", "height")}
_IN_SDNEXT = dict(zip(("enable_hr", "scale", "resize_width", "resize_height"), _HIRES, strict=True))
_SETTINGS = {f"setting_tome_{name}": name for name in DIAL}
_panels: dict[str, Panel] = {}  # of the latest page, by tab
_waiting: dict[str, Panel] = {}  # those of them that do not go by the webui's controls yet
_BY_FACTOR = "resized by a factor: its size is known when the picture is drawn"
_BY = {"img2img_tab_resize_to": 0, "img2img_tab_resize_by": 1}
_tabs: dict[str, Any] = {}  # those of a size and of a factor
_found: dict[str, dict[str, Any]] = {tab: {} for tab in _OF_TAB}  # the webui's controls that no panel goes by yet


def note(control: Any, elem_id: str) -> None:
    """The webui has made a control, maybe such a one; it makes them in an order that its user can change."""
    if Context.root_block is None:  # gradio 4 makes a control anew for an answer that changes one
        return
    if elem_id in _SETTINGS:
        ours = [panel.made[_SETTINGS[elem_id]] for panel in _panels.values()]
        if ours:
            # gradio takes the value itself if there is one output
            control.change(fn=lambda value: [value] * len(ours) if ours[1:] else value, inputs=[control],
                           outputs=ours, **_QUIETLY)  # fmt: skip
        if ours and elem_id == "setting_tome_enabled":  # beside it the others are seen, so that they are what counts
            others = [panel.made[name] for panel in _panels.values() for name in DIAL[1:]]
            control.change(fn=_as_quick, inputs=[control], outputs=others, **_QUIETLY)
        return
    if elem_id in _BY:  # the other tab's width and height stay, and mean nothing
        _tabs[elem_id] = control
    tab, _, name = elem_id.partition("_")
    name = _IN_SDNEXT.get(name, name)
    if name in _OF_TAB.get(tab, ()):
        _found[tab][name] = control
        _link(tab)


def _as_quick(is_on: bool) -> list[Any]:
    """For the other controls of the dial: what the quicksettings say as merging is switched on there."""
    shown = [*host.option("quicksettings_list", []), *host.option("quick_setting_list", [])] if is_on else []
    return [gr.update(value=options.of_dial(name)) if f"tome_{name}" in shown else gr.update()
            for _ in _panels for name in DIAL[1:]]  # fmt: skip


def _link(tab: str) -> None:
    """Let the tab's panel go by the webui's controls, as soon as all of them and the panel are there."""
    theirs = _found[tab]
    if tab in _waiting and len(theirs) == len(_OF_TAB[tab]):
        _waiting.pop(tab).follow({name: theirs.pop(name) for name in _OF_TAB[tab]})


class Panel:
    """The controls of one tab: `made`, by name, and `controls` in the order of `ARGUMENTS`. elem_id: makes names."""

    def __init__(self, is_img2img: bool, elem_id: Any) -> None:
        self._elem_id = elem_id
        self.made: dict[str, Any] = {}
        tab = "img2img" if is_img2img else "txt2img"
        with host.accordion(DEFAULTS["enabled"], TITLE, elem_id("enabled")) as enabled:
            self.made["enabled"] = enabled
            self._build()
            self._by = gr.Number(0, visible=False)  # is img2img's size a factor?
        self.controls = [self.made[name] for name in ARGUMENTS]
        if Context.block is Context.root_block:  # the API's, made in bare blocks for the values that they start with
            for one in self.controls:  # so that a call that does not say gets what the settings say
                one.value = None
            return
        self._begin_as_set(enabled)
        self._connect()
        _panels[tab] = _waiting[tab] = self
        _link(tab)

    def paste_fields(self) -> list[tuple[Any, Any]]:
        """(control, what reads its value from an infotext), for the webui."""
        paste = infotext.Paste()
        return [(self.made[name], partial(paste.value, name)) for name in ARGUMENTS]

    def _build(self) -> None:
        self._add("strength", gr.Slider, label="Strength", value=DEFAULTS["strength"], minimum=0, maximum=1, step=0.01)
        gr.HTML(_marks(self._elem_id("strength")))
        self._add("where", gr.Radio, label="Where", value=DEFAULTS["where"], choices=list(WHERE), visible=False)
        with gr.Row():
            self._line = gr.HTML("", elem_id=self._elem_id("line"))
            self._add("measure", gr.Button, value="Measure", size="sm", scale=0, min_width=90)
        with gr.Accordion("Expert", open=False, elem_id=self._elem_id("expert")):
            self._add(OWN, gr.Checkbox, label="Own settings", value=False)
            self._add(FILLED_FOR, gr.Number, label="Filled for", value=DEFAULTS["strength"], visible=False)
            for group in form.GROUPS:
                gr.HTML(f"<b>{group.capitalize()}</b>")
                for row in rows_of(group):
                    with gr.Row():
                        for one in row:
                            self._add_field(one)

    def _add(self, name: str, kind: Any, **arguments: Any) -> None:
        self.made[name] = kind(elem_id=self._elem_id(name), **arguments)
        self.made[name].webui_tooltip = _TIPS.get(name)

    def _add_field(self, one: form.Field) -> None:
        kind, facts = _component(one)
        label, value = f"{one.label} ({one.unit})" if one.unit else one.label, base_of(DEFAULTS["strength"])[one.name]
        self._add(one.name, kind, label=label, value=value, min_width=120, **facts)

    def _begin_as_set(self, enabled: Any) -> None:
        """Let the page start with the settings where the user's own defaults of the panel do not say otherwise."""
        for name in DIAL:
            control = self.made[name]
            _show(control, "value", lambda control=control, name=name: _start(name, control.value))
        strength, usual = self.made["strength"], base_of(DEFAULTS["strength"])
        _show(self.made[FILLED_FOR], "value", lambda: _start("strength", strength.value))
        for name, value in usual.items():
            control = self.made[name]
            _show(control, "value", lambda control=control, name=name, value=value: (
                base_of(_start("strength", strength.value), host.layout())[name] if control.value == value
                else control.value))  # fmt: skip
        fold = getattr(enabled, "accordion", None)
        if fold is not None:
            _show(fold, "open", lambda: _start("enabled", enabled.value))

    def _connect(self) -> None:
        fields = [self.made[name] for name in form.NAMES]
        strength, own, filled = (self.made[name] for name in ("strength", OWN, FILLED_FOR))
        along = {"fn": moved, "inputs": [strength, own, filled, *fields], "outputs": [filled, *fields], **_QUIETLY}
        # gradio drops an event while its like is unanswered, so behind each answer is asked what came meanwhile
        strength.change(**along).then(**along)
        own.change(**along)  # another model may have come since they were filled in
        for field in fields:  # what is typed counts
            field.input(fn=lambda: True, inputs=[], outputs=[own], **_QUIETLY)

    def follow(self, theirs: dict[str, Any]) -> None:
        """Answer in a line, by the webui's own controls of sizes. theirs: those controls, by name."""
        asked = {"inputs": [self._by, *self.controls, *theirs.values()], "outputs": [self._line]}
        told = {"fn": lambda *values: _line(*values), **asked, **_QUIETLY}
        for control in (*(self.made[name] for name in DIAL), self.made[OWN], *theirs.values()):
            control.change(**told).then(**told)
        for name in form.NAMES:
            self.made[name].input(**told)
        self.made["measure"].click(fn=lambda *values: _line(*values, measure=True), **asked)
        switch, where = theirs.get("hr-checkbox"), self.made["where"]
        if switch is not None:
            _show(where, "visible", lambda: bool(switch.value))
            switch.change(fn=lambda on: gr.update(visible=bool(on)), inputs=[switch], outputs=[where], **_QUIETLY)
            return
        for name, tab in _tabs.items():
            tab.select(fn=lambda by=_BY[name]: by, inputs=[], outputs=[self._by], **_QUIETLY)
        self._by.change(**told)


def _show(control: Any, key: str, value: Any) -> None:
    """Let the page start with this; the control's own value stays, which is what the webui saves as its default."""
    made = control.get_config
    control.get_config = lambda *args, **more: {**made(*args, **more), key: value()}


def _start(name: str, saved: Any) -> Any:
    """What the page starts with: the user's default of the panel, which is `saved`, or else what the settings say."""
    wanted = options.of_dial(name) if saved == DEFAULTS[name] else saved
    try:
        return getattr(read(({**DEFAULTS, "enabled": True, name: wanted},), options.of_dial), name)
    except (TypeError, ValueError):  # files of settings can hold anything
        return DEFAULTS[name]


def rows_of(group: str) -> list[list[form.Field]]:
    """A group's fields in rows of at most three: choices, then numbers, then switches."""
    rows = []
    for kinds in ((gr.Dropdown,), (gr.Slider, gr.Number), (gr.Checkbox,)):
        fields = [one for one in form.FIELDS if one.group == group and _component(one)[0] in kinds]
        rows += [fields[start : start + 3] for start in range(0, len(fields), 3)]
    return rows


def _component(one: form.Field) -> tuple[Any, dict[str, Any]]:
    """The gradio component of a field, and its arguments apart from value and label."""
    if one.choices:
        return gr.Dropdown, {"choices": list(one.choices)}
    if isinstance(one.default, bool):
        return gr.Checkbox, {}
    if one.may_be_unset or one.name == "merge_seed":
        return gr.Number, {"precision": 0} if isinstance(one.step, int) else {}
    return gr.Slider, {"minimum": one.minimum, "maximum": one.maximum, "step": one.step}


def _marks(slider: str) -> str:
    """The names of five strengths, below their places on the slider; a click sets it."""
    set_it = "const box = document.querySelector('#{id} input[type=number]'); box.value = {value}; " \
        "box.dispatchEvent(new Event('input', {{bubbles: true}}))"  # fmt: skip
    style = "position:absolute;left:calc(8px + (100% - 16px) * {value});transform:translateX({shift}%);" \
        "cursor:pointer;text-decoration:underline"  # fmt: skip
    marks = "".join(
        f'<a role="button" style="{style.format(value=value, shift={0: 0, 1: -100}.get(value, -50))}" '
        f'onclick="{html.escape(set_it.format(id=slider, value=value))}">{name}</a>'
        for name, value in {"off": 0.0, **MARKS}.items()
    )  # fmt: skip
    return f'<div style="position:relative;height:1.4em;font-size:.85em;opacity:.8">{marks}</div>'


def moved(strength: float, own: bool, filled_for: float, *values: Any) -> list[Any]:
    """For `FILLED_FOR` and all fields: what a strength stands for, where an expert had set nothing else."""
    held, layout = dict(zip(form.NAMES, values, strict=True)), host.layout()
    try:
        before, now = find_filled(held, filled_for, layout), base_of(strength, layout)
    except ValueError:  # while somebody types
        return [gr.update() for _ in (FILLED_FOR, *values)]
    wanted = now | {name: value for name, value in held.items() if own and value != before[name]}
    # none for what a field holds already, as something newer may have been typed by then
    changes = [gr.update() if held[name] == value else gr.update(value=value) for name, value in wanted.items()]
    return [gr.update(value=strength), *changes]


def _line(by_factor: Any, *values: Any, measure: bool = False) -> str:
    """What is known of the picture to come, or measured now. values: of the panel, then of the webui's controls."""
    mine, theirs = values[: len(ARGUMENTS)], values[len(ARGUMENTS) :]
    if by_factor:
        return _BY_FACTOR
    try:
        wish = read((True, *mine[1:]), options.of_dial, layout=host.layout())
        unused = (f"not used: {one}" for one in wish.left_out)
        text = "; ".join([measuring.answer(wish, _sizes(*theirs), measure), *unused])
    except (TypeError, ValueError) as error:
        text = str(error)
    return html.escape(text)


def _sizes(width: Any, height: Any, hires: Any = False, *scaling: Any) -> dict[bool, tuple[int, int]]:
    """Of a picture's passes, for `measuring.answer`, by the webui's controls, which are None while somebody types."""
    first = int(width or 0), int(height or 0)
    return {False: first, True: host.hires_size(*first, *scaling)} if hires else {False: first}
