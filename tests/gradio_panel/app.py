"""Our panels and settings in a page of their own; run by the Python of an environment that holds a webui's gradio.

    app.py PORT TORCH

TORCH: a folder to find torch in, which such an environment lacks. Ends with its standard input. Gradio is real and
so is the extension; the webui's modules are doubles.
"""

from __future__ import annotations

import itertools
import json
import operator
import sys
import warnings
from pathlib import Path

import gradio as gr

sys.path.append(str(Path(__file__).parents[1]))
import webui_modules

QUICK = ("tome_enabled", "tome_strength", "tome_where")
BY_TYPE = {bool: gr.Checkbox, int: gr.Number, str: gr.Textbox}
BOX = "-checkbox"
IS_OLD = gr.__version__ < "4"
# What is asked only here does not wait in gradio 4's queue: it closes its stream of answers when none is left to come,
# and an answer to a question that is asked in that instant is lost now and then. The extension's own are in it.
AT_ONCE = {"queue": False}
# It drops a click of a button whose last answer was shown, but still counts as pending.
CLICKED = AT_ONCE if IS_OLD else {**AT_ONCE, "trigger_mode": "multiple"}
numbers = itertools.count()
if not IS_OLD:  # it writes a file beside each file that defines a component; Forge stops it too
    gr.component_meta.create_or_modify_pyi = lambda *args: None


class Switch(gr.Checkbox):
    """What InputAccordion makes: a checkbox, and beside it an accordion that is unfolded while it is checked.

    The webui hides the checkbox and links the two by a script of its page; this one is seen and clicked.
    """

    def link(self):
        """Make the accordion beside."""
        self.accordion = gr.Accordion(self.label, open=self.value, elem_id=self.elem_id.removesuffix(BOX))
        self.change(fn=lambda on: gr.update(open=on), inputs=[self], outputs=[self.accordion])

    def __enter__(self):
        self.accordion.__enter__()
        return self

    def __exit__(self, *error):
        self.accordion.__exit__(*error)

    def get_block_name(self):
        return "checkbox"


class SwitchOfA1111(Switch):
    """There it is a class."""

    def __init__(self, value, *, elem_id, **arguments):
        super().__init__(value, elem_id=elem_id + BOX, **arguments)
        self.link()


def switch_of_forge(value, *, elem_id, **arguments):
    """There it is a function, because gradio 4 makes a component again for each update."""
    made = Switch(value, elem_id=elem_id + BOX, **arguments)
    made.link()
    return made


def told(facts):
    """A text that differs from the last one, which the browser waits for."""
    return json.dumps({"number": next(numbers), **facts})


def changed(wish, values):
    """What differs from the panel's start."""
    plain = {**wish.base_of(0.5), **wish.DEFAULTS, wish.OWN: False, wish.FILLED_FOR: 0.5}
    return {name: values[name] for name in wish.ARGUMENTS if values[name] != plain[name]}


class Processing:
    """StableDiffusionProcessing, as far as nothing is sampled."""

    def __init__(self, enable_hr):
        self.enable_hr, self.extra_generation_params = enable_hr, {}


class Tab:
    """A panel, what a job would get from it, and the pasting of an infotext."""

    def __init__(self, webui, is_img2img):
        self.webui, self.wish = webui, webui.part("wish")
        self.script = script = type(webui.script)()
        script.is_img2img = is_img2img
        name = "img2img" if is_img2img else "txt2img"
        with gr.Group():
            controls = script.ui(is_img2img)
        generate = gr.Button("Generate", elem_id=f"{name}_generate")
        told_here = gr.Textbox(label="What the hooks got and made of it", elem_id=f"{name}_told")
        generate.click(fn=self.generate, inputs=controls, outputs=[told_here], **CLICKED)
        infotext = gr.Textbox(label="Infotext, as JSON", elem_id=f"{name}_infotext")
        paste = gr.Button("Paste", elem_id=f"{name}_paste")
        fields = [control for control, _ in script.infotext_fields]
        paste.click(fn=self.paste, inputs=[infotext], outputs=[*fields, told_here], **CLICKED)

    def generate(self, *values):
        """The hooks until the infotext is written."""
        p = Processing(enable_hr=not self.script.is_img2img)
        self.script.before_process(p, *values)
        self.script.process(p, *values)
        found = changed(self.wish, dict(zip(self.wish.ARGUMENTS, values, strict=True)))
        written = {key: value for key, value in p.extra_generation_params.items() if not callable(value)}
        return told({"changed": found, "infotext": written})

    def paste(self, text):
        """The webui leaves a control alone for which its function gives None."""
        parameters = json.loads(text)
        self.webui.call("infotext_pasted", text, parameters)
        found = [read(parameters) for _, read in self.script.infotext_fields]
        return [*(gr.update() if value is None else gr.update(value=value) for value in found), told({})]


class Settings:
    """The settings tab, and some of its settings again as quicksettings, which are saved when they change."""

    def __init__(self, webui):
        self.opts = webui.shared.opts
        for key in self.opts.labels:
            self.row(f"setting_{key}", key)
        for key in QUICK:
            row = self.row(f"quick_{key}", key)
            webui.call("after_component", row, f"setting_{key}")
            row.change(fn=lambda value, key=key: self.save_one(key, value), inputs=[row], outputs=[row], **AT_ONCE)

    def row(self, elem_id, key):
        """The component of a setting."""
        info = self.opts.labels[key]
        make = info.component or BY_TYPE[type(info.default)]
        return make(value=getattr(self.opts, key), label=info.label, elem_id=elem_id, **(info.component_args or {}))

    def save_one(self, key, value):
        """A quicksetting's component is updated with its own arguments, but for the precision."""
        arguments = {name: one for name, one in (self.opts.labels[key].component_args or {}).items()
                     if name != "precision"}  # fmt: skip
        self.opts.data[key] = value
        return gr.update(value=value, **arguments)


def build():
    """The page."""
    webui = webui_modules.Modules(operator.setitem, "a1111" if IS_OLD else "forge")
    webui.put("modules.ui_components", InputAccordion=SwitchOfA1111 if IS_OLD else switch_of_forge)
    webui.start()
    with gr.Blocks() as page, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # gradio 3 drops arguments that it does not know, and says only so
        for is_img2img in (False, True):
            Tab(webui, is_img2img)
        Settings(webui)
    return page


def main(port, torch_folder):
    """Serve the page."""
    sys.path.append(torch_folder)  # last, so that it outweighs nothing of this environment
    page = build()
    page.launch(server_name="127.0.0.1", server_port=int(port), prevent_thread_lock=True, show_api=False, quiet=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
