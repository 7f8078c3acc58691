"""What people put on a model beside merging, each as its makers do it, and how it comes off again: a table, at the end.

Most of it changes what it sees a little, and each place by another share, so that it shows what it does.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple
from unittest import mock

import accelerate
import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode as PAG
from diffusers.models.attention_processor import AttnProcessor
from peft import LoraConfig
from torch import nn
from torch.overrides import BaseTorchFunctionMode as Looking
from torch.utils._pytree import tree_map

from tests.beside.models import Beside

On = Callable[[Beside], AbstractContextManager]
Places = Callable[[Beside], list[nn.Module]]
TakeOff = Callable[[], Any]
CPU = torch.device("cpu")
PROJECTIONS = ("to_q", "to_k", "to_v")


class Thing(NamedTuple):
    """on: a context manager, inside which it is on. left: when attentions have to be left alone for it (are scores
    computed by hand, did it come last). reason: what the report names then, as a pattern. fits: on which models it can
    be. takes_us: if it leaves before us, with what stands on it.
    """

    on: On
    left: Set[tuple[bool, bool]] = frozenset()
    reason: str = "nothing"
    fits: Callable[[Beside], bool] = lambda beside: True
    takes_us: bool = False


def changed(value: Any) -> Any:
    """By up to a tenth, each place along the second dimension by another share."""

    def change(part: Any) -> Any:
        if not torch.is_tensor(part) or part.dim() < 2 or not part.is_floating_point():
            return part
        share = torch.linspace(0.9, 1.1, part.shape[1], dtype=part.dtype)
        return part * share.view(-1, *[1] * (part.dim() - 2))

    return tree_map(change, value)


def changed_input(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Of the tokens, or the latent."""
    if args:
        return (changed(args[0]), *args[1:]), kwargs
    name = next(name for name in ("hidden_states", "x", "sample") if name in kwargs)
    return args, {**kwargs, name: changed(kwargs[name])}


attentions, around = attrgetter("attentions"), attrgetter("around")


def model(beside: Beside) -> list[nn.Module]:
    return [beside.model]


def first_attention(beside: Beside) -> list[nn.Module]:
    return beside.attentions[:1]


def model_and_attentions(beside: Beside) -> list[nn.Module]:
    return [beside.model, *beside.attentions]


def layers(beside: Beside) -> list[nn.Module]:
    return [getattr(attention, name) for attention in beside.attentions for name in PROJECTIONS]


def each(places: Places, put_on: Callable[[nn.Module], TakeOff]) -> On:
    """On every module of these places. put_on: gives what takes it off."""

    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        undo = [put_on(module) for module in places(beside)]
        yield
        for take_off in reversed(undo):
            take_off()

    return on


def switched(put_on: Callable[[nn.Module], Any], take_off: Callable[[nn.Module], Any]) -> On:
    """By a model's own methods."""

    def on(model: nn.Module) -> TakeOff:
        put_on(model)
        return functools.partial(take_off, model)

    return each(model, on)


# --- hooks ------------------------------------------------------------------------------------------------------------


def hook(module: nn.Module) -> TakeOff:
    return module.register_forward_hook(lambda module, args, out: changed(out)).remove


def pre_hook(module: nn.Module) -> TakeOff:
    return module.register_forward_pre_hook(changed_input, with_kwargs=True).remove


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


# --- in the place of forward ------------------------------------------------------------------------------------------


def changing(module: nn.Module, saved: Callable) -> Callable:
    def changing(*args: Any, **kwargs: Any) -> Any:
        return changed(saved(*args, **kwargs))

    return changing


def twice(module: nn.Module, saved: Callable) -> Callable:
    """As a guidance that asks an attention again for other tokens."""

    def twice(*args: Any, **kwargs: Any) -> Any:
        again, more = changed_input(module, args, kwargs)
        return tree_map(lambda a, b: a * 0.75 + b * 0.25, saved(*args, **kwargs), saved(*again, **more))

    return twice


def within(mode: Callable[[], Any]) -> Callable:
    """While a module runs, a mode is in force."""

    def wrap(module: nn.Module, saved: Callable) -> Callable:
        def within(*args: Any, **kwargs: Any) -> Any:
            with mode():
                return saved(*args, **kwargs)

        return within

    return wrap


