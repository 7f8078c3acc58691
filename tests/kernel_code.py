"""``python -m tests.kernel_code``: compile the Triton kernels for GPUs that need not be here, and look at the code.

No GPU, driver or toolkit is needed, Triton brings all of it along. Says what it compiled; fails with Triton's reason.
"""

from __future__ import annotations

import inspect
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tome_core import triton_kernels

TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
# Ampere (A100), Ada (RTX 40), Hopper (H100, H200), AMD's MI300 and RX 7900
TARGETS = [("cuda", 80, 32), ("cuda", 89, 32), ("cuda", 90, 32), ("hip", "gfx942", 64), ("hip", "gfx1100", 32)]


def code(kernel, target, **arguments):
    """Its assembly; an argument is a Triton type or, where it is not a string, a constant. Others are integers."""
    names = kernel.arg_names
    types = {name: arguments.get(name, "i32") for name in names}
    constants = {(names.index(name),): value for name, value in types.items() if not isinstance(value, str)}
    types = {name: value if isinstance(value, str) else "constexpr" for name, value in types.items()}
    compiled = compile(ASTSource(kernel, types, constexprs=constants), target=GPUTarget(*target))
    return compiled.asm["ptx" if target[0] == "cuda" else "amdgcn"]


def best_keys_code(target, dtype, rows, bias, keys=torch.float32):
    """The assembly for channels that lie side by side, as they do where nothing was transposed. keys: their dtype."""
    own = triton_kernels
    return code(
        own._best_keys, target, x=TYPES[dtype], rows=rows, keys=TYPES[keys], bias=bias, score="*fp32", index="*i64",
        x_channel=1, keys_channel=1, PARTS=own.parts_of(dtype, keys), QUERIES=own._QUERIES,
        KEYS=own._KEYS, CHANNELS=own._CHANNELS,
    )  # fmt: skip


def main() -> None:
    """Compile each kernel for each target and dtype."""
    if "constexprs" not in inspect.signature(ASTSource).parameters:
        print("this Triton is too old to be asked for another GPU's code")
        sys.exit(5)
    for target in TARGETS:
        for dtype, pointer in TYPES.items():
            for options in (("*i64", None), (None, "*fp32")):
                text = best_keys_code(target, dtype, *options)
                if target[0] == "cuda":
                    assert "tf32" not in text, "products are to be those of float32"
                    assert ("mma" in text) == (dtype != torch.float32), "half precision is for tensor cores"
                own = best_keys_code(target, dtype, *options, keys=dtype)
                assert "tf32" not in own
                assert dtype == torch.float32 or target[0] != "cuda" or own.count("mma") < text.count("mma")
            means = code(triton_kernels._mean_rows, target, x=pointer, order="*i64", offsets="*i64", mean=pointer,
                         x_channel=1, ROWS=triton_kernels._ROWS, CHANNELS=triton_kernels._WIDEST)  # fmt: skip
            assert "atom" not in means, "equal bits every time"
            print("compiled for", target[1], dtype, flush=True)


if __name__ == "__main__":
    main()
