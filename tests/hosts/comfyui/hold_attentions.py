"""Compare functions of ComfyUI with attention over repeated keys. Run by ComfyUI's Python with ``--cpu`` it tests all
of them, prints as JSON how each gets the sizes, and fails if merged keys give anything else. No server is needed."""

import importlib
import json
from types import SimpleNamespace
from typing import Any

import torch

from comfy_nodes.slot_calls import SLOT, HostCall, OtherNodesFunction
from tome_core.attention.merged import Attention, MergeOptions, attend
from tome_core.merging.plan import MergePlan

FUNCTIONS = ("basic", "sub_quad", "split", "pytorch", "flash")  # on a CPU flash calls torch's function
HEADS, WIDTH, TOKENS, GROUPS = 4, 8, 100, 9
# shares of the output's length: the logarithms of sizes are float32 at best, in half precision off by half a last bit
TOLERANCE = {torch.float32: 3e-6, torch.float64: 5e-7, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def way_of(function: Any, dtype: torch.dtype = torch.float32, batch: int = 2, **call: Any) -> str | None:
    """How the function gets the sizes; None if it is no attention. Asserts what a softmax over repeated keys gives."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, batch, TOKENS, HEADS * WIDTH, generator=generator) * 2).to(dtype)
    group = (torch.rand(batch, TOKENS, generator=generator) ** 3 * (GROUPS - 1)).long()  # most are in few; one is empty
    plan = MergePlan(group, GROUPS)
    host_call = HostCall(function, q, k, v, HEADS, **call)
    takes_bias = host_call.takes_bias()
    if takes_bias is None:
        return None
    merged, way = attend(Attention(host_call.q, host_call.k, host_call.v, host_call.compute, WIDTH**-0.5, takes_bias),
                         MergeOptions(plan))  # fmt: skip
    keys, values = plan.merge(k), plan.merge(v)
    exact, blind = (_by_softmax(q, keys, values, sizes) for sizes in (plan.sizes, plan.sizes.clamp(max=1)))
    error, without = _far(merged, exact), _far(blind, exact)
    assert error <= TOLERANCE[dtype], f"off by {error:.1e} of the output, without sizes by {without:.1e}"
    assert without > 5 * TOLERANCE[dtype], "the inputs do not tell proportional attention from plain attention"
    return way


def _by_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Attend by a softmax in float64, each key repeated by its size. The result is ``[B, N, H, d]``."""
    outs = []
    for query, key, value, count in zip(q, k, v, sizes, strict=True):
        queries, keys, values = (x.double().unflatten(-1, (HEADS, -1)).transpose(0, 1) for x in (
            query, key.repeat_interleave(count, 0), value.repeat_interleave(count, 0)))  # fmt: skip
        outs.append(((queries @ keys.mT * WIDTH**-0.5).softmax(-1) @ values).transpose(0, 1))
    return torch.stack(outs)


def _far(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance of a sample from the expected output, as a share of that output's length."""
    difference = (out.double() - expected.double()).flatten(1).norm(dim=1)
    return (difference / expected.double().flatten(1).norm(dim=1)).max().item()


def main() -> None:
    """Test all functions in every precision, also those that cut their work if memory is short."""
    importlib.import_module("comfy.options").enable_args_parsing()
    attention = importlib.import_module("comfy.ldm.modules.attention")
    patcher, ways = importlib.import_module("comfy.model_patcher").ModelPatcher, {}
    for name in FUNCTIONS:
        function, options = getattr(attention, f"attention_{name}"), {}
        # the slot's content from ComfyUI's own node for choosing a function
        patcher.set_model_optimized_attention(SimpleNamespace(model_options={"transformer_options": options}), function)
        chosen = OtherNodesFunction(options[SLOT], attention.attention_pytorch)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            ways[f"{name} {dtype}"] = way_of(function, dtype)
            ways[f"{name} {dtype} raised"] = way_of(function, dtype, attn_precision=torch.float32)
            ways[f"{name} {dtype} chosen by a node"] = way_of(chosen, dtype)
    for name, size in (("split", 10_000), ("sub_quad", 5_000)):
        free = [size, (size, size)]
        attention.model_management.get_free_memory = lambda dev=None, torch_free_too=False, of=free: of[torch_free_too]
        ways[f"{name} short of memory"] = way_of(getattr(attention, f"attention_{name}"))
    print(json.dumps(ways))


if __name__ == "__main__":
    main()