def wrapper(places: Places, make: Callable[[nn.Module, Callable], Callable] = changing, rebinds: bool = False) -> On:
    """Saves what is there, calls it, and puts it back on the instance, as accelerate and ControlNet do. rebinds: as a
    bound method of the module, as a cache library does.
    """

    def put_on(module: nn.Module) -> TakeOff:
        saved = module.forward
        module.forward = make(module, saved)
        found = types.MethodType(getattr(saved, "__func__", saved), module) if rebinds else saved
        return lambda: setattr(module, "forward", found)

    return each(places, put_on)


def own_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Another program's, which asks nobody what was there."""
    return changed(type(self).forward(self, *args, **kwargs))


def exchanged(places: Places, bind: Callable = types.MethodType) -> On:
    """A whole forward of another program, taken off with what stood on top of it."""

    def put_on(module: nn.Module) -> TakeOff:
        saved = vars(module).get("forward")
        module.forward = bind(own_forward, module)

        def take_off() -> None:
            vars(module).pop("forward", None)
            if saved is not None:
                module.forward = saved

        return take_off

    return each(places, put_on)


def instead_of(forward: Callable) -> Callable:
    """Another method of a class."""

    @functools.wraps(forward)
    def of_the_class(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return changed(forward(self, *args, **kwargs))

    return of_the_class


def another_class(module: nn.Module) -> TakeOff:
    """As ToMe and HyperTile do it."""
    kind = type(module)
    module.__class__ = type(f"Another{kind.__name__}", (kind,), {"forward": instead_of(kind.forward)})
    return lambda: setattr(module, "__class__", kind)


@contextmanager
def method_of_the_class(beside: Beside) -> Iterator[None]:
    """As hosts that exchange it for all models."""
    with ExitStack() as patches:
        for kind in {type(attention) for attention in beside.attentions}:
            patches.enter_context(mock.patch.object(kind, "forward", instead_of(kind.forward)))
        yield


# --- processors -------------------------------------------------------------------------------------------------------


class Delegating:
    """A class around the processor that was there; it changes what that gives."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return changed(self.inner(attn, *args, **kwargs))


def derived(before: Any) -> Any:
    """An object of a derived class with the same code."""
    made = copy.copy(before)
    made.__class__ = type("Derived", (type(before),), {})
    return made


def processor(make: Callable[[Any], Any]) -> On:
    """Another one. make: of what was there."""

    def put_on(attention: nn.Module) -> TakeOff:
        before = attention.processor
        attention.processor = make(before)
        return lambda: setattr(attention, "processor", before)

    return each(attentions, put_on)


def has_processors(beside: Beside) -> bool:
    return hasattr(beside.attentions[0], "processor")


def has_processors_of_unets(beside: Beside) -> bool:
    return type(getattr(beside.attentions[0], "processor", None)).__name__ == "AttnProcessor2_0"


# --- what libraries bring ---------------------------------------------------------------------------------------------


def add_lora(model: nn.Module) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.add_adapter(LoraConfig(r=2, target_modules=[*PROJECTIONS], init_lora_weights=False))


def offloaded(put_on: Callable[[nn.Module], Any]) -> On:
    """Weights live elsewhere between calls."""
    return switched(put_on, _offload_no_more)


def _offload_no_more(model: nn.Module) -> None:
    remove_hook_from_module(model, recurse=True)
    registry = getattr(model, "_diffusers_hook", None)
    of_groups = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")
    for name in of_groups if registry is not None else ():
        registry.remove_hook(name, recurse=True)


class _SDNexts(accelerate.hooks.ModelHook):
    """Its "balanced" offloading: at the first call the model's parts are dispatched anew."""

    is_dispatched = False

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        if not self.is_dispatched:
            parts = {name: "cpu" for name, _ in module.named_children()}
            accelerate.dispatch_model(module, parts, CPU, force_hooks=True)
        self.is_dispatched = True
        return args, kwargs


def as_sdnext_offloads(model: nn.Module) -> None:
    add_hook_to_module(model, _SDNexts(), append=True)
    model._hf_hook.execution_device = CPU


# --- the table --------------------------------------------------------------------------------------------------------

# see `Thing.left`
BENEATH = {(True, False)}  # what computes by hand merges by its own code alone, and something else runs beneath us
BY_HAND = BENEATH | {(True, True)}
OVER = {(False, True), (True, True)}  # it asks nobody what was there
ANYWHERE = BY_HAND | {(False, False), (False, True)}
looking, guiding, on_a_device = map(within, (Looking, PAG, lambda: torch.device("cpu")))
by_leaves = functools.partial(apply_group_offloading, onload_device=CPU, offload_type="leaf_level")
THINGS = {
    "hooks on attentions": Thing(each(attentions, hook)),
    "hooks on layers": Thing(each(layers, hook)),
    "hooks on blocks": Thing(each(around, hook)),
    "a hook on the model": Thing(each(model, hook)),
    "pre-hooks": Thing(each(model_and_attentions, pre_hook)),
    "accelerate's hooks": Thing(each(model_and_attentions, accelerates_hook)),
    "diffusers' hooks": Thing(each(model_and_attentions, diffusers_hook), BENEATH, "new_forward", takes_us=True),
    "wrappers of attentions": Thing(wrapper(attentions), BENEATH, "changing"),
    "wrappers of blocks": Thing(wrapper(around)),
    "a wrapper of the model": Thing(wrapper(model)),
    "attentions, put back as bound methods": Thing(wrapper(attentions, rebinds=True), BENEATH, "changing"),
    "blocks, put back as bound methods": Thing(wrapper(around, rebinds=True)),
    "a model, put back as a bound method": Thing(wrapper(model, rebinds=True)),
    "attentions' own forward": Thing(exchanged(attentions), BY_HAND | OVER, "own_forward"),
    "one attention's own forward, partial": Thing(
        exchanged(first_attention, functools.partial), BY_HAND | OVER, "own_forward"),
    "blocks' own forward": Thing(exchanged(around)),
    "the model's own forward": Thing(exchanged(model), OVER, "own_forward"),
    "another class of attentions": Thing(each(attentions, another_class), BY_HAND, "of_the_class"),
    "another method of the class": Thing(method_of_the_class, BY_HAND, "of_the_class"),
    "attentions called twice": Thing(wrapper(attentions, twice), BENEATH, "twice"),
    "a mode around attentions": Thing(wrapper(attentions, looking), BY_HAND | OVER, "BaseTorchFunctionMode|within"),
    "PAG's guider": Thing(wrapper(first_attention, guiding), ANYWHERE, "AttentionScoreSkipFunctionMode|within"),
    "a mode around the model": Thing(wrapper(model, looking), ANYWHERE, "BaseTorchFunctionMode"),
    "a device for new tensors": Thing(wrapper(model, on_a_device)),
    "a derived processor": Thing(processor(derived), fits=has_processors),
    "a processor around another": Thing(processor(Delegating), BY_HAND, "Delegating", has_processors),
    "a processor by products": Thing(
        processor(lambda before: Delegating(AttnProcessor())), ANYWHERE, "Delegating", has_processors_of_unets),
    "scores by hand": Thing(processor(lambda before: AttnProcessor()), fits=has_processors_of_unets),
    # SD3.5's second attentions raise then, unmerged as well
    "fused projections": Thing(
        switched(methodcaller("fuse_qkv_projections"), methodcaller("unfuse_qkv_projections")),
        fits=lambda beside: hasattr(beside.model, "fuse_qkv_projections") and beside.name != "SD3.5"),
    "a LoRA": Thing(switched(add_lora, methodcaller("unload_lora")),
                    fits=lambda beside: hasattr(beside.model, "add_adapter") and beside.name != "gligen"),
    "weights that come for each layer": Thing(
        offloaded(lambda model: accelerate.cpu_offload(model, CPU, offload_buffers=True))),
    # over us, if a cache has answered before we were reached
    "offloaded leaves": Thing(offloaded(by_leaves), reason="its place: diffusers.hooks"),
    # which dispatches no weights of the model's own
    "SD.Next's offloading": Thing(offloaded(as_sdnext_offloads), fits=lambda beside: not beside.model._parameters),
}  # fmt: skip
