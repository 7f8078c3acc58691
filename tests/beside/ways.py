"""How people put something on a model, each as its makers do it, and take it off again. Nothing here knows of merging.

Most of what is put on changes what it sees a little, and each place by another share, so that it shows what it does.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import accelerate
import torch
import torch.nn.functional as F
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks.hooks import HookRegistry, ModelHook
from peft import LoraConfig
from torch import nn
from torch.utils._pytree import tree_map

from benchmarks import reference
from tests.beside.models import Beside

On = Callable[[Beside], AbstractContextManager]
Places = Callable[[Beside], list[nn.Module]]
CPU = torch.device("cpu")
PROJECTIONS = ("to_q", "to_k", "to_v")


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


def first_attention(beside: Beside) -> list[nn.Module]:
    return beside.attentions[:1]


def model(beside: Beside) -> list[nn.Module]:
    return [beside.model]


def layers(beside: Beside) -> list[nn.Module]:
    """The attentions' projections."""
    return [getattr(attention, name) for attention in beside.attentions for name in PROJECTIONS]


def model_and_attentions(beside: Beside) -> list[nn.Module]:
    return [beside.model, *beside.attentions]


def each(places: Places, put_on: Callable[[nn.Module], Callable[[], Any]]) -> On:
    """On every module of these places. put_on: puts it on, and gives what takes it off."""

    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        undo = [put_on(module) for module in places(beside)]
        yield
        for take_off in reversed(undo):
            take_off()

    return on


# --- hooks ------------------------------------------------------------------------------------------------------------


def hook(module: nn.Module) -> Callable[[], Any]:
    """torch's, on what a module gives."""
    return module.register_forward_hook(lambda module, args, out: changed(out)).remove


def pre_hook(module: nn.Module) -> Callable[[], Any]:
    """torch's, on what a module is given."""
    return module.register_forward_pre_hook(changed_input, with_kwargs=True).remove


class _OfAccelerate(accelerate.hooks.ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return changed(output)


class _OfDiffusers(ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return changed(output)


def accelerates_hook(module: nn.Module) -> Callable[[], Any]:
    add_hook_to_module(module, _OfAccelerate())
    return lambda: remove_hook_from_module(module)


def diffusers_hook(module: nn.Module) -> Callable[[], Any]:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(_OfDiffusers(), "changing")

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

    def put_on(module: nn.Module) -> Callable[[], Any]:
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

    def put_on(module: nn.Module) -> Callable[[], Any]:
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


def another_class(module: nn.Module) -> Callable[[], Any]:
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


# --- functions --------------------------------------------------------------------------------------------------------


def replaced(function: Callable) -> On:
    """torch's attention function is another one, as a package's README has it."""
    return lambda beside: mock.patch.object(F, "scaled_dot_product_attention", function)


def no_softmax(query, key, value, *args, **kwargs):
    """Linear attention."""
    return query @ (key.mT @ value) / key.shape[-2]


# --- processors -------------------------------------------------------------------------------------------------------


class Delegating:
    """A class around the processor that was there; it changes what that gives."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return changed(self.inner(attn, *args, **kwargs))


class InTiles(Delegating):
    """HyperTile's idea: attention within 2x2 tiles of a square grid."""

    def __call__(self, attn: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return reference.join(self.inner(attn, reference.in_tiles(hidden_states, 2), *args, **kwargs), 2)


def derived(before: Any) -> Any:
    """An object of a derived class with the same code."""
    made = copy.copy(before)
    made.__class__ = type("Derived", (type(before),), {})
    return made


def processor(make: Callable[[Any], Any]) -> On:
    """Another one. make: of what was there."""

    def put_on(attention: nn.Module) -> Callable[[], Any]:
        before = attention.processor
        attention.processor = make(before)
        return lambda: setattr(attention, "processor", before)

    return each(lambda beside: beside.attentions, put_on)


# --- what libraries bring ---------------------------------------------------------------------------------------------


def switched(put_on: Callable[[nn.Module], Any], take_off: Callable[[nn.Module], Any]) -> On:
    """A model's own."""

    def on(model: nn.Module) -> Callable[[], Any]:
        put_on(model)
        return functools.partial(take_off, model)

    return each(model, on)


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
            accelerate.dispatch_model(
                module, {name: "cpu" for name, _ in module.named_children()}, CPU, force_hooks=True
            )
        self.is_dispatched = True
        return args, kwargs


def as_sdnext_offloads(model: nn.Module) -> None:
    remove_hook_from_module(model, recurse=True)
    add_hook_to_module(model, _SDNexts(), append=True)
    model._hf_hook.execution_device = CPU


def add_lora(model: nn.Module) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.add_adapter(LoraConfig(r=2, target_modules=[*PROJECTIONS], init_lora_weights=False))


@contextmanager
def compiled_blocks(beside: Beside) -> Iterator[None]:
    torch._dynamo.reset()
    for block in beside.blocks:
        block.compile(backend="eager")
    yield
    for block in beside.blocks:
        block._compiled_call_impl = None
    torch._dynamo.reset()
