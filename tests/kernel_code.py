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
PRODUCTS = {"first_order", "answer_few", "ridge", "correct"}  # multiply on tensor cores
MATRIX = {"matrix": "*", "constant": "*", "width": 40, "WIDTH": 64}  # "*" is a pointer to numbers of the kernel's dtype


def code(kernel, target, dtype, warps=4, stages=3, **arguments):
    """Its assembly. An argument is a Triton type or, if it is not a string, a constant; other ones are integers.

    Channels lie side by side, as if nothing was transposed. Pointers and the strides of samples, rows and heads are
    taken for multiples of 16, as they are in a model.
    """
    names = kernel.arg_names
    types = {name: arguments.get(name, 1 if name.endswith("_channel") else "i32") for name in names}
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


def best_keys(target, dtype, keys, rows, bias):
    return code(
        first._best_keys, target, dtype, x="*", rows=rows, keys=TYPES[keys], bias=bias, score="*fp32", index="*i64",
        PARTS=first.parts_of(dtype, keys), LENGTHS=rows is not None, QUERIES=first._QUERIES, KEYS=first._KEYS,
        CHANNELS=first.channels_at_once(dtype),
    )  # fmt: skip


def others(target, dtype):
    """Name and assembly of each: those of a correction for half precision alone, for SD1.5's heads of 40 channels."""
    rows = {"order": "*i64", "offsets": "*i64", "x": "*", "mean": "*"}
    yield "mean_rows", code(first._mean_rows, target, dtype, **rows, values="*", mean_values="*", exact="*fp32",
                            bias=None, ROWS=first._ROWS, CHANNELS=first._WIDEST, PARTS=2)  # fmt: skip
    yield "centres", code(first._mean_rows, target, dtype, 8, **rows, values=None, mean_values=None, exact=None,
                          bias="*fp32", ROWS=first._ROWS_ALONE, CHANNELS=first._WIDEST_ALONE, PARTS=1)  # fmt: skip
    if dtype == torch.float32:
        yield "segments", code(first._segments, target, dtype, group="*i64", order="*i64", offsets="*i64",
                               sizes="*fp32", logs="*fp32", rounded="*bf16", empty="fp32",
                               TOKENS=first._COUNTED_TOKENS, GROUPS=first._COUNTED_GROUPS)  # fmt: skip
        yield "place_tokens", code(first._place, target, dtype, score="*fp32", index="*i64", sources="*i64",
                                   destinations="*i64", group="*i64", PLACES=first._PLACED,
                                   OTHERS=first._OTHERS)  # fmt: skip
        return
    yield "first_order", code(more._first_order, target, dtype, keys="*", values="*", group="*i64", means="*fp32",
                              found="*fp32", scale="fp32", PARTS=first.parts_of(dtype, torch.float32), width=40,
                              WIDTH=64, TOKENS=more._TOKENS)  # fmt: skip
    yield "answer_few", code(more._answer_few, target, dtype, q="*", keys="*", values="*", merged_keys="*",
                             merged_values="*", bias="*", merged="*fp32", full="*fp32", logs="*fp32", scale="fp32",
                             width=40, WIDTH=64, QUERIES=more._TOKENS, TOKENS=more._TOKENS)  # fmt: skip
    yield "ridge", code(more._ridge, target, dtype, 8, 1, q="*", merged="*fp32", full="*fp32", logs="*fp32",
                        first="*fp32", **MATRIX, UNKNOWNS=128, QUERIES=more._QUERIES, SPANS=8)  # fmt: skip
    yield "correct", code(more._correct, target, dtype, out="*", q="*", to="*", **MATRIX, TOKENS=more._TOKENS)


def main() -> None:
    """Compile each kernel for each target and dtype."""
    if "constexprs" not in inspect.signature(ASTSource).parameters:
        print("this Triton is too old to be asked for another GPU's code")
        sys.exit(5)
    for target in TARGETS if THOROUGH else TARGETS[:2]:
        is_cuda = target[0] == "cuda"
        for dtype in TYPES:
            is_half = dtype != torch.float32
            exact = best_keys(target, dtype, torch.float32, "*i64", None)
            own = best_keys(target, dtype, dtype, None, "*fp32")
            assert "tf32" not in exact + own, "products are to be those of float32"
            assert not is_cuda or ("mma" in exact) == is_half, "half precision is for tensor cores"
            assert not is_cuda or not is_half or own.count("mma") < exact.count("mma"), "keys of halves are one part"
            for name, text in others(target, dtype):
                assert "atom" not in text and "tf32" not in text, f"{name}: equal bits every time"
                assert not is_cuda or ("mma" in text) == (name in PRODUCTS), name
            print("compiled for", target[1], dtype, flush=True)


if __name__ == "__main__":
    main()
