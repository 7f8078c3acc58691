"""The panel in txt2img and img2img, and its links to the webui's controls, for gradio 3.41 to 4.40."""

from __future__ import annotations

import html
from functools import partial
from typing import Any

import gradio as gr
from gradio.context import Context

from ..tome_core.hosting import MARKS, form
from . import host, infotext, panel_line, settings_tab
from .job_settings import ARGUMENTS, DEFAULTS, DIAL, EXPERT_SWITCH, FILLED_FOR, TITLE, WHERE, base_of, find_filled, read

_TIPS = {
    "enabled": "Merge tokens in the pictures that you generate.",
    "strength": "A higher strength takes less time and changes the picture more. Begin with 0.5; lower it if details "
                "are lost, raise it if you see no change. 0 is off, bit for bit.",
    "where": "Which pass merges. Merging in the hires pass alone keeps the composition.",
    EXPERT_SWITCH: "Use the settings below. A setting follows Strength until you change that setting.",
    **{field.name: field.help for field in form.FIELDS},
}  # fmt: skip
_QUIETLY = {"show_progress": False, "queue": False}
_HIRES = ("hr-checkbox", "hr_scale", "hr_resize_x", "hr_resize_y")
# hidden texts that change after each job; gradio 4's HTML also tells of a change whenever an answer is awaited
_RESULTS = {"generation_info_txt2img": "txt2img", "generation_info_img2img": "img2img"}
_OF_TAB = {"txt2img": ("width", "height", *_HIRES), "img2img": ("width", "height")}
_IN_SDNEXT = dict(zip(("enable_hr", "scale", "resize_width", "resize_height"), _HIRES, strict=True))
_SETTINGS = {f"setting_tome_{name}": name for name in DIAL}
_panels: dict[str, Panel] = {}  # of the latest page, by tab
_waiting: dict[str, Panel] = {}  # panels that are not linked to the webui's controls yet
_IS_OFF = "off; if enabled, "
_BY_FACTOR = "resized by a factor: the size is known only when the picture is drawn"
_BY = {"img2img_tab_resize_to": 0, "img2img_tab_resize_by": 1}
_tabs: dict[str, Any] = {}  # img2img's tabs for a size and for a factor
_found: dict[str, dict[str, Any]] = {tab: {} for tab in _OF_TAB}  # the webui's controls that are not linked yet


def note(control: Any, elem_id: str) -> None:
    """Link a control of the webui, if its `elem_id` is known here, to the panels' line or to the panels made before."""
    if Context.root_block is None:  # gradio 4 makes a control again for an update of it
        return
    if elem_id in _SETTINGS:
        ours = [panel.made[_SETTINGS[elem_id]] for panel in _panels.values()]
        if ours:
            # gradio takes the value itself if there is one output
            control.change(fn=lambda value: [value] * len(ours) if ours[1:] else value, inputs=[control],
                           outputs=ours, **_QUIETLY)  # fmt: skip
        if ours and elem_id == "setting_tome_enabled":  # the other quicksettings next to it count, too
            others = [panel.made[name] for panel in _panels.values() for name in DIAL[1:]]
            control.change(fn=_quicksetting_updates, inputs=[control], outputs=others, **_QUIETLY)
        return
    if elem_id in _BY:  # the other tab's width and height have no meaning
        _tabs[elem_id] = control
    if elem_id in _RESULTS and _RESULTS[elem_id] in _panels:
        _panels[_RESULTS[elem_id]].answer_after(control)
    tab, _, name = elem_id.partition("_")
    name = _IN_SDNEXT.get(name, name)
    if name in _OF_TAB.get(tab, ()):
        _found[tab][name] = control
        _link(tab)


def _quicksetting_updates(is_on: bool) -> list[Any]:
    """Return updates of "strength" and "where", panel by panel: if `is_on`, those in quicksettings get its values."""
    shown = [*host.option("quicksettings_list", []), *host.option("quick_setting_list", [])] if is_on else []
    return [gr.update(value=settings_tab.default_of(name)) if f"tome_{name}" in shown else gr.update()
            for _ in _panels for name in DIAL[1:]]  # fmt: skip


def _link(tab: str) -> None:
    """Link a tab's new panel to the webui's controls if all are made by now; call again after each that is made."""
    theirs = _found[tab]
    if tab in _waiting and len(theirs) == len(_OF_TAB[tab]):
        _waiting.pop(tab).follow({name: theirs.pop(name) for name in _OF_TAB[tab]})


