"""``python -m tests.kernel_code``: compile the Triton kernels for GPUs that need not be here, and look at the code.

No GPU, driver or toolkit is needed, Triton brings all of it along. Prints what it compiled; fails with Triton's reason.
For two GPUs, or with ``TOME_THOROUGH=1`` for all five.
"""

from __future__ import annotations

import inspect
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tests.thoroughness import THOROUGH
from tome_core.merging.kernels import triton_kernels as first
from tome_core.merging.kernels import triton_kernels_correction as more

TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
# Ada (RTX 40), AMD's RX 7900; Ampere (A100), Hopper (H100, H200), AMD's MI300
TARGETS = [("cuda", 89, 32), ("hip", "gfx1100", 32), ("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)]
SHARED = 99 * 1024  # bytes of shared memory that one program may have on a desktop's Ampere or Ada
PRODUCTS = {"_first_order", "_answer_few", "_ridge", "_correct"}  # multiply on tensor cores
# Types of arguments by their names, if a kernel has no other: pointers to numbers of its dtype ("*") and to others.
# Channels lie side by side, as if nothing was transposed; heads have SD1.5's 40 channels.
NAMES = {
    "*": "x values keys mean mean_values q out to matrix constant merged_keys merged_values",
    "*fp32": "score exact sizes logs means found merged full first",
    "*i64": "rows order offsets index sources destinations group",
    "*bf16": "rounded",
    "fp32": "scale empty",
    1: "x_channel values_channel keys_channel q_channel out_channel",
}
ARGUMENTS = {name: kind for kind, names in NAMES.items() for name in names.split()}
ARGUMENTS |= {"bias": None, "width": 40, "WIDTH": 64, "TOKENS": more._TOKENS, "QUERIES": more._TOKENS}


def code(kernel, target, dtype, warps=4, stages=3, **others):
    """Its assembly. An argument is a Triton type or, if it is not a string, a constant; unnamed ones are integers.

    Pointers and the strides of samples, rows and heads are taken for multiples of 16, as they are in a model.
    """
    names = kernel.arg_names
    types = {name: others.get(name, ARGUMENTS.get(name, "i32")) for name in names}
    types = {name: TYPES[dtype] if value == "*" else value for name, value in types.items()}
    constants = {(names.index(name),): value for name, value in types.items() if not isinstance(value, str)}
    types = {name: value if isinstance(value, str) else "constexpr" for name, value in types.items()}
    even = {(number,): [["tt.divisibility", 16]] for number, name in enumerate(names)
            if types[name].startswith("*") or name.endswith(("_sample", "_row", "_head"))}  # fmt: skip
    source = ASTSource(kernel, types, constexprs=constants, attrs=even)
    compiled = compile(source, target=GPUTarget(*target), options={"num_warps": warps, "num_stages": stages})
    if target[0] == "cuda":
        assert compiled.metadata.shared <= SHARED, f"{kernel.__name__} wants {compiled.metadata.shared} bytes"
    return compiled.asm["ptx" if target[0] == "cuda" else "amdgcn"]


def best_keys(target, dtype, keys, **others):
    tile = {"QUERIES": first._QUERIES, "KEYS": first._KEYS, "CHANNELS": first.channels_at_once(dtype)}
    return code(first._best_keys, target, dtype, keys=TYPES[keys], PARTS=first.parts_of(dtype, keys), **tile, **others)


def others(dtype):
    """Kernels, numbers of warps and stages, and arguments; those of a correction are for half precision alone."""
    alone = {"values": None, "mean_values": None, "exact": None, "bias": "*fp32"}
    yield first._mean_rows, 4, 3, {"ROWS": first._ROWS, "CHANNELS": first._WIDEST, "PARTS": 2}
    yield first._mean_rows, 8, 3, {**alone, "ROWS": first._ROWS_ALONE, "CHANNELS": first._WIDEST_ALONE, "PARTS": 1}
    if dtype == torch.float32:
        yield first._segments, 4, 3, {"TOKENS": first._COUNTED_TOKENS, "GROUPS": first._COUNTED_GROUPS}
        yield first._place, 4, 3, {"PLACES": first._PLACED, "OTHERS": first._OTHERS}
        return
    yield more._first_order, 4, 3, {"PARTS": first.parts_of(dtype, torch.float32)}
    yield more._answer_few, 4, 3, {"bias": "*"}
    yield more._ridge, 8, 1, {"UNKNOWNS": 128, "QUERIES": more._QUERIES, "SPANS": 8}
    yield more._correct, 4, 3, {}


def main() -> None:
    """Compile each kernel for each target and dtype."""
    if "constexprs" not in inspect.signature(ASTSource).parameters:
        print("this Triton is too old to be asked for another GPU's code")
        sys.exit(5)
    for target in TARGETS if THOROUGH else TARGETS[:2]:
        is_cuda = target[0] == "cuda"
        for dtype in TYPES:
            is_half = dtype != torch.float32
            exact = best_keys(target, dtype, torch.float32, LENGTHS=True)
            own = best_keys(target, dtype, dtype, rows=None, bias="*fp32", LENGTHS=False)
            assert "tf32" not in exact + own, "products are to be those of float32"
            assert not is_cuda or ("mma" in exact) == is_half, "half precision is for tensor cores"
            assert not is_cuda or not is_half or own.count("mma") < exact.count("mma"), "keys of halves are one part"
            for kernel, warps, stages, arguments in others(dtype):
                text, name = code(kernel, target, dtype, warps, stages, **arguments), kernel.__name__
                assert "atom" not in text and "tf32" not in text, f"{name}: equal bits every time"
                assert not is_cuda or ("mma" in text) == (name in PRODUCTS), name
            print("compiled for", target[1], dtype, flush=True)


if __name__ == "__main__":
    main()
