"""Why a part or a block of a model may need every token: by its call's arguments, and by each module below it.

Fewer tokens are given only to code that is known to treat each token alone, or all alike: torch's layers, layers and
processors of the package that brings the block, of diffusers' models and of peft, and those that a host registers. All
other code may look at the picture's grid: hooks, methods that another program put in, processors of others, such as
those of diffusers' pipelines. It is not run to see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.modules import module as torchs

from ..attention.descriptions import full_name, name_of_patch
from ..reporting.ledger import MASKED, REPLACED
from .wrap import foreign_method_on, is_own

# packages whose code acts on each token alone, or is an attention that treats all tokens alike
_KNOWN = {"torch", "diffusers.models", "diffusers.quantizers", "peft.tuners", "ldm", "sgm", "bitsandbytes"}
# base classes, by name, of quantised layers in packages whose modules have no fixed name: ComfyUI-GGUF
_QUANTISED = {"GGMLLayer"}
# hooks that move or cast weights, by the module and name of their class; None stands for all of a module
_OF_WEIGHTS = {("accelerate.hooks", None)} | {("diffusers.hooks", name) for name in (
    "GroupOffloadingHook", "LayerExecutionTrackerHook", "LazyPrefetchGroupOffloadingHook", "LayerwiseCastingHook",
    "PeftInputAutocastDisableHook")}  # fmt: skip
TRAINS = "gradients are enabled; call the model under torch.no_grad()"
_MAY_NEED = "may need every token"
_REMEDY = "it merges without that"


def register_package(name: str) -> None:
    """Register a package or module whose code acts on each token alone, such as a host's LoRA layers."""
    _KNOWN.add(name)


class ModulesBelow:
    """Whether a module and all modules below it can take fewer tokens: `why` returns "" if so, else the reason.

    Ask it at every call. It looks at the modules again only if a hook, a method, a class, a child or a processor is
    another than before. To see this costs some microseconds for a block: no function is called for a module, because a
    model has thousands.

    Args:
        top: a block, or a part of one.
        name: of the part in its block; "" for a block.
        package: that brings the block, as a module's name; "": the one that brings `top`.
    """

    def __init__(self, top: nn.Module, name: str = "", package: str = "") -> None:
        self._top, self._name, self._package, self._why = top, name, package, ""
        self._modules: list[nn.Module] = []  # with `_own` and `_kinds` their attributes and classes

    def why(self) -> str:
        """Return the reason why some module may need every token, "" if none does."""
        if torchs._global_forward_hooks or torchs._global_forward_pre_hooks:
            return f"a hook on all modules {_MAY_NEED}; {_REMEDY}"
        if not self._modules or self._has_changed():
            self._take_stock()
            self._why = next(_reasons(self._top, self._name, self._package or type(self._top).__module__), "")
        return self._why

    def _has_changed(self) -> bool:
        """Tell whether anything that decides is another than when stock was taken."""
        for own in self._plain:
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
                return True
        for own, method, inner, hooks in self._special:
            # by ==: ComfyUI's blocks get a new bound method in each call
            if own.get("forward") != method or own.get("_forward") != inner or hooks != [
                    *own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()]:  # fmt: skip
                return True
        if [*chain.from_iterable(map(dict.values, self._parents))] != self._children:
            return True
        for kind, forward in self._forwards:
            if kind.forward is not forward:
                return True
        for own, kind in self._processors:
            if type(own["processor"]) is not kind:
                return True
        return [*map(type, self._modules)] != self._kinds

    def _take_stock(self) -> None:
        """Note everything that decides, for `_has_changed`."""
        self._modules = [*self._top.modules()]
        self._kinds = [*map(type, self._modules)]
        every, self._plain, self._special = [vars(module) for module in self._modules], [], []
        for own in every:
            hooks = [*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()]
            if hooks or "forward" in own or own is every[0]:
                self._special.append((own, own.get("forward"), own.get("_forward"), hooks))
            else:
                self._plain.append(own)
        self._parents = [own["_modules"] for own in every if own["_modules"]]
        self._children = [*chain.from_iterable(map(dict.values, self._parents))]
        self._forwards = [(kind, kind.forward) for kind in set(self._kinds)]
        self._processors = [(own, type(own["processor"])) for own in every if "processor" in own]