class Panel:
    """The extension's controls in one tab: `made` by name, `controls` in the order of `ARGUMENTS`."""

    def __init__(self, is_img2img: bool, elem_id: Any) -> None:
        self._elem_id = elem_id
        self.made: dict[str, Any] = {}
        self._answer: dict[str, Any] = {}  # arguments of an event that updates the line; none before `follow`
        tab = "img2img" if is_img2img else "txt2img"
        # no InputAccordion: to unfold it would be to switch merging on
        with gr.Accordion(label=TITLE, open=False, elem_id=elem_id("panel")) as self._box:
            self._build()
            self._by = gr.Number(0, visible=False)  # 1 if img2img's size is a factor
        self.controls = [self.made[name] for name in ARGUMENTS]
        if Context.block is Context.root_block:  # made for the API, which reads the initial values
            for control in self.controls:  # None, so that a call without a value uses the setting
                control.value = None
            return
        self._start_with_saved_defaults()
        self._connect()
        _panels[tab] = _waiting[tab] = self
        _link(tab)

    def paste_fields(self) -> list[tuple[Any, Any]]:
        """Return pairs: a control, and a function from a parsed infotext to its value, or None to let it stay."""
        paste = infotext.Paste()
        return [(self.made[name], partial(paste.value, name)) for name in ARGUMENTS]

    def _build(self) -> None:
        """Make all controls."""
        self._add("enabled", gr.Checkbox, label="Enable", value=DEFAULTS["enabled"])
        self._add("strength", gr.Slider, label="Strength", value=DEFAULTS["strength"], minimum=0, maximum=1, step=0.01)
        gr.HTML(_marks(self._elem_id("strength")))
        self._add("where", gr.Radio, label="Where", value=DEFAULTS["where"], choices=list(WHERE), visible=False)
        self._line = gr.HTML("", elem_id=self._elem_id("line"))
        with gr.Accordion(label="Expert", open=False, elem_id=self._elem_id("expert")):
            self._add(EXPERT_SWITCH, gr.Checkbox, label="Own settings", value=False)
            self._add(FILLED_FOR, gr.Number, label="Filled for", value=DEFAULTS["strength"], visible=False)
            for group in form.GROUPS:
                gr.HTML(f"<b>{group.capitalize()}</b>")
                for row in rows_of(group):
                    with gr.Row():
                        for field in row:
                            self._add_field(field)

    def _add(self, name: str, kind: Any, **arguments: Any) -> None:
        """Make a component of gradio's class `kind` with `name`'s element id and tooltip, and keep it in `made`."""
        self.made[name] = kind(elem_id=self._elem_id(name), **arguments)
        self.made[name].webui_tooltip = _TIPS.get(name)

    def _add_field(self, field: form.Field) -> None:
        """Make the control of a field of the engine's form."""
        kind, facts = _component(field)
        label = f"{field.label} ({field.unit})" if field.unit else field.label
        value = base_of(DEFAULTS["strength"])[field.name]
        self._add(field.name, kind, label=label, value=value, min_width=120, **facts)

    def _start_with_saved_defaults(self) -> None:
        """Start pages with the settings tab's values and its strength's expert settings, unless others were saved."""
        for name in DIAL:
            control = self.made[name]
            _show(control, "value", lambda control=control, name=name: _first_value(name, control.value))
        strength, usual = self.made["strength"], base_of(DEFAULTS["strength"])
        _show(self.made[FILLED_FOR], "value", lambda: _first_value("strength", strength.value))
        for name, value in usual.items():
            control = self.made[name]
            _show(control, "value", lambda control=control, name=name, value=value: (
                base_of(_first_value("strength", strength.value), host.curve())[name] if control.value == value
                else control.value))  # fmt: skip
        _show(self._box, "label", lambda: _title(_first_value("enabled", self.made["enabled"].value)))

    def _connect(self) -> None:
        """Let the label follow "enabled", and fields follow strength and "own"; a typed field turns "own" on."""
        fields = [self.made[name] for name in form.NAMES]
        enabled, strength = self.made["enabled"], self.made["strength"]
        own, filled = self.made[EXPERT_SWITCH], self.made[FILLED_FOR]
        enabled.change(fn=lambda on: gr.update(label=_title(on)), inputs=[enabled], outputs=[self._box], **_QUIETLY)
        inputs, outputs = [strength, own, filled, *fields], [filled, *fields]
        along = {"fn": follow_strength, "inputs": inputs, "outputs": outputs, **_QUIETLY}
        # gradio drops an event while the same one is running, so each event is followed by another
        strength.change(**along).then(**along)
        own.change(**along)  # another model may have been loaded since they were filled in
        for field in fields:  # a typed value switches own settings on
            field.input(fn=lambda: True, inputs=[], outputs=[own], **_QUIETLY)

    def follow(self, theirs: dict[str, Any]) -> None:
        """Let the line follow our controls and `theirs`, the webui's by name, in the order of `_OF_TAB`. Call once."""
        inputs = [self._by, *self.controls, *theirs.values()]
        update = self._answer = {"fn": _line, "inputs": inputs, "outputs": [self._line], **_QUIETLY}
        Context.root_block.load(**update)  # each page begins with an answer
        for control in (*(self.made[name] for name in DIAL), self.made[EXPERT_SWITCH], *theirs.values()):
            control.change(**update).then(**update)
        for name in form.NAMES:
            self.made[name].input(**update)
        switch, where = theirs.get("hr-checkbox"), self.made["where"]
        if switch is not None:
            _show(where, "visible", lambda: bool(switch.value))
            # another value than the default stays in sight, because nothing may merge by it
            switch.change(fn=lambda on, chosen: gr.update(visible=bool(on) or chosen != DEFAULTS["where"]),
                          inputs=[switch, where], outputs=[where], **_QUIETLY)  # fmt: skip
            return
        for name, tab in _tabs.items():
            tab.select(fn=lambda by=_BY[name]: by, inputs=[], outputs=[self._by], **_QUIETLY)
        self._by.change(**update)

    def answer_after(self, result: Any) -> None:
        """Let the line follow a text of the webui that changes after each job, if it follows the controls already."""
        if self._answer:
            result.change(**self._answer)


