"""``python -m tests.kernels.compiled_code``: compile the kernels for two GPUs that need not be here, or five."""

from functools import partial
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.thoroughness import THOROUGH
from tome_core.attention.correction import block_of
from tome_core.merging import kernels
from tome_core.merging.kernels import triton_kernels_correction, triton_kernels_direct

# Ada (RTX 40), AMD's RX 7900; Ampere (A100), Hopper (H100, H200), AMD's MI300
TARGETS = [("cuda", 89, 32), ("hip", "gfx1100", 32), ("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)]
SHARED = 99 * 1024  # bytes of shared memory that one program may have on a desktop's Ampere or Ada
PRODUCTS = {"_best_keys", "_answer", "_ridge", "_correct"}  # multiply on tensor cores
HEADS, WIDTH, TOKENS, GROUPS = 8, 40, 1024, 256  # as SD1.5 has them
HEADS_TOO = [(8, 40), (10, 64), (8, 80), (4, 128), (8, 160)]
numbers = partial(torch.zeros, dtype=torch.int64)


def launch_all(dtype):
    """Launch every kernel as a model does; those of a correction are for half precision alone."""
    tokens, groups = torch.zeros(2, TOKENS, HEADS * WIDTH, dtype=dtype), torch.zeros(2, GROUPS, HEADS * WIDTH)
    kernels.spread(tokens, tokens, numbers(64), 1e4)
    kernels.best_keys(tokens, numbers(1, 768), groups, None, lengths=True)
    kernels.best_keys(tokens, None, groups.to(dtype), torch.zeros(2, GROUPS))
    segments = numbers(TOKENS), numbers(GROUPS + 1)
    kernels.mean_rows(tokens.flatten(0, 1), *segments, TOKENS, values=tokens.flatten(0, 1))
    kernels.mean_rows(tokens.flatten(0, 1), *segments, TOKENS, bias=True)
    kernels.count_and_mean_rows(tokens.flatten(0, 1), numbers(1, TOKENS), GROUPS, values=tokens.flatten(0, 1))
    kernels.count_and_mean_rows(tokens.flatten(0, 1), numbers(2, TOKENS), GROUPS, bias=True)
    kernels.assign_groups(torch.zeros(2, 768), numbers(2, 768), numbers(1, 768), numbers(1, GROUPS), 512)
    for heads, width in HEADS_TOO if dtype.itemsize == 2 else ():
        tokens, groups = torch.zeros(2, TOKENS, heads * width, dtype=dtype), torch.zeros(2, GROUPS, heads * width)
        queries, few, places = tokens.unflatten(2, (heads, width)), groups.to(dtype), torch.arange(0, TOKENS, 8)
        sizes = few[:1, :, 0]
        answers = kernels.answer(queries, places, tokens, tokens, few, few, sizes, numbers(1, TOKENS), groups, 0.1)
        block = block_of(width)
        found = kernels.ridge(queries, places, answers, block, 8, 0.1, 1e-6)
        kernels.correct(queries, queries, *found[:2], block)


def compiled_for(target, dtype):
    """The name and code of each launch."""
    compiled, run = [], JITFunction.run

    def compile_alone(self, *args, warmup, **more):
        compiled.append((self.__name__, run(self, *args, warmup=True, **more)))

    driver.set_active(SimpleNamespace(get_current_device=lambda: target, get_current_stream=lambda device: 0,
                                      get_current_target=lambda: GPUTarget(*target)))  # fmt: skip
    JITFunction.run = compile_alone
    triton_kernels_correction.ON_AMD = target[0] == "hip"
    try:
        launch_all(dtype)
    finally:
        JITFunction.run = run
    return compiled


def fail(name, why):
    raise AssertionError(f"{name}: {why}")


def main() -> None:
    kernels.DEVICES, kernels._proves_itself, kernels._give_up = ("cpu",), lambda *_: True, fail
    triton_kernels_direct.why_off = "nothing is launched"
    for target in TARGETS if THOROUGH else TARGETS[:2]:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            products = []
            for name, kernel in compiled_for(target, dtype):
                code = kernel.asm["ptx" if target[0] == "cuda" else "amdgcn"]
                assert "atom" not in code and "tf32" not in code, f"{name}: equal bits, products as those of float32"
                if target[0] == "cuda":
                    assert kernel.metadata.shared <= SHARED, f"{name} wants {kernel.metadata.shared} bytes"
                    assert ("mma" in code) == (name in PRODUCTS and dtype.itemsize == 2), name
                    products.append(code.count("mma"))
            print("compiled for", target[1], dtype, flush=True)
            if products and dtype.itemsize == 2:
                assert products[1] > products[2], "keys of halves are one part"


if __name__ == "__main__":
    main()