def _reasons(top: nn.Module, name: str, package: str) -> Iterator[str]:
    """Yield a reason for each module, `top` or below it, that may need every token, and for each of its hooks.

    `name` is that of `top` in its block, "" if it is the block; `package` is the name of the module with its class.
    """
    of_block = package.partition(".")[0]
    if of_block == "diffusers":  # its models are known; processors of its pipelines may keep maps of attention
        of_block = "torch"
    for path, module in top.named_modules():
        place, kind = ".".join(filter(None, (name, path))) or "the block", type(module)
        for part in (kind, kind.forward, type(getattr(module, "processor", None))):
            if not _is_known(part, of_block):
                yield f"{full_name(part)} at {place} {_MAY_NEED}; {_REMEDY}"
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not _is_known(hook, "torch"):
                yield f"a hook on {place} {_MAY_NEED} ({full_name(hook)}); {_REMEDY}"
        for hook in _hooks_of_libraries(module):
            yield f"a hook on {place} {_MAY_NEED} ({full_name(type(hook))}); {_REMEDY}"
        for slot in ("forward", "_forward"):
            method = foreign_method_on(module, slot) if hasattr(kind, slot) else None
            if method is not None and not is_own(module, method, slot) and not _runs_hooks(method):
                yield f"{REPLACED}, at {place}: {full_name(method)}; {_REMEDY}"


def _is_known(code: Any, package: str) -> bool:
    """Tell whether a class or function comes from a known package, or from the top-level `package`."""
    if isinstance(code, type) and any(base.__name__ in _QUANTISED for base in code.__mro__):
        return True
    name = getattr(code, "__module__", None) or type(code).__module__
    if name == "builtins":  # None's class, for want of a processor
        return True
    return name.partition(".")[0] == package or any(name == known or name.startswith(f"{known}.") for known in _KNOWN)


def _hooks_of_libraries(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of accelerate and diffusers on a module that do more than move or cast weights."""
    registry = getattr(module, "_diffusers_hook", None)
    waiting = [*getattr(registry, "hooks", {}).values(), *filter(None, [getattr(module, "_hf_hook", None)])]
    while waiting:
        hook = waiting.pop(0)
        kind = type(hook)
        if kind.__name__ == "SequentialHook":
            waiting += hook.hooks
        elif not any(kind.__module__.startswith(place) and name in (None, kind.__name__)
                     for place, name in _OF_WEIGHTS):  # fmt: skip
            yield hook


def _runs_hooks(method: Any) -> bool:
    """Tell whether a method is diffusers', which runs hooks around the method below."""
    return getattr(getattr(method, "func", method), "__module__", "") == "diffusers.hooks.hooks"


def why_of_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return why a block may need every token by its call's arguments after its input; "" if it does not.

    Reasons: a mask of its tokens, arguments for cross-attention's processors, or patches of attention at this block in
    the transformer_options of ComfyUI or Forge.
    """
    if kwargs.get("attention_mask") is not None:
        return MASKED
    options = kwargs.get("cross_attention_kwargs")
    if options and options.keys() - {"scale", "gligen"}:
        names = ", ".join(sorted(options.keys() - {"scale", "gligen"}))
        return f"an argument for cross-attention {_MAY_NEED} ({names}); {_REMEDY}"
    options = kwargs.get("transformer_options")
    if options is None and args:
        options = next((value for value in args if type(value) is dict), None)
    return why_of_options(options) if options else ""


def why_of_options(options: Mapping[str, Any]) -> str:
    """Return why the block that transformer_options name may need every token because of a patch; "" if it does not."""
    for kind, patches in (options.get("patches") or {}).items():
        if patches and kind.startswith(("attn", "middle_patch")):  # they run in each block
            return f"a patch of attention {_MAY_NEED} ({name_of_patch(patches[0])}); {_REMEDY}"
    for kind, patches in (options.get("patches_replace") or {}).items():
        if not patches or not kind.startswith("attn"):
            continue
        block = options.get("block")  # a patch names a transformer, or a block in it
        names = patches if block is None else (block, (*block, options.get("block_index", 0)))
        found = next((patches[name] for name in names if name in patches), None)
        if found is not None:
            return f"a patch of attention {_MAY_NEED} ({name_of_patch(found)}); {_REMEDY}"
    return ""
