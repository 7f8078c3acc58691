import sys
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import NamedTuple, Any
from unittest import mock
from types import SimpleNamespace
from collections import Counter
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import models
from benchmarks.gpu_rows import Patched
from tome_core.merging import kernels

_CARD = torch.device("cuda")


class Launch(NamedTuple):
    name: str
    bytes: int
    flops: int
    arguments: tuple


class _OnCard(TorchFunctionMode):
    """Tensors of the meta device say that they are on CUDA."""

    def __init__(self, launches):
        self.launches = launches

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SAID:
            real = func(*args)
            return _SAID[func] if func_is_meta(args[0]) else real
        if func is torch._C._nn.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        args, kwargs = _off_card(args), {name: _off_card_one(value) for name, value in kwargs.items()}
        if kwargs.get("generator") is not None:
            kwargs |= {"generator": None, "device": "meta"}
        return func(*args, **kwargs)

    def attend(self, q, k, v, attn_mask=None, *rest, **named):
        batch, heads, count, width = q.shape
        out = torch.empty(batch, count, heads, v.shape[-1], dtype=q.dtype, device="meta").transpose(1, 2)
        flops = 4 * batch * heads * count * k.shape[2] * width
        moved = sum(map(_bytes, (q, k, v, out)))
        self.launches.append(Launch("attention", moved, flops, (q, k, v, attn_mask)))
        return out


_SAID = {torch.Tensor.device.__get__: _CARD, torch.Tensor.is_cuda.__get__: True, torch.Tensor.is_meta.__get__: False}


def func_is_meta(x):
    with torch._C.DisableTorchFunction():
        return x.is_meta


def _off_card_one(x):
    return torch.device("meta") if isinstance(x, torch.device) and x.type == "cuda" else x

def _off_card(args):
    return tuple(map(_off_card_one, args))


def _bytes(x):
    n = 1
    for size, stride in zip(x.shape, x.stride()):
        n *= size if stride else 1
    return n * x.element_size()

class _Recorder(TorchDispatchMode):
    def __init__(self, launches):
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        returns = func._schema.returns
        is_view = returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        if is_view or "empty" in name or name in ("_unsafe_view", "detach", "lift_fresh"):
            return out
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if torch.is_tensor(leaf)]
        self.launches.append(Launch(name, sum(map(_bytes, tensors)), 0, (args, kwargs, out)))
        return out


@contextmanager
def on_card():
    launches = []
    def launch(x, variant, *arguments):
        with torch._C.DisableTorchFunction():
            moved = sum(_bytes(a) for a in arguments if torch.is_tensor(a))
        launches.append(Launch("_" + variant[0], moved, 0, (variant, arguments)))
        return True
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(kernels, "launch", launch))
        enter(mock.patch.object(kernels, "_supports", lambda device: True))
        enter(mock.patch.object(kernels, "_module", lambda: kernels))
        enter(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        enter(mock.patch("tome_core.engine.sampling._share", lambda batch, guidance, calls: (len(batch), len(batch)//guidance[0], 1, ("shared", calls[0][0]))))
        enter(torch.no_grad())
        event = SimpleNamespace(synchronize=lambda: None)
        def begin_copy(x):
            launches.append(Launch("copy to host", _bytes(x), 0, ()))
            return torch.zeros(x.shape, dtype=x.dtype, device="cpu"), event
        enter(mock.patch("tome_core.engine.own_error._begin_copy", begin_copy))
        enter(mock.patch("tome_core.engine.state.foreign_mode", lambda: ""))
        enter(_Recorder(launches))
        enter(_OnCard(launches))
        yield launches


@cache
def network(name):
    shape = models._shape_of(name, False)
    with torch.device("meta"):
        return (models.Block if name == "block" else models.UNet)(shape).half().eval().requires_grad_(False)


def trace(name, pixels, way, when="new"):
    """Launches of the call after two."""
    import tomesd.patch
    unet = models.copy_sharing_weights(network(name))
    arguments = models.inputs(name, pixels, "meta", torch.float16)
    with mock.patch("tomesd.patch.init_generator", lambda device, fallback=None: torch.Generator()), on_card() as launches:
        run = Patched(unet, way).call(arguments, when)
        for _ in range(2 if way not in ("unmerged", "tomesd") else 1):
            launches.clear()
            run()
        return list(launches)

if __name__ == "__main__":
    torch.set_num_threads(1)
    import time
    for name, pixels in (("sd15", 1024), ("sdxl", 2048), ("sd15", 2048), ("sdxl",1024)):
        base = Counter(l.name for l in trace(name, pixels, "unmerged"))
        print("###", name, pixels, "unmerged", sum(base.values()))
        print(base.most_common())
        for way, when in (("tomesd", "new"), ("balanced", "kept"), ("balanced", "renewed"), ("balanced", "new")):
            t0 = time.time()
            c = Counter(l.name for l in trace(name, pixels, way, when))
            total = sum(c.values())
            c.subtract(base)
            print("##", name, pixels, way, when, total, "+%d" % (total - sum(base.values())), "%.1f s" % (time.time() - t0))
            print("   ", [x for x in c.most_common() if x[1]])