def _show(control: Any, key: str, value: Any) -> None:
    """Start each page with ``value()`` for a property; the property stays, for the webui saves it as a default."""
    get_config = control.get_config
    control.get_config = lambda *args, **more: {**get_config(*args, **more), key: value()}


def _title(is_on: bool) -> str:
    """Return the label of the box, which tells even folded whether merging is on."""
    return f"{TITLE}: on" if is_on else TITLE


def _first_value(name: str, saved: Any) -> Any:
    """Return a control's first value: `saved`, or the settings tab's if that is our default, or ours if impossible."""
    wanted = settings_tab.default_of(name) if saved == DEFAULTS[name] else saved
    try:
        return getattr(read(({**DEFAULTS, "enabled": True, name: wanted},), settings_tab.default_of), name)
    except (TypeError, ValueError):  # a settings file may hold anything
        return DEFAULTS[name]


def rows_of(group: str) -> list[list[form.Field]]:
    """Return a group's form fields in rows of at most three of one kind: choices, then numbers, then switches."""
    rows = []
    for kinds in ((gr.Dropdown,), (gr.Slider, gr.Number), (gr.Checkbox,)):
        fields = [field for field in form.FIELDS if field.group == group and _component(field)[0] in kinds]
        rows += [fields[start : start + 3] for start in range(0, len(fields), 3)]
    return rows


def _component(field: form.Field) -> tuple[Any, dict[str, Any]]:
    """Return a field's gradio class, and arguments without value and label."""
    if field.choices:
        return gr.Dropdown, {"choices": list(field.choices)}
    if isinstance(field.default, bool):
        return gr.Checkbox, {}
    if field.may_be_unset or field.name == "merge_seed":
        return gr.Number, {"precision": 0} if isinstance(field.step, int) else {}
    return gr.Slider, {"minimum": field.minimum, "maximum": field.maximum, "step": field.step}


def _marks(slider: str) -> str:
    """Return HTML with names of five strengths below their positions on a slider, given by its id; a click sets it."""
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


def follow_strength(strength: float, own: bool, filled_for: float, *values: Any) -> list[Any]:
    """Return gradio updates of `FILLED_FOR` and all fields for a new strength. If `own`, changed fields stay."""
    current, curve = dict(zip(form.NAMES, values, strict=True)), host.curve()
    try:
        before, now = find_filled(current, filled_for, curve), base_of(strength, curve)
    except ValueError:  # a number is being typed
        return [gr.update() for _ in (FILLED_FOR, *values)]
    wanted = now | {name: value for name, value in current.items() if own and value != before[name]}
    # no update of equal values, because the user may have typed a newer value by then
    changes = [gr.update() if current[name] == value else gr.update(value=value) for name, value in wanted.items()]
    return [gr.update(value=strength), *changes]


def _line(by_factor: Any, *values: Any) -> str:
    """Return the panel's line for the next picture, or a wrong value's error, as HTML; if merging is off, as if on."""
    # the panel's controls, then the webui's
    mine, theirs = values[: len(ARGUMENTS)], values[len(ARGUMENTS) :]
    if by_factor:
        return _BY_FACTOR
    try:
        settings = read((True, *mine[1:]), settings_tab.default_of, curve=host.curve())
        unused = (f"not used: {reason}" for reason in settings.left_out)
        text = "; ".join([panel_line.answer(settings, _sizes(*theirs)), *unused])
    except (TypeError, ValueError) as error:
        text = str(error)
    return html.escape(text if mine[0] else f"{_IS_OFF}{text}")


def _sizes(width: Any, height: Any, hires: Any = False, *scaling: Any) -> dict[bool, tuple[int, int]]:
    """Return (width, height) of the first pass, by False, and if `hires` `host.hires_size` of that pass, by True."""
    # the user may be typing a side, which is None then
    first = int(width or 0), int(height or 0)
    return {False: first, True: host.hires_size(*first, *scaling)} if hires else {False: first}
