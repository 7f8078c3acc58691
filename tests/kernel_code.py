"""``python -m tests.kernel_code``: compile the Triton kernels for GPUs that need not be here, and look at the code.

No GPU, driver or toolkit is needed, Triton brings all of it along. Says what it compiled; fails with Triton's reason.
"""

from __future__ import annotations

import inspect
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tome_core.merging.kernels import triton_kernels, triton_kernels_correction

TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
# Ampere (A100), Ada (RTX 40), Hopper (H100, H200), AMD's MI300 and RX 7900
TARGETS = [("cuda", 80, 32), ("cuda", 89, 32), ("cuda", 90, 32), ("hip", "gfx942", 64), ("hip", "gfx1100", 32)]

SHARED = 99 * 1024  # bytes of shared memory that one program may have on a desktop's Ampere or Ada


def code(kernel, target, warps=4, stages=3, **arguments):
    """Its assembly; an argument is a Triton type or, where it is not a string, a constant. Others are integers.

    Pointers and the strides of samples, rows and heads are taken for multiples of 16, as they are in a model.
    """
    names = kernel.arg_names
    types = {name: arguments.get(name, "i32") for name in names}
    constants = {(names.index(name),): value for name, value in types.items() if not isinstance(value, str)}
    types = {name: value if isinstance(value, str) else "constexpr" for name, value in types.items()}
    even = {(number,): [["tt.divisibility", 16]] for number, name in enumerate(names)
            if types[name].startswith("*") or name.endswith(("_sample", "_row", "_head"))}  # fmt: skip
    source = ASTSource(kernel, types, constexprs=constants, attrs=even)
    compiled = compile(source, target=GPUTarget(*target), options={"num_warps": warps, "num_stages": stages})
    if target[0] == "cuda":
        assert compiled.metadata.shared <= SHARED, f"{kernel.__name__} wants {compiled.metadata.shared} bytes"
    return compiled.asm["ptx" if target[0] == "cuda" else "amdgcn"]


def best_keys_code(target, dtype, rows, bias, keys=torch.float32):
    """The assembly for channels that lie side by side, as they do where nothing was transposed. keys: their dtype."""
    own = triton_kernels
    return code(
        own._best_keys, target, x=TYPES[dtype], rows=rows, keys=TYPES[keys], bias=bias, score="*fp32", index="*i64",
        x_channel=1, keys_channel=1, PARTS=own.parts_of(dtype, keys), LENGTHS=rows is not None, QUERIES=own._QUERIES,
        KEYS=own._KEYS, CHANNELS=own.channels_at_once(dtype),
    )  # fmt: skip


PRODUCTS = {"first_order", "answer_few", "ridge", "correct"}


def rest(target, dtype):
    """The assembly of all the others, by name; those of a correction for half precision alone, in SD1.5's heads."""
    own, more, pointer = triton_kernels, triton_kernels_correction, TYPES[dtype]
    made = {
        "mean_rows": code(own._mean_rows, target, x=pointer, values=pointer, order="*i64", offsets="*i64",
                          mean=pointer, mean_values=pointer, exact="*fp32", bias=None, x_channel=1, values_channel=1,
                          ROWS=own._ROWS, CHANNELS=own._WIDEST, PARTS=2),
        "centres": code(own._mean_rows, target, 8, x=pointer, values=None, order="*i64", offsets="*i64",
                        mean=pointer, mean_values=None, exact=None, bias="*fp32", x_channel=1, values_channel=1,
                        ROWS=own._ROWS_ALONE, CHANNELS=own._WIDEST_ALONE, PARTS=1),
    }  # fmt: skip
    if dtype == torch.float32:
        made["segments"] = code(own._segments, target, group="*i64", order="*i64", offsets="*i64", sizes="*fp32",
                                logs="*fp32", rounded="*bf16", empty="fp32", TOKENS=own._COUNTED_TOKENS,
                                GROUPS=own._COUNTED_GROUPS)
        made["place_tokens"] = code(own._place, target, score="*fp32", index="*i64", sources="*i64",
                                    destinations="*i64", group="*i64", PLACES=own._PLACED, OTHERS=own._OTHERS)
        return made
    made["first_order"] = code(more._first_order, target, keys=pointer, values=pointer, group="*i64", means="*fp32",
                               found="*fp32", scale="fp32", keys_channel=1, values_channel=1, width=40,
                               PARTS=own.parts_of(dtype, torch.float32), WIDTH=64, TOKENS=more._TOKENS)  # fmt: skip
    made["answer_few"] = code(more._answer_few, target, q=pointer, keys=pointer, values=pointer,
                            merged_keys=pointer, merged_values=pointer, bias=pointer, merged="*fp32", full="*fp32",
                            logs="*fp32", scale="fp32", q_channel=1, keys_channel=1, values_channel=1, width=40,
                            QUERIES=more._TOKENS, WIDTH=64, TOKENS=more._TOKENS)  # fmt: skip
    made["ridge"] = code(more._ridge, target, 8, 1, q=pointer, merged="*fp32", full="*fp32", logs="*fp32",
                         first="*fp32", matrix=pointer, constant=pointer, q_channel=1, width=40, WIDTH=64,
                         UNKNOWNS=128, QUERIES=more._QUERIES, SPANS=8)  # fmt: skip
    made["correct"] = code(more._correct, target, out=pointer, q=pointer, matrix=pointer, constant=pointer,
                             to=pointer, out_channel=1, q_channel=1, width=40, WIDTH=64, TOKENS=more._TOKENS)
    return made


def main() -> None:
    """Compile each kernel for each target and dtype."""
    if "constexprs" not in inspect.signature(ASTSource).parameters:
        print("this Triton is too old to be asked for another GPU's code")
        sys.exit(5)
    for target in TARGETS:
        for dtype in TYPES:
            for options in (("*i64", None), (None, "*fp32")):
                text = best_keys_code(target, dtype, *options)
                if target[0] == "cuda":
                    assert "tf32" not in text, "products are to be those of float32"
                    assert ("mma" in text) == (dtype != torch.float32), "half precision is for tensor cores"
                own = best_keys_code(target, dtype, *options, keys=dtype)
                assert "tf32" not in own
                assert dtype == torch.float32 or target[0] != "cuda" or own.count("mma") < text.count("mma")
            for name, text in rest(target, dtype).items():
                assert "atom" not in text and "tf32" not in text, f"{name}: equal bits every time"
                assert target[0] != "cuda" or ("mma" in text) == (name in PRODUCTS), name
            print("compiled for", target[1], dtype, flush=True)


if __name__ == "__main__":
    main()
