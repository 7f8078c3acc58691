"""Errors inside a call: those of hosts, memory and devices pass; those of shapes and of ours cost merging alone."""

from collections.abc import Callable

import pytest
import torch

import tome_core
from tests.small_models.families import MODELS
from tests.small_models.unets import inputs, sd15, sdxl, small
from tests.thoroughness import some_quick
from tests.watching.mistakes import failing, functions_in
from tome_core import MergeConfig, MergeRule, faults
from tome_core.models import sites
from tome_core.models.unet_blocks import find_blocks

SHAPES = (RuntimeError("The size of tensor a (70) must match the size of tensor b (256) at non-singleton dimension 1"),
          RuntimeError("shape '[2, 16, 16, 32]' is invalid for input of size 4480"), ValueError("wrong length"),
          RuntimeError("mat1 and mat2 shapes cannot be multiplied"), AssertionError(), IndexError("index 70"),
          TypeError("no bias"), ZeroDivisionError("x"), KeyError(70), LookupError(), NotImplementedError(),
          ArithmeticError(), type("EinopsError", (RuntimeError,), {})("3 != 4"))  # fmt: skip


class Interrupted(Exception):
    """A host's Cancel, as in ComfyUI before 0.20."""


class OwnRuntimeError(RuntimeError):
    """A host's error of a class of its own."""


PASS = (Interrupted(), OwnRuntimeError("shape"), KeyboardInterrupt(), SystemExit(), InterruptedError(), MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), RuntimeError("HIP out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), RuntimeError("XPU out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: not enough memory: you tried to "
                     "allocate 9 bytes"), RuntimeError("UR error"), RuntimeError("UR_RESULT_ERROR_OUT_OF_RESOURCES"),
        RuntimeError("Could not allocate tensor with 9 bytes. There is not enough GPU video memory available!"),
        RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError("HIP error: invalid device"),
        RuntimeError("CUDA error: device-side assert triggered"), RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), RuntimeError("The GPU device was removed"),
        RuntimeError("Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES) SYCL error"),
        RuntimeError("unspecified launch failure: device-side"), RuntimeError("hipErrorNoBinaryForGpu"),
        RuntimeError("cudaErrorNotReady"), RuntimeError("failed to allocate 9 bytes"), RuntimeError("Out Of Memory"),
        *(RuntimeError(f"the device {what}") for what in ("lost", "was lost", "is hung", "removed", "not ready")),
        *(RuntimeError(f"{name} error: 9") for name in (
            "CUDA", "cuda", "HIP", "XPU", "SYCL", "Level Zero", "level_zero", "MPS", "Metal", "DirectML", "DML",
            "cuDNN", "MIOpen", "NCCL", "NPU", "privateuseone")),
        RuntimeError("MIOpen failed to find a kernel"), RuntimeError("the XPU backend ended"))  # fmt: skip


@pytest.mark.parametrize("error", SHAPES, ids=repr)
def test_errors_of_shapes_may_be_of_fewer_tokens(error):
    assert faults.may_be_of_fewer_tokens(error)


@pytest.mark.parametrize("error", PASS, ids=repr)
def test_errors_of_hosts_memory_and_devices_pass_even_if_our_code_raised_them(error):
    assert not faults.may_be_of_fewer_tokens(error)
    assert not faults.is_ours(raised_in(faults.__file__, error))


def raised_in(path: str, error: BaseException) -> BaseException:
    """Raise and catch an error in code that seems to stand in the file at `path`."""
    try:
        exec(compile("def run(error):\n    raise error\n\nrun(error)", path, "exec"), {"error": error})
    except BaseException as caught:
        return caught


def test_an_error_is_ours_where_our_own_code_raised_it():
    assert faults.is_ours(raised_in(faults.__file__, AttributeError("x")))
    assert not faults.is_ours(raised_in(torch.__file__, AttributeError("x")))
    assert not faults.is_ours(raised_in(faults.__file__, faults.DeliberateError("x")))
    assert not faults.is_ours(AttributeError("never raised"))


