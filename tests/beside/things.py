"""Things that people put on a model as well as merging, as their makers do; most change their input a little."""

import functools
import types
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import accelerate
import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode as PAG
from peft import LoraConfig
from torch import nn
from torch.utils._pytree import tree_map

from tests.beside.models import Beside

On = Callable[[Beside], AbstractContextManager]
Places = Callable[[Beside], list[nn.Module]]
TakeOff = Callable[[], Any]
CPU = torch.device("cpu")


class Thing(NamedTuple):
    """on: a context manager, inside which it is on. left: when attentions have to be left alone for it (are scores
    computed by hand, did it come last); None: they may be. reason: what the report names then, as a pattern. fits: on
    which models it can be. takes_us: if it leaves before us, with what stands on it."""

    on: On
    left: Set[tuple[bool, bool]] | None = frozenset()
    reason: str = "nothing"
    fits: Callable[[Beside], bool] = lambda beside: True
    takes_us: bool = False


def changed(value: Any) -> Any:
    """Change all tensors by up to a tenth, each place along the second dimension by another share."""

    def change(part: Any) -> Any:
        if not torch.is_tensor(part) or part.dim() < 2 or not part.is_floating_point():
            return part
        share = torch.linspace(0.9, 1.1, part.shape[1], dtype=part.dtype)
        return part * share.view(-1, *[1] * (part.dim() - 2))

    return tree_map(change, value)


attentions = attrgetter("attentions")


def model(beside: Beside) -> list[nn.Module]:
    return [beside.model]


def first_attention(beside: Beside) -> list[nn.Module]:
    return beside.attentions[:1]


def around_attentions(beside: Beside) -> list[nn.Module]:
    return [beside.model, *beside.around]


def everywhere(beside: Beside) -> list[nn.Module]:
    return [*around_attentions(beside), *beside.attentions]


def each(places: Places, put_on: Callable[[nn.Module], TakeOff]) -> On:
    """Put a thing on every module of these places. put_on: returns the function that takes it off."""

    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        undo = [put_on(module) for module in places(beside)]
        yield
        for take_off in reversed(undo):
            take_off()

    return on


def switched(put_on: Callable[[nn.Module], Any], take_off: Callable[[nn.Module], Any]) -> On:
    """Put a thing on a whole model, and take it off, by two functions of the model."""

    def on(model: nn.Module) -> TakeOff:
        put_on(model)
        return functools.partial(take_off, model)

    return each(model, on)


def hook(module: nn.Module) -> TakeOff:
    return module.register_forward_hook(lambda module, args, out: changed(out)).remove


def hook_of(kind: type) -> Any:
    return type("Changing", (kind,), {"post_forward": lambda hook, module, output: changed(output)})()


def accelerates_hook(module: nn.Module) -> TakeOff:
    add_hook_to_module(module, hook_of(accelerate.hooks.ModelHook))
    return lambda: remove_hook_from_module(module)


def diffusers_hook(module: nn.Module) -> TakeOff:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(hook_of(ModelHook), "changing")

    def take_off() -> None:
        module._diffusers_hook.remove_hook("changing", recurse=False)
        del module._diffusers_hook

    return take_off


def changing(module: nn.Module, saved: Callable) -> Callable:
    def changing(*args: Any, **kwargs: Any) -> Any:
        return changed(saved(*args, **kwargs))

    return changing


def within(mode: Callable[[], AbstractContextManager]) -> Callable:
    """Switch a mode on while a module runs."""

    def wrap(module: nn.Module, saved: Callable) -> Callable:
        def within(*args: Any, **kwargs: Any) -> Any:
            with mode():
                return saved(*args, **kwargs)

        return within

    return wrap


def wrapper(places: Places, make: Callable[[nn.Module, Callable], Callable] = changing, rebinds: bool = False) -> On:
    """Save the method, call it and put it back, as accelerate does. rebinds: as a bound method, as a cache does."""

    def put_on(module: nn.Module) -> TakeOff:
        saved = module.forward
        module.forward = make(module, saved)
        restored = types.MethodType(getattr(saved, "__func__", saved), module) if rebinds else saved
        return lambda: setattr(module, "forward", restored)

    return each(places, put_on)


