"""How people put something on a model, each as its makers do it, and take it off again. Nothing here knows of merging.

Most of what is put on changes what it sees a little, and each place by another share, so that it shows what it does.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from accelerate import dispatch_model
from accelerate.hooks import ModelHook as AcceleratesHook
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks.hooks import HookRegistry, ModelHook
from peft import LoraConfig
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from benchmarks.networks import first_block_cache
from tests.beside.models import Beside
from tests.beside.savers import PutOn
from tests.image_prompts import image_adapter
from tests.offloading import CPU, take_off

On = Callable[[Beside], AbstractContextManager]
Places = Callable[[Beside], list[nn.Module]]
TORCHS = F.scaled_dot_product_attention
PROJECTIONS = ("to_q", "to_k", "to_v")


def changed(value: Any) -> Any:
    """By up to a fifth, each place along the second dimension by another share."""

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


def projections(beside: Beside) -> list[nn.Module]:
    return [getattr(attention, name) for attention in beside.attentions for name in PROJECTIONS]


# --- hooks ------------------------------------------------------------------------------------------------------------


def hooks(*places: Places) -> On:
    """torch's, on what a module gives."""
    return _hooked(places, "register_forward_hook", lambda module, args, out: changed(out))


def pre_hooks(*places: Places) -> On:
    """torch's, on what a module is given."""
    return _hooked(places, "register_forward_pre_hook", changed_input, with_kwargs=True)


def _hooked(places: tuple[Places, ...], register: str, hook: Callable, **more: Any) -> On:
    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        handles = [getattr(module, register)(hook, **more) for place in places for module in place(beside)]
        yield
        for handle in handles:
            handle.remove()

    return on


@contextmanager
def feature_store(beside: Beside) -> Iterator[None]:
    """Keeps what each layer gives, which has to come once a call and with all tokens; it complains if not."""
    open_calls: list[list] = []

    def begin(module: nn.Module, *_: Any) -> None:
        open_calls.append([])

    def keep(module: nn.Module, args: tuple, out: torch.Tensor) -> None:
        open_calls[-1].append((id(module), out.shape[1]))

    def end(module: nn.Module, *_: Any) -> None:
        layers, tokens = zip(*(kept := open_calls.pop()), strict=True)
        if len(set(layers)) != 3 or len(kept) != 3 or len(set(tokens)) > 1:
            raise RuntimeError(f"layers gave {kept}")

    handles = [layer.register_forward_hook(keep) for layer in projections(beside)]
    for attention in beside.attentions:
        handles += [attention.register_forward_pre_hook(begin), attention.register_forward_hook(end)]
    yield
    for handle in handles:
        handle.remove()


class _AcceleratesChanging(AcceleratesHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return changed(output)


class _DiffusersChanging(ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return changed(output)


@contextmanager
def accelerates_hooks(beside: Beside) -> Iterator[None]:
    for module in (beside.model, *beside.attentions):
        add_hook_to_module(module, _AcceleratesChanging())
    yield
    for module in (beside.model, *beside.attentions):
        remove_hook_from_module(module)


@contextmanager
def diffusers_hooks(beside: Beside) -> Iterator[None]:
    for module in (beside.model, *beside.attentions):
        HookRegistry.check_if_exists_or_initialize(module).register_hook(_DiffusersChanging(), "changing")
    yield
    for module in (beside.model, *beside.attentions):
        module._diffusers_hook.remove_hook("changing", recurse=False)
        del module._diffusers_hook


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


def in_pieces(module: nn.Module, saved: Callable) -> Callable:
    """One picture of the batch after the other, as if memory is short."""

    def in_pieces(*args: Any, **kwargs: Any) -> Any:
        batch = next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value)).shape[0]

        def cut(number: int, value: Any) -> Any:
            is_cut = torch.is_tensor(value) and value.dim() > 1 and value.shape[0] == batch
            return value[number : number + 1] if is_cut else value

        outs = []
        for number in range(batch):
            own, more = tree_map(functools.partial(cut, number), (args, kwargs))
            outs.append(saved(*own, **more))
        return tree_map(lambda *parts: torch.cat(parts) if torch.is_tensor(parts[0]) else parts[0], *outs)

    return in_pieces


