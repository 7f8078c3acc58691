"""What a call of a UNet launches on a graphics card, traced without one: on torch's meta device, without memory.

Tensors of the meta device say that they are on CUDA, so that the engine and tomesd take the ways of a card. The
engine's kernels do nothing and count as done. Attention counts as one operator, as torch's fused functions are.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks import models
from tome_core.engine.merged_tokens import LazyTokens
from tome_core.merging import kernels

ATTENTION, TO_HOST = "attention", "copy to the host"
_META = torch.device("meta")
_WITHOUT_WORK = ("empty", "view", "detach", "lift_fresh")  # parts of names; views are known by their schema
# what a tensor of the meta device says of itself
_SAID = {Tensor.device.__get__: torch.device("cuda"), Tensor.is_cuda.__get__: True, Tensor.is_meta.__get__: False}


class Operand(NamedTuple):
    """A tensor of a launch: its shape, its strides in elements, the bytes of an element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    width: int

    @property
    def elements(self) -> int:
        """The number of different elements: a dimension of stride 0 repeats them."""
        return torch.Size(size for size, stride in zip(self.shape, self.strides, strict=True) if stride).numel()

    @property
    def bytes(self) -> int:
        """The bytes of all different elements."""
        return self.elements * self.width


class Launch(NamedTuple):
    """One operator of torch's, which may launch several kernels, or one kernel of the engine's."""

    name: str
    inputs: tuple[Any, ...]  # an `Operand` for each tensor; of an engine's kernel all its arguments, else tensors alone
    outputs: tuple[Operand, ...]  # () for an engine's kernel, which gets them as arguments
    is_ours: bool = False  # a kernel of the engine's

    @property
    def operands(self) -> list[Operand]:
        """All tensors, read or written."""
        return [one for one in (*self.inputs, *self.outputs) if isinstance(one, Operand)]


def _operand(x: Any) -> Any:
    """Return the `Operand` of a tensor, anything else as it is."""
    return Operand(tuple(x.shape), x.stride(), x.element_size()) if isinstance(x, Tensor) else x


class _OnCard(TorchFunctionMode):
    """Meta tensors say that they are on CUDA, CUDA's tensors are made on the meta device, and attention is fused."""

    def __init__(self, launches: list[Launch]) -> None:
        self._launches = launches

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _SAID:
            return _SAID[func] if Tensor.is_meta.__get__(args[0]) else func(*args)
        if func is torch._C._nn.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if kwargs.get("generator") is not None:  # tomesd's own, of a CPU
            kwargs |= {"generator": None, "device": _META}
        return func(*map(_off_card, args), **{name: _off_card(value) for name, value in kwargs.items()})

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        """Return an output ``[B, H, N, d]`` in the layout of CUDA's functions, ``[B, N, H, d]`` transposed."""
        batch, heads, count, _ = q.shape
        out = torch.empty(batch, count, heads, v.shape[3], dtype=q.dtype, device=_META).transpose(1, 2)
        self._launches.append(Launch(ATTENTION, tuple(map(_operand, (q, k, v, attn_mask))), (_operand(out),)))
        return out


def _off_card(x: Any) -> Any:
    """Return the meta device for a CUDA device, anything else as it is."""
    return _META if isinstance(x, torch.device) and x.type == "cuda" else x


class _Recorder(TorchDispatchMode):
    """Appends a `Launch` for each operator on meta tensors that is no view. Repeated operators cost little time."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches, self._known = launches, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(one is LazyTokens for one in types):  # its own dispatch computes all tokens, and comes back here
            return NotImplemented
        kwargs, name, returns = kwargs or {}, func.overloadpacket.__name__, func._schema.returns
        written = [one.alias_info.is_write for one in returns if one.alias_info is not None]
        if written == [False] or any(part in name for part in _WITHOUT_WORK):
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        key = func, *(((x.dtype, _operand(x)) if isinstance(x, Tensor) else x) for x in leaves)
        if key in self._known and not written:  # torch's own way to an output's shape takes ten times as long
            out = tree_map_only(Tensor, lambda one: torch.empty_strided(
                one.shape, one.stride(), dtype=one.dtype, device=_META), self._known[key])  # fmt: skip
        else:
            out = self._known[key] = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if any(Tensor.is_meta.__get__(x) for x in made):
            read = tuple(_operand(x) for x in leaves if isinstance(x, Tensor))
            self._launches.append(Launch(name, read, tuple(map(_operand, made))))
        return out


@contextmanager
def on_card() -> Iterator[list[Launch]]:
    """Pretend that meta tensors are on a card with kernels; yield the list to which their launches are appended."""
    launches: list[Launch] = []

    def launch(x: Tensor, variant: tuple, *arguments: Any) -> bool:
        launches.append(Launch(variant[0], tuple(map(_operand, arguments)), (), is_ours=True))
        return True

    def begin_copy(x: Tensor) -> tuple[Tensor, SimpleNamespace]:
        launches.append(Launch(TO_HOST, (_operand(x),), ()))
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.zeros(x.shape), SimpleNamespace(synchronize=lambda: None)

    engine = "tome_core.engine"
    replaced = {
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.overrides._get_current_function_mode_stack": list,  # under a mode that it does not know nothing merges
        f"{engine}.own_error._begin_copy": begin_copy,
        # both halves of guidance are compared by value; here they are always of the same pictures
        f"{engine}.sampling._share": lambda batch, guidance, calls: (
            len(batch), len(batch) // guidance[0], 1, ("shared", calls[0][0])),
        "tomesd.patch.init_generator": lambda device, fallback=None: torch.Generator(),
    }  # fmt: skip
    with ExitStack() as stack:
        for name, value in {"launch": launch, "_supports": lambda device: True, "_module": lambda: kernels}.items():
            stack.enter_context(mock.patch.object(kernels, name, value))
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        for mode in (torch.no_grad(), _Recorder(launches), _OnCard(launches)):
            stack.enter_context(mode)
        yield launches


@cache
def network(name: str) -> nn.Module:
    """Return one of `models.NAMES` in half precision on the meta device, the same one in each call."""
    with torch.device("meta"):
        made = models.Block(models.BLOCK_SHAPE) if name == models.BLOCK else models.UNet(models.SHAPES[name])
    return made.half().eval().requires_grad_(False)


def inputs(name: str, pixels: int) -> tuple[Tensor, ...]:
    """Return the arguments of a call for a picture `pixels` a side, with its prompt and without."""
    return models.inputs(name, pixels, "meta", torch.float16)


def trace(run: Callable[[], Any], calls: int = 1) -> list[list[Launch]]:
    """Return the launches of each of some calls of a function, in which meta tensors say that they are on a card."""
    found = []
    with on_card() as launches:
        for _ in range(calls):
            run()
            found.append(launches[:])
            launches.clear()
    return found
