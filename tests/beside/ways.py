"""How people put something on a model, each as its makers do it, and take it off again. Nothing here knows of merging.

Most of what is put on changes what it sees a little, and each place by another share, so that it shows what it does.
"""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
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
TORCHS = F.scaled_dot_product_attention


def changed(value: Any) -> Any:
    """By up to a fifth, each place along the second dimension by another share."""

    def change(one: Any) -> Any:
        if not torch.is_tensor(one) or one.dim() < 2 or not one.is_floating_point():
            return one
        share = torch.linspace(0.9, 1.1, one.shape[1], dtype=one.dtype)
        return one * share.view(-1, *[1] * (one.dim() - 2))

    return tree_map(change, value)


def _changed_input(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Of the tokens, or the latent."""
    if args:
        return (changed(args[0]), *args[1:]), kwargs
    name = next(one for one in ("hidden_states", "x", "sample") if one in kwargs)
    return args, {**kwargs, name: changed(kwargs[name])}


# --- places -----------------------------------------------------------------------------------------------------------

Places = Callable[[Beside], list[nn.Module]]


attentions, blocks, around = attrgetter("attentions"), attrgetter("blocks"), attrgetter("around")


def first_attention(beside: Beside) -> list[nn.Module]:
    return beside.attentions[:1]


def model(beside: Beside) -> list[nn.Module]:
    return [beside.model]


def layers(name: str) -> Places:
    return lambda beside: [getattr(one, name) for one in beside.attentions]


# --- hooks ------------------------------------------------------------------------------------------------------------


def _hooked(places: Places, register: str, hook: Callable, **more: Any) -> On:
    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        handles = [getattr(one, register)(hook, **more) for one in places(beside)]
        yield
        for handle in handles:
            handle.remove()

    return on


def hooks(places: Places) -> On:
    """torch's, on what a module gives."""
    return _hooked(places, "register_forward_hook", lambda module, args, out: changed(out))


def pre_hooks(places: Places) -> On:
    """torch's, on what a module is given."""
    return _hooked(places, "register_forward_pre_hook", lambda module, *given: _changed_input(*given), with_kwargs=True)


@contextmanager
def feature_store(beside: Beside) -> Iterator[None]:
    """Keeps what each layer gives, which has to come once a call and with all tokens; it complains where not."""
    names = ("to_q", "to_k", "to_v")
    open_calls: list[list] = []

    def begin(module: nn.Module, *_: Any) -> None:
        open_calls.append([])

    def keep(module: nn.Module, args: tuple, out: torch.Tensor) -> None:
        open_calls[-1].append((id(module), out.shape[1]))

    def end(module: nn.Module, *_: Any) -> None:
        kept = open_calls.pop()
        if len({one for one, _ in kept}) != len(kept) or len({tokens for _, tokens in kept}) > 1 or len(kept) != 3:
            raise RuntimeError(f"layers gave {kept}")

    handles = []
    for one in beside.attentions:
        handles += [one.register_forward_pre_hook(begin), one.register_forward_hook(end)]
        handles += [getattr(one, name).register_forward_hook(keep) for name in names]
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
    for one in (beside.model, *beside.attentions):
        add_hook_to_module(one, _AcceleratesChanging())
    yield
    for one in (beside.model, *beside.attentions):
        remove_hook_from_module(one)


@contextmanager
def diffusers_hooks(beside: Beside) -> Iterator[None]:
    for one in (beside.model, *beside.attentions):
        HookRegistry.check_if_exists_or_initialize(one).register_hook(_DiffusersChanging(), "changing")
    yield
    for one in (beside.model, *beside.attentions):
        one._diffusers_hook.remove_hook("changing", recurse=False)
        del one._diffusers_hook


# --- in the place of forward ------------------------------------------------------------------------------------------


def changing(module: nn.Module, saved: Callable) -> Callable:
    def changing(*args: Any, **kwargs: Any) -> Any:
        return changed(saved(*args, **kwargs))

    return changing


def twice(module: nn.Module, saved: Callable) -> Callable:
    """As a guidance that asks an attention again for other tokens."""

    def twice(*args: Any, **kwargs: Any) -> Any:
        again, more = _changed_input(args, kwargs)
        first, second = saved(*args, **kwargs), saved(*again, **more)
        if torch.is_tensor(first):
            return first * 0.75 + second * 0.25
        return tuple(a * 0.75 + b * 0.25 for a, b in zip(first, second, strict=True))

    return twice


def in_pieces(module: nn.Module, saved: Callable) -> Callable:
    """One picture of the batch after the other, as where memory is short."""

    def in_pieces(*args: Any, **kwargs: Any) -> Any:
        batch = next(one for one in (*args, *kwargs.values()) if torch.is_tensor(one)).shape[0]

        def cut(number: int, value: Any) -> Any:
            is_cut = torch.is_tensor(value) and value.dim() > 1 and value.shape[0] == batch
            return value[number : number + 1] if is_cut else value

        outs = []
        for number in range(batch):
            own, more = tree_map(functools.partial(cut, number), (args, kwargs))
            outs.append(saved(*own, **more))
        return tree_map(lambda *ones: torch.cat(ones) if torch.is_tensor(ones[0]) else ones[0], *outs)

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


def wrapper(places: Places, make: Callable[[nn.Module, Callable], Callable] = changing, rebinds: bool = False) -> On:
    """Saves what is there, calls it, and puts it back on the instance, as accelerate and ControlNet do. rebinds: as a
    bound method of the module, as a cache library does.
    """

    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        saved = [(one, one.forward) for one in places(beside)]
        for one, forward in saved:
            one.forward = make(one, forward)
        yield
        for one, forward in reversed(saved):
            one.forward = types.MethodType(getattr(forward, "__func__", forward), one) if rebinds else forward

    return on


def own_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Somebody's own, which asks nobody what was there."""
    return changed(type(self).forward(self, *args, **kwargs))


def exchanged(places: Places, bind: Callable = types.MethodType) -> On:
    """A whole forward of somebody's own, taken off with what stood on top of it."""

    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        saved = [(one, vars(one).get("forward")) for one in places(beside)]
        for one, _ in saved:
            one.forward = bind(own_forward, one)
        yield
        for one, forward in saved:
            if forward is None:
                vars(one).pop("forward", None)
            else:
                one.forward = forward

    return on


@contextmanager
def another_class(beside: Beside) -> Iterator[None]:
    """As ToMe and HyperTile do it."""

    def another(kind: type) -> type:
        def of_another_class(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return changed(kind.forward(self, *args, **kwargs))

        return type(f"Another{kind.__name__}", (kind,), {"forward": of_another_class})

    for one in beside.attentions:
        one.__class__ = another(type(one))
    yield
    for one in beside.attentions:
        one.__class__ = type(one).__mro__[1]


@contextmanager
def method_of_the_class(beside: Beside) -> Iterator[None]:
    """As hosts that exchange it for everybody."""
    kinds = {type(one): type(one).forward for one in beside.attentions}
    for kind, forward in kinds.items():
        @functools.wraps(forward)
        def of_the_class(self: nn.Module, *args: Any, forward: Callable = forward, **kwargs: Any) -> Any:
            return changed(forward(self, *args, **kwargs))

        kind.forward = of_the_class
    try:
        yield
    finally:
        for kind, forward in kinds.items():
            kind.forward = forward


# --- functions, and modes that look at them ---------------------------------------------------------------------------


def replaced(function: Callable) -> On:
    """torch's attention function is another one, as a package's README has it."""

    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        with mock.patch.object(F, "scaled_dot_product_attention", function):
            yield

    return on


def swallowing_masks(query, key, value, attn_mask=None, *args, **kwargs):
    return TORCHS(query, key, value, None, *args, **kwargs)


def refusing_masks(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **kwargs):
    if attn_mask is not None:
        raise NotImplementedError("masks")
    return TORCHS(query, key, value, None, dropout_p, is_causal, scale=scale, **kwargs)


def no_softmax(query, key, value, *args, **kwargs):
    """Linear attention."""
    return query @ (key.mT @ value) / key.shape[-2]


class Looking(TorchFunctionMode):
    """Looks at every function and changes none."""

    def __torch_function__(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_mode(make: Callable[[], Any], places: Places) -> On:
    """While a module runs."""

    def within(module: nn.Module, saved: Callable) -> Callable:
        def within(*args: Any, **kwargs: Any) -> Any:
            with make():
                return saved(*args, **kwargs)

        return within

    return wrapper(places, within)


# --- processors and layers --------------------------------------------------------------------------------------------


class Delegating:
    """Somebody's own class around the processor that was there. more: what it does besides."""

    def __init__(self, inner: Any, more: Callable[[Any], Any] = lambda out: out) -> None:
        self.inner, self.more = inner, more

    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.more(self.inner(attn, *args, **kwargs))


class ByProducts:
    """Plain attention by products, as adapters bring it for diffusers' UNets."""

    def __init__(self, before: Any) -> None:
        pass

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None, **kwargs):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (attn.head_to_batch_dim(one) for one in (
            attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)))  # fmt: skip
        out = torch.bmm(attn.get_attention_scores(q, k, attention_mask), v)
        return attn.to_out[1](attn.to_out[0](attn.batch_to_head_dim(out)))


class OfValues:
    """Attends to nothing."""

    def __init__(self, before: Any) -> None:
        pass

    def __call__(self, attn, hidden_states, *args, **kwargs):
        return attn.to_out[0](attn.to_v(hidden_states).cumsum(1) / hidden_states.shape[1])


def exchanged_in(names: tuple[str, ...], make: Callable[[Any], Any]) -> On:
    """What an attention holds. make: of what was there."""

    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        found = [(one, name, getattr(one, name)) for one in beside.attentions for name in names]
        for one, name, before in found:
            setattr(one, name, make(before))
        yield
        for one, name, before in found:
            setattr(one, name, before)

    return on


def processors(make: Callable[[Any], Any]) -> On:
    return exchanged_in(("processor",), make)


def derived(before: Any) -> Any:
    """A class of somebody's own with the same code."""
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


@contextmanager
def fused(beside: Beside) -> Iterator[None]:
    beside.model.fuse_qkv_projections()
    yield
    beside.model.unfuse_qkv_projections()


# --- what libraries bring ---------------------------------------------------------------------------------------------


def offloaded(way: Callable[[nn.Module], None]) -> On:
    """Weights live elsewhere between calls."""

    @contextmanager
    def on(beside: Beside) -> Iterator[None]:
        way(beside.model)
        yield
        take_off(beside.model)

    return on


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
def lora(beside: Beside) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        beside.model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False))
    yield
    beside.model.unload_lora()


@contextmanager
def other_weights(beside: Beside) -> Iterator[None]:
    """As of a LoRA that is fused."""
    weights = [next(one.to_q.parameters()) for one in beside.attentions]
    before = [one.detach().clone() for one in weights]
    for one in weights:
        one.data.mul_(1.25)
    yield
    for one, saved in zip(weights, before, strict=True):
        one.data.copy_(saved)


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


@contextmanager
def deep_copy(beside: Beside) -> Iterator[nn.Module]:
    yield copy.deepcopy(beside.whole)


@contextmanager
def pickled(beside: Beside) -> Iterator[nn.Module]:
    yield pickle.loads(pickle.dumps(beside.whole))


@contextmanager
def compiled_blocks(beside: Beside) -> Iterator[None]:
    torch._dynamo.reset()
    for one in blocks(beside):
        one.compile(backend="eager")
    yield
    for one in blocks(beside):
        one._compiled_call_impl = None
    torch._dynamo.reset()


@contextmanager
def compiled_in_pieces(beside: Beside) -> Iterator[None]:
    """A compiler stops within attentions then, at what it reads otherwise."""
    with in_mode(lambda: torch.device("cpu"), model)(beside), compiled_blocks(beside):
        yield