def every_second(module: nn.Module, saved: Callable) -> Callable:
    """A cache: the second call is answered with what the first one gave."""
    kept: list[Any] = []

    def every_second(*args: Any, **kwargs: Any) -> Any:
        if kept:
            return kept.pop()
        kept.append(saved(*args, **kwargs))
        return kept[0]

    return every_second


def within(make: Callable[[], Any]) -> Callable:
    """While a module runs, a mode is in force."""

    def wrap(module: nn.Module, saved: Callable) -> Callable:
        def within(*args: Any, **kwargs: Any) -> Any:
            with make():
                return saved(*args, **kwargs)

        return within

    return wrap


def wrapper(places: Places, make: Callable[[nn.Module, Callable], Callable] = changing, rebinds: bool = False) -> On:
    """Saves what is there, calls it, and puts it back on the instance, as accelerate and ControlNet do. rebinds: as a
    bound method of the module, as a cache library does.
    """

    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        saved = [(module, module.forward) for module in places(beside)]
        for module, forward in saved:
            module.forward = make(module, forward)
        yield
        for module, forward in reversed(saved):
            module.forward = types.MethodType(getattr(forward, "__func__", forward), module) if rebinds else forward

    return on


def own_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Another program's, which asks nobody what was there."""
    return changed(type(self).forward(self, *args, **kwargs))


def exchanged(places: Places, bind: Callable = types.MethodType) -> On:
    """A whole forward of another program, taken off with what stood on top of it."""

    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        saved = [(module, vars(module).get("forward")) for module in places(beside)]
        for module, _ in saved:
            module.forward = bind(own_forward, module)
        yield
        for module, forward in saved:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward

    return on


