"""`app.py PORT TORCH`: our panel in real gradio with doubles of a webui's modules. TORCH: a folder to find torch in."""

import itertools
import json
import operator
import sys
import warnings
from functools import partial
from pathlib import Path

import gradio as gr

sys.path.append(str(Path(__file__).parents[1] / "host_doubles"))
import webui_modules

BY_TYPE = {bool: gr.Checkbox, int: gr.Number, str: gr.Textbox}
IS_OLD = gr.__version__ < "4"
# This page's own events bypass gradio 4's queue: it closes its stream of answers when none is left to come,
# and sometimes loses the answer to an event of that instant. The extension's own events use the queue.
AT_ONCE = {"queue": False}
# gradio drops a click of a button whose last answer was shown, but still counts as pending.
CLICKED = AT_ONCE if IS_OLD else {**AT_ONCE, "trigger_mode": "multiple"}
numbers = itertools.count()
if not IS_OLD:  # gradio writes a file next to each file that defines a component; Forge stops it too
    gr.component_meta.create_or_modify_pyi = lambda *args: None


def add_panel(webui):
    """The panel of txt2img, and the values that a job would get from it."""
    script = webui.script

    def generate(*values):
        """The infotext that the hooks have written before the first picture; it differs from the last answer."""
        p = type("Processing", (), {"enable_hr": True, "extra_generation_params": {}})()
        script.before_process(p, *values)
        script.process(p, *values)
        return json.dumps({"number": next(numbers), "ToMe": p.extra_generation_params.get("ToMe")})

    with gr.Group():
        controls = script.ui(False)
    answered = gr.Textbox(label="answer", elem_id="answer")
    gr.Button("generate", elem_id="generate").click(fn=generate, inputs=controls, outputs=[answered], **CLICKED)


def add_settings(webui):
    """The settings, each of which is a quicksetting that is saved when it changes."""
    opts = webui.shared.opts

    def save(key, value):
        """A quicksetting's component is updated with its own arguments."""
        opts.data[key] = value
        return gr.update(value=value, **(opts.labels[key].component_args or {}))

    for key, info in opts.labels.items():
        make, arguments = info.component or BY_TYPE[type(info.default)], info.component_args or {}
        quick = make(value=getattr(opts, key), label=info.label, elem_id=f"quick_{key}", **arguments)
        webui.call("after_component", quick, f"setting_{key}")
        quick.change(fn=partial(save, key), inputs=[quick], outputs=[quick], **AT_ONCE)


def main(port, torch_folder):
    sys.path.append(torch_folder)  # last, so that this environment's packages go first
    webui = webui_modules.Modules(operator.setitem, "a1111" if IS_OLD else "forge")
    webui.start()
    with gr.Blocks() as page, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # gradio 3 only warns of arguments that it does not know
        add_panel(webui)
        of_img2img = type(webui.script)()
        of_img2img.is_img2img = True
        with gr.Group():  # in bare blocks the panel would be the API's
            of_img2img.ui(True)
        add_settings(webui)
    page.launch(server_name="127.0.0.1", server_port=int(port), show_api=False, quiet=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