def own_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Another program's forward, which does not call the former one."""
    return changed(type(self).forward(self, *args, **kwargs))


def exchanged(places: Places) -> On:
    """Replace the whole forward, as another program does, and later remove it with all wraps on top of it."""

    def put_on(module: nn.Module) -> TakeOff:
        saved = vars(module).get("forward")
        module.forward = types.MethodType(own_forward, module)

        def take_off() -> None:
            vars(module).pop("forward", None)
            if saved is not None:
                module.forward = saved

        return take_off

    return each(places, put_on)


def another_class(module: nn.Module) -> TakeOff:
    """Give the module another class, as ToMe and HyperTile do."""
    kind = type(module)

    @functools.wraps(kind.forward)
    def of_the_class(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return changed(kind.forward(self, *args, **kwargs))

    module.__class__ = type(f"Another{kind.__name__}", (kind,), {"forward": of_the_class})
    return lambda: setattr(module, "__class__", kind)


class Delegating:
    """A processor that calls the former one and changes its output."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return changed(self.inner(attn, *args, **kwargs))


def delegating(attention: nn.Module) -> TakeOff:
    before = attention.processor
    attention.processor = Delegating(before)
    return lambda: setattr(attention, "processor", before)


def add_lora(model: nn.Module) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False))


def offload_no_more(model: nn.Module) -> None:
    remove_hook_from_module(model, recurse=True)
    registry = getattr(model, "_diffusers_hook", None)
    of_groups = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")
    for name in of_groups if registry is not None else ():
        registry.remove_hook(name, recurse=True)


# see `Thing.left`
BENEATH = {(True, False)}  # an attention that computes by hand merges only by its own code, but here other code runs
BY_HAND = BENEATH | {(True, True)}
OVER = {(False, True), (True, True)}  # these do not call what was there
ANYWHERE = BY_HAND | {(False, False), (False, True)}
THINGS = {
    "hooks": Thing(each(everywhere, hook)),
    "accelerate's hooks": Thing(each(everywhere, accelerates_hook)),
    "diffusers' hooks": Thing(each(everywhere, diffusers_hook), BENEATH, "new_forward", takes_us=True),
    "wrappers of attentions": Thing(wrapper(attentions), BENEATH, "changing"),
    "attentions, put back as bound methods": Thing(wrapper(attentions, rebinds=True), BENEATH, "changing"),
    "wrappers around attentions": Thing(wrapper(around_attentions)),
    "attentions' own forward": Thing(exchanged(attentions), BY_HAND | OVER, "own_forward"),
    "the model's own forward": Thing(exchanged(model), OVER, "own_forward"),
    "another class of attentions": Thing(each(attentions, another_class), BY_HAND, "of_the_class"),
    "PAG's guider": Thing(wrapper(first_attention, within(PAG)), ANYWHERE, "AttentionScoreSkipFunctionMode|within"),
    "a device for new tensors": Thing(wrapper(model, within(lambda: CPU))),
    "a processor around another": Thing(each(attentions, delegating), BY_HAND, "Delegating",
                                        lambda beside: hasattr(beside.attentions[0], "processor")),
    "FreeU": Thing(switched(methodcaller("enable_freeu", 0.9, 0.2, 1.2, 1.4), methodcaller("disable_freeu")),
                   fits=lambda beside: hasattr(beside.model, "enable_freeu")),
    "a LoRA": Thing(switched(add_lora, methodcaller("unload_lora")),
                    fits=lambda beside: hasattr(beside.model, "add_adapter") and beside.name != "gligen"),
    "weights that come for each layer": Thing(
        switched(lambda model: accelerate.cpu_offload(model, CPU, offload_buffers=True), offload_no_more)),
    # the cache lies over us, and may answer before our patch is reached
    "offloaded leaves": Thing(
        switched(lambda model: apply_group_offloading(model, CPU, offload_type="leaf_level"), offload_no_more),
        reason="its place: diffusers.hooks"),
}  # fmt: skip