@contextmanager
def another_class(beside: Beside) -> Iterator[None]:
    """As ToMe and HyperTile do it."""

    def another(kind: type) -> type:
        def of_another_class(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return changed(kind.forward(self, *args, **kwargs))

        return type(f"Another{kind.__name__}", (kind,), {"forward": of_another_class})

    for attention in beside.attentions:
        attention.__class__ = another(type(attention))
    yield
    for attention in beside.attentions:
        attention.__class__ = type(attention).__mro__[1]


@contextmanager
def method_of_the_class(beside: Beside) -> Iterator[None]:
    """As hosts that exchange it for all models."""

    def instead_of(forward: Callable) -> Callable:
        @functools.wraps(forward)
        def of_the_class(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return changed(forward(self, *args, **kwargs))

        return of_the_class

    with ExitStack() as patches:
        for kind in {type(attention) for attention in beside.attentions}:
            patches.enter_context(mock.patch.object(kind, "forward", instead_of(kind.forward)))
        yield


# --- functions --------------------------------------------------------------------------------------------------------


def replaced(function: Callable) -> On:
    """torch's attention function is another one, as a package's README has it."""

    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        with mock.patch.object(F, "scaled_dot_product_attention", function):
            yield

    return on


def swallowing_masks(query, key, value, attn_mask=None, *args, **kwargs):
    return TORCHS(query, key, value, None, *args, **kwargs)


def refusing_masks(query, key, value, attn_mask=None, *args, **kwargs):
    if attn_mask is not None:
        raise NotImplementedError("masks")
    return TORCHS(query, key, value, None, *args, **kwargs)


def no_softmax(query, key, value, *args, **kwargs):
    """Linear attention."""
    return query @ (key.mT @ value) / key.shape[-2]


class Looking(TorchFunctionMode):
    """Looks at every function and changes none."""

    def __torch_function__(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


# --- processors, layers, weights --------------------------------------------------------------------------------------


class Delegating:
    """A class around the processor that was there; it changes what that gives."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return changed(self.inner(attn, *args, **kwargs))


class ByProducts:
    """Plain attention by products, as adapters bring it for diffusers' UNets."""

    def __init__(self, before: Any) -> None:
        pass

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None, **kwargs):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        made = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
        q, k, v = map(attn.head_to_batch_dim, made)
        out = torch.bmm(attn.get_attention_scores(q, k, attention_mask), v)
        return attn.to_out[1](attn.to_out[0](attn.batch_to_head_dim(out)))


def derived(before: Any) -> Any:
    """An object of a derived class with the same code."""
    made = copy.copy(before)
    made.__class__ = type("Derived", (type(before),), {})
    return made


class Adapted(nn.Module):
    """A layer in the place of another, as LoRAs have it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 1.1


def exchanged_in(names: tuple[str, ...], make: Callable[[Any], Any]) -> On:
    """What an attention holds. make: of what was there."""

    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        saved = [(attention, name, getattr(attention, name)) for attention in beside.attentions for name in names]
        for attention, name, before in saved:
            setattr(attention, name, make(before))
        yield
        for attention, name, before in saved:
            setattr(attention, name, before)

    return on


@contextmanager
def other_weights(beside: Beside) -> Iterator[None]:
    """As of a LoRA that is fused."""
    weights = [next(attention.to_q.parameters()) for attention in beside.attentions]
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.data.mul_(1.25)
    yield
    for weight, saved in zip(weights, before, strict=True):
        weight.data.copy_(saved)


# --- what libraries bring ---------------------------------------------------------------------------------------------


def switched(put_on: Callable[[nn.Module], None], take_off: Callable[[nn.Module], None]) -> On:
    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        put_on(beside.model)
        yield
        take_off(beside.model)

    return on


def offloaded(way: Callable[[nn.Module], None]) -> On:
    """Weights live elsewhere between calls."""
    return switched(way, take_off)


class _SDNexts(AcceleratesHook):
    """Its "balanced" offloading: at the first call the model's parts are dispatched anew."""

    is_dispatched = False

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        if not self.is_dispatched:
            dispatch_model(module, {name: "cpu" for name, _ in module.named_children()}, CPU, force_hooks=True)
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


def of_pipelines(put_on: PutOn) -> On:
    """What takes a pipeline, of which only the model is here."""

    def on(beside: Beside) -> AbstractContextManager:
        model = beside.model
        return put_on(SimpleNamespace(
            unet=model, enable_freeu=model.enable_freeu, disable_freeu=model.disable_freeu))  # fmt: skip

    return on


@contextmanager
def first_block(beside: Beside) -> Iterator[None]:
    """At a threshold at which it skips nothing."""
    with first_block_cache(beside.model, 0.0), beside.model.cache_context("one"):
        yield


@contextmanager
def image_prompt(beside: Beside) -> Iterator[None]:
    """IP-Adapter: the prompt's attentions read an image as well."""
    model = beside.model
    processors, kind = model.attn_processors, model.config.encoder_hid_dim_type
    model._load_ip_adapter_weights([image_adapter(model, torch.Generator())])

    def prompted(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        image = {"image_embeds": [args[2][:, :1, :16]]}
        return args, {**kwargs, "added_cond_kwargs": {**(kwargs.get("added_cond_kwargs") or {}), **image}}

    hook = model.register_forward_pre_hook(prompted, with_kwargs=True)
    yield
    hook.remove()
    model.set_attn_processor(processors)
    model.encoder_hid_proj = None
    model.config.encoder_hid_dim_type = kind


# --- copies and compilers ---------------------------------------------------------------------------------------------


def copied(copy: Callable[[nn.Module], nn.Module]) -> On:
    @contextmanager
    def on(beside: Beside) -> Iterator[nn.Module]:
        yield copy(beside.whole)

    return on


@contextmanager
def compiled_blocks(beside: Beside) -> Iterator[None]:
    torch._dynamo.reset()
    for block in beside.blocks:
        block.compile(backend="eager")
    yield
    for block in beside.blocks:
        block._compiled_call_impl = None
    torch._dynamo.reset()


@contextmanager
def compiled_in_pieces(beside: Beside) -> Iterator[None]:
    """A compiler stops within attentions then, at what it reads otherwise."""
    with wrapper(model, within(lambda: torch.device("cpu")))(beside), compiled_blocks(beside):
        yield
