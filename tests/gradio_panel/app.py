"""Our panel and settings in a page of their own; run by the Python of an environment that holds a webui's gradio.

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
        """Make the accordion."""
        self.accordion = gr.Accordion(self.label, open=self.value, elem_id=self.elem_id.removesuffix(BOX))
        self.change(fn=lambda on: gr.update(open=on), inputs=[self], outputs=[self.accordion])
        return self

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
    return Switch(value, elem_id=elem_id + BOX, **arguments).link()


class Processing:
    """StableDiffusionProcessing, as far as nothing is sampled."""

    enable_hr = True

    def __init__(self):
        self.extra_generation_params = {}


def answer(**facts):
    """A text that differs from the last one, which the browser waits for."""
    return json.dumps({"number": next(numbers), **facts})


def add_panel(webui):
    """The panel of txt2img, what a job would get from it, and the pasting of an infotext."""
    wish, script = webui.part("wish"), webui.script
    plain = {**wish.base_of(0.5), **wish.DEFAULTS, wish.OWN: False, wish.FILLED_FOR: 0.5}

    def generate(*values):
        """The hooks until the infotext is written: what is not as the panel starts, and the infotext."""
        p = Processing()
        script.before_process(p, *values)
        script.process(p, *values)
        named = dict(zip(wish.ARGUMENTS, values, strict=True))
        written = {key: value for key, value in p.extra_generation_params.items() if not callable(value)}
        return answer(changed={name: value for name, value in named.items() if value != plain[name]}, infotext=written)

    def paste(text):
        """The webui leaves a control alone for which its function gives None."""
        parameters = json.loads(text)
        webui.call("infotext_pasted", text, parameters)
        values = [read(parameters) for _, read in script.infotext_fields]
        return [*(gr.update() if value is None else gr.update(value=value) for value in values), answer()]

    with gr.Group():
        controls = script.ui(False)
    generating, pasting = (gr.Button(name, elem_id=name) for name in ("generate", "paste"))
    infotext, answered = (gr.Textbox(label=name, elem_id=name) for name in ("infotext", "answer"))
    generating.click(fn=generate, inputs=controls, outputs=[answered], **CLICKED)
    fields = [control for control, _ in script.infotext_fields]
    pasting.click(fn=paste, inputs=[infotext], outputs=[*fields, answered], **CLICKED)


def add_settings(webui):
    """The settings tab, and some of its settings again as quicksettings, which are saved when they change."""
    opts = webui.shared.opts

    def row(elem_id, key):
        """The component of a setting."""
        info = opts.labels[key]
        make = info.component or BY_TYPE[type(info.default)]
        return make(value=getattr(opts, key), label=info.label, elem_id=elem_id, **(info.component_args or {}))

    def save(key, value):
        """A quicksetting's component is updated with its own arguments, but for the precision."""
        arguments = opts.labels[key].component_args or {}
        opts.data[key] = value
        return gr.update(value=value, **{name: part for name, part in arguments.items() if name != "precision"})

    for key in opts.labels:
        row(f"setting_{key}", key)
    for key in QUICK:
        quick = row(f"quick_{key}", key)
        webui.call("after_component", quick, f"setting_{key}")
        quick.change(fn=lambda value, key=key: save(key, value), inputs=[quick], outputs=[quick], **AT_ONCE)


def main(port, torch_folder):
    """Serve the page."""
    sys.path.append(torch_folder)  # last, so that it outweighs nothing of this environment
    webui = webui_modules.Modules(operator.setitem, "a1111" if IS_OLD else "forge")
    webui.put("modules.ui_components", InputAccordion=SwitchOfA1111 if IS_OLD else switch_of_forge)
    webui.start()
    with gr.Blocks() as page, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # gradio 3 drops arguments that it does not know, and says only so
        add_panel(webui)
        of_img2img = type(webui.script)()
        of_img2img.is_img2img = True
        with gr.Group():  # in bare blocks it would be the API's
            of_img2img.ui(True)
        add_settings(webui)
    page.launch(server_name="127.0.0.1", server_port=int(port), prevent_thread_lock=True, show_api=False, quiet=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
