"""What the laws of the Triton kernels share. With ``TRITON_INTERPRET=1`` they run on the CPU, else on the GPU."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from tome_core.merging import kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF = float("inf")
NAMES = (
    "answer_few", "best_keys", "correct", "first_order", "mean_rows", "assign_groups", "ridge", "segments",
)  # fmt: skip


def together(*axes):
    """On a GPU all combinations; in the interpreter, which is slow, each value of each axis at least once."""
    if not INTERPRETED:
        return list(itertools.product(*axes))
    longest = max(map(len, axes))
    return list(zip(*(itertools.islice(itertools.cycle(axis), longest) for axis in axes), strict=True))


def _why_not() -> str:
    """Why Triton's interpreter cannot run a kernel with a loop here (3.6 cannot with numpy 2.4); empty if it can."""
    import triton

    @triton.jit
    def count(stop):
        for _ in range(0, stop, 2):
            pass

    try:
        count[(1,)](5)
    except Exception as error:
        return f"Triton {triton.__version__}'s interpreter does not run with this numpy: {error}"
    return ""


if INTERPRETED and (reason := _why_not()):
    pytest.skip(reason, allow_module_level=True)


def _compare(key, arguments):
    """In place of a first launch's proof: every launch is compared with torch's operators, and is used."""
    fault = kernels.find_fault(key[0], arguments)
    if fault:
        _fail(key[0], fault)
    return True


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """Names of the kernels that ran; a test in which none did, or one was wrong or could not run, fails."""
    if INTERPRETED:
        monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
        _repair_the_interpreter(monkeypatch)
    module, calls = kernels._module(), []
    for name in NAMES:
        launch = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, launch=launch, name=name: (calls.append(name), launch(*a)))
    monkeypatch.setattr(kernels, "_give_up", _fail)
    monkeypatch.setattr(kernels, "_verified", set())
    monkeypatch.setattr(kernels, "_proves_itself", _compare)
    yield calls
    assert calls


def _fail(name, why):
    raise AssertionError(f"{name}: {why}")


def _repair_the_interpreter(monkeypatch):
    """It multiplies the bit patterns of bfloat16 (seen in 3.5.0 and 3.9.0): give it their values."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def value(self, x):
        return self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def repaired(self, a, b, *rest):
        return dot(self, value(self, a), value(self, b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", repaired)


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def whole_numbers(most, *shape, seed):
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(found, expected, dtype, scale=1.0):
    torch.testing.assert_close(found.float(), expected.float(), rtol=4 * torch.finfo(dtype).eps,
                               atol=scale * 4 * torch.finfo(dtype).eps)  # fmt: skip