def test_code_in_a_hosts_own_folder_is_ours_and_beside_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "_OURS", faults._OURS.copy())
    inside, beside = (str(tmp_path / folder / "a.py") for folder in ("own", "own_of_others"))
    assert not faults.is_ours(raised_in(inside, AttributeError("x")))
    faults.add_own_folder(str(tmp_path / "own"))
    assert faults.is_ours(raised_in(inside, AttributeError("x")))
    assert not faults.is_ours(raised_in(beside, AttributeError("x")))


def test_each_kind_of_mistake_is_logged_once(caplog):
    for text in ("a mistake", "a mistake", "another"):
        assert faults.is_ours(raised_in(faults.__file__, AttributeError(text)))
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["a mistake", "another"]
    assert "report" in caplog.text and "AttributeError: a mistake" in caplog.text


def test_an_errors_text_is_one_short_line():
    assert faults.text_of(ValueError("one\n  two")) == "ValueError: one two"
    assert faults.text_of(ValueError("x" * 99)) == f"ValueError: {'x' * 80}"


def test_books_are_kept_quietly_but_errors_of_others_pass():
    def fail(path: str, error: Exception) -> None:
        raise raised_in(path, error)

    faults.quietly(fail, faults.__file__, AttributeError("x"))
    with pytest.raises(Interrupted):
        faults.quietly(fail, torch.__file__, Interrupted())
    with pytest.raises(AttributeError):
        faults.quietly(fail, torch.__file__, AttributeError("x"))


def replace_attention(model: torch.nn.Module) -> None:
    attention = find_blocks(model)[0].block.attn1
    attention.forward = lambda *args, **kwargs: type(attention).forward(attention, *args, **kwargs)


def replace_transformer(model: torch.nn.Module) -> None:
    find_blocks(model)[0].transformer.forward = lambda x, *args, **kwargs: (x,)


@torch.no_grad()
@pytest.mark.parametrize("replace", [replace_attention, replace_transformer])
def test_a_mistake_while_missed_attentions_are_counted_costs_no_picture(replace):
    model = sd15()
    with tome_core.patch(model, MergeConfig(ratio=0.5, use_rand=False)):
        replace(model)
        expected = MODELS["sd15"].call(model)
        with failing(sites.count_missed):
            assert torch.equal(MODELS["sd15"].call(model), expected)


def test_errors_of_others_pass_out_of_the_beginning_of_a_call(monkeypatch):
    def interrupt(*_: object) -> None:
        raise Interrupted

    monkeypatch.setattr("tome_core.engine.state.State.begin", interrupt)
    with tome_core.patch(model := sd15(), MergeConfig(ratio=0.5)), pytest.raises(Interrupted):
        MODELS["sd15"].call(model)


CONFIGS = {"balanced": tome_core.strength(0.5, "sdxl"), "blocks": MergeConfig(rules=(MergeRule(
    merge_attn=False, merge_blocks=True, ratio=0.75, use_rand=False, min_downsample=4),)),
    "tomesd": MergeConfig(ratio=0.5, proportional=False, merge_crossattn=True, merge_mlp=True)}  # fmt: skip
CASES = some_quick([("blocks", "sdxl"), ("tomesd", "small"), ("balanced", "sdxl"), ("tomesd", "sdxl")], 2)


def drawing(config: str, name: str) -> Callable[[], torch.Tensor]:
    model = {"sdxl": sdxl, "small": small}[name]()
    (x, text) = inputs(4, 2, 16, 16)
    rules = tuple(MergeRule(**{**vars(rule), "only_if_it_pays": False}) for rule in CONFIGS[config].rules)
    tome_core.patch(model, MergeConfig(rules=rules), host_clock=True)
    return lambda: MODELS["sdxl" if name == "sdxl" else "sd15"].forward(model, x, 400, text)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_function_of_ours_that_fails_in_a_call_costs_the_picture(case):
    config, name = case
    merged, tried = drawing(config, name)(), 0
    for function in functions_in(drawing(config, name)):
        run = drawing(config, name)
        with failing(function):
            out = run()
        tried += 1
        assert out.shape == merged.shape and out.isfinite().all(), function.__name__
    assert tried > 25
