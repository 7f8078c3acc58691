"""A webui's modules for an extension, and its loading of scripts; shim and Script are ours. No torch and no gradio."""

import inspect
import runpy
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAMPLING_HOOK = "process_before_every_sampling"
HOOKS = ("before_process", "process", "process_batch", "before_hr", "post_sample", "postprocess_batch")


class OptionInfo:
    def __init__(self, default=None, label="", component=None, component_args=None, section=None):
        self.default, self.label, self.component, self.component_args = default, label, component, component_args

    def info(self, text):
        return self


class Options:
    """shared.opts: an option that was never saved is an AttributeError. data: what was saved."""

    def __init__(self):
        self.labels, self.data = {}, {"token_merging_ratio": 0.0}
        self.add_option = self.labels.__setitem__

    def __getattr__(self, key):
        if key in vars(self)["data"]:
            return self.data[key]
        raise AttributeError(key)


PACKAGE = "_tome_core_webui"  # scripts/token_merging.py calls it so


class Modules:
    """modules.scripts and its like in this process; we are among the extensions. put_item: puts a value into a dict."""

    def __init__(self, put_item: Callable, flavour="a1111"):
        self.flavour, self._put_item = flavour, put_item
        self.callbacks = defaultdict(list)

        def elem_id(self, name):  # the real ones have the script's title too
            return f"script_{'img2img' if self.is_img2img else 'txt2img'}_{name}"

        script = type("Script", (), {"is_img2img": False, "elem_id": elem_id})
        for hook in HOOKS if flavour == "sdnext" else (*HOOKS, SAMPLING_HOOK):
            setattr(script, hook, lambda self, p, *args, **facts: None)
        self.scripts = self.put("modules.scripts", Script=script, AlwaysVisible=object(), scripts_data=[])
        self.shared = self.put("modules.shared", opts=Options(), sd_model=None, OptionInfo=OptionInfo)
        events = ["cfg_denoiser", "ui_settings", "before_ui", "script_unloaded", "after_component", "infotext_pasted"]
        if flavour == "sdnext":
            events.append("after_process")
        listeners = {f"on_{name}": self.callbacks[name].append for name in events}
        callbacks = self.put("modules.script_callbacks", **listeners)
        self.put("modules", scripts=self.scripts, shared=self.shared, script_callbacks=callbacks)

    def put(self, name, **contents):
        module = types.ModuleType(name)
        vars(module).update(contents)
        self._put_item(sys.modules, name, module)
        return module

    def call(self, name, *args):
        for function in list(self.callbacks[name]):
            function(*args)

    def start(self, root=ROOT):
        """The webui's start for a script: files run, settings and pages are built."""
        self.scripts.scripts_data.clear()
        classes = []
        if getattr(sys.modules.get(PACKAGE), "__path__", None) == [str(root)]:  # left by an interrupted webui
            for name in [module for module in sys.modules if module.startswith(PACKAGE)]:
                del sys.modules[name]
        path = list(sys.path)
        sys.path.insert(0, str(root))
        for file in sorted((root / "scripts").glob("*.py")):
            values = runpy.run_path(str(file), run_name=file.name).values()  # the script is not in sys.modules
            classes += [value for value in values if inspect.isclass(value) and issubclass(value, self.scripts.Script)]
        if self.flavour == "a1111":  # the Forges leave every extension's root on the path
            sys.path[:] = path
        work = self.engine("engine.work")
        work.pays = work.pays_in_part = lambda *args: True  # tests' pictures are too small to pay, see `any_size_pays`
        self.engine("engine.own_error").allowed = lambda *args: float("inf")  # see `any_error_is_allowed`
        self.call("before_ui")
        self.call("ui_settings")
        (script_class,) = classes
        self.script = script_class()
        return self

    def reload(self):
        """Reload UI: the files run again, and nothing else does."""
        self.call("script_unloaded")
        for listeners in self.callbacks.values():
            listeners.clear()
        return self.start()

    def part(self, name):
        return sys.modules[f"{PACKAGE}.extension.{name}"]

    def engine(self, name=""):
        return sys.modules[f"{PACKAGE}.tome_core.{name}".rstrip(".")]
