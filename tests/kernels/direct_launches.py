"""Laws of direct launches, without a GPU: Triton compiles for one that is not here, and its launcher takes notes.

Not with ``TRITON_INTERPRET=1``, for the interpreter compiles nothing.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.kernels.compiled_code import launch_all
from tome_core.merging import kernels
from tome_core.merging.kernels import triton_kernels_direct as direct

ARCHITECTURES = {"cuda": GPUTarget("cuda", 80, 32), "hip": GPUTarget("hip", "gfx1100", 32)}
MEMORY = torch.zeros(4096)


@triton.jit
def _add(x, y, to, count, stride, scale, WIDTH: tl.constexpr):
    place = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + place.to(tl.int64) * stride, mask=place < count, other=0).to(tl.float32) * scale
    if y is not None:
        value += tl.load(y + place, mask=place < count, other=0).to(tl.float32)
    tl.store(to + place, value, mask=place < count)


class Launcher:
    """In place of Triton's: it notes each launch with itself, one for each variant."""

    notes: list

    def __init__(self, src, metadata):
        pass

    def __call__(self, *given):
        grid, (stream, function, packed, _, enter, leave), arguments = given[:3], given[3:9], given[9:]
        places = [each.data_ptr() if hasattr(each, "data_ptr") else each for each in arguments]
        self.notes.append(([self, *grid, stream, function, packed, *map(repr, places)], (enter, leave)))


def pretend(launcher, target=ARCHITECTURES["cuda"], stream=lambda _: 0):
    """Let Triton compile for a GPU that is not here, and launch by this class."""
    loaded = (1, 2, 32, 0, 1024)[: 5 if hasattr(triton, "knobs") else 4]  # Triton before 3.4 has no last one
    utils = SimpleNamespace(load_binary=lambda *_: loaded, unload_module=lambda *_: None,
                            get_device_properties=lambda _: {"max_shared_mem": 2**18})  # fmt: skip
    driver.set_active(SimpleNamespace(get_current_device=lambda: 0, get_current_stream=stream, utils=utils,
                                      get_current_target=lambda: target, launcher_cls=launcher))  # fmt: skip


@pytest.fixture
def launched(request, monkeypatch):
    """Launches by now: what each launcher got, and hooks."""
    architecture = getattr(request, "param", "cuda")
    pretend(Launcher, ARCHITECTURES[architecture], lambda _: len(Launcher.notes))
    monkeypatch.setattr(Launcher, "notes", [], raising=False)
    monkeypatch.setattr(direct, "_COUNTS_SIZES", architecture == "hip")
    monkeypatch.setattr(direct, "why_off", "")
    return Launcher.notes


@pytest.fixture
def by_triton(monkeypatch):
    """The names of the kernels for which Triton was called."""
    calls, run = [], JITFunction.run

    def noted(self, *args, **more):
        calls.append(self.__name__)
        return run(self, *args, **more)

    monkeypatch.setattr(JITFunction, "run", noted)
    return calls


def fail(*_):
    raise MemoryError


def fresh():
    """A direct kernel without variants, and without those that another test's target compiled."""
    return direct.direct(triton.jit(_add.fn))


def at(offset, dtype=torch.float32, memory=MEMORY):
    """Eight numbers that start so many bytes after an address that 16 divides."""
    return memory.view(torch.int8)[offset : offset + 32].view(dtype)


ALIGNED = at(0), at(64), at(128)
USUAL = {"x": ALIGNED[0], "y": ALIGNED[1], "to": ALIGNED[2], "count": 48, "stride": 32, "scale": 0.5,
         "WIDTH": 16, "num_warps": 1}  # fmt: skip
# what Triton specialises on, one after the other, and what it does not
OTHERS = [{"x": at(4)}, {"x": at(8), "y": at(4)}, {"to": at(8)}, {"x": at(0, torch.float16)},
          {"x": at(2, torch.float16)}, {"x": at(0, torch.int32)}, {"y": None}, {"y": at(64, torch.bfloat16)},
          {"to": at(128, torch.float16)}, {"count": 1}, {"count": 47}, {"count": 0}, {"count": -16}, {"stride": 1},
          {"stride": 2}, {"stride": 2**31}, {"stride": 2**31 + 1}, {"stride": 2**31 - 1}, {"stride": True},
          {"scale": 1}, {"scale": 1.0}, {"scale": True}, {"scale": 16}, {"scale": 2.0}, {"WIDTH": 32},
          {"num_warps": 2}, {"x": at(1024)}, {"x": at(0), "y": at(0)}]  # fmt: skip


def launch(kernel, grid=(3,), **others):
    x, y, to, count, stride, scale, *constants = (USUAL | others).values()
    kernel[grid](x, y, to, count, stride, scale, **dict(zip(("WIDTH", "num_warps"), constants, strict=True)))
    return Launcher.notes[-1][0]


def alike(one, other):
    """Whether two launches are of the same variant, with the same arguments; they are on the stream of their number."""
    return one[0] is other[0] and one[1:4] + one[5:] == other[1:4] + other[5:]


@pytest.mark.parametrize("launched", ARCHITECTURES, indirect=True)
def test_a_launch_is_as_triton_launches(launched, by_triton):
    kernel, large = fresh(), torch.empty(2**29 + 64)
    cases = [{}, *OTHERS, {"x": at(0, memory=large)}]
    wanted = [launch(kernel.kernel, **case) for case in cases]
    assert len({id(note[0]) for note in wanted}) > 15 and not kernel.variants
    for _ in range(2):
        by_triton.clear()
        for number, case in enumerate(cases):
            note = launch(kernel, (5, 2) if number % 2 else (3,), **case)
            assert alike([note[0], 3, 1, *note[3:]], wanted[number]), case
            assert note[1:5] == [*((5, 2, 1) if number % 2 else (3, 1, 1)), len(launched) - 1], "grid and stream"
    assert not by_triton, "variants that are known"


def test_a_tensor_on_another_device_is_shown_to_triton(launched, by_triton):
    kernel = fresh()
    elsewhere = SimpleNamespace(data_ptr=ALIGNED[0].data_ptr, dtype=torch.float32, get_device=lambda: 1)  # else alike
    for case in ({}, {"x": elsewhere}):
        by_triton.clear()
        launch(kernel, **case)
        assert by_triton


def test_every_kernel_is_launched_directly_and_as_triton_launches(launched, by_triton, monkeypatch):
    for name, value in {"DEVICES": ("cpu",), "_proves_itself": lambda *_: True, "_give_up": fail}.items():
        monkeypatch.setattr(kernels, name, value)
    launch_all(torch.float16)
    count = len(launched)
    by_triton.clear()
    launch_all(torch.float16)
    assert len(launched) == 2 * count and not by_triton
    monkeypatch.setattr(direct, "why_off", "to compare")
    launch_all(torch.float16)
    assert len(by_triton) == count
    for notes in zip(launched[:count], launched[count : 2 * count], launched[2 * count :], strict=True):
        first, again, plain = (note[0] for note in notes)
        assert first[0] is again[0] is plain[0] and first[1:4] == again[1:4] == plain[1:4]
        assert len(first) == len(again) == len(plain)  # tensors are new, so addresses differ


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profilers_hook_sees_every_launch(name, launched, by_triton, monkeypatch):
    kernel, chain = fresh(), getattr(direct._hooks, name)
    launch(kernel)
    by_triton.clear()
    with monkeypatch.context() as watched:
        if chain is None:  # Triton before 3.5
            watched.setattr(direct._hooks, name, print)
        else:
            watched.setattr(chain, "calls", [print])
        launch(kernel)
        launch(kernel)
        assert len(by_triton) == 2
        assert launched[-1][1] == (direct._hooks.launch_enter_hook, direct._hooks.launch_exit_hook)
    launch(kernel)
    assert len(by_triton) == 2


def test_a_hook_on_the_kernel_itself_sees_every_launch(launched):
    kernel, seen = fresh(), []
    launch(kernel)
    kernel.kernel.pre_run_hooks.append(lambda *a, **more: seen.append(a))
    launch(kernel)
    assert len(seen) == 1


@pytest.mark.parametrize("why", ["a launcher that takes other arguments", "a backend that is not known"])
def test_what_is_not_as_known_is_launched_by_triton_and_it_is_said_once(why, launched, monkeypatch, caplog):
    kernel = fresh()
    if why == "a backend that is not known":
        monkeypatch.setattr(direct, "_BACKENDS", ())
    else:
        monkeypatch.setattr(direct, "_run", fail)
    with caplog.at_level(logging.DEBUG, direct.__name__):
        notes = [launch(kernel), launch(kernel), launch(fresh())]
    assert len(launched) == 3 and len(caplog.records) == 1 and notes[0][0] is notes[1][0]


def test_an_error_that_triton_has_too_is_raised_and_the_next_launch_is_direct(launched, monkeypatch, by_triton):
    kernel, call = fresh(), Launcher.__call__
    monkeypatch.setattr(Launcher, "__call__", fail)
    with pytest.raises(MemoryError):
        launch(kernel)
    monkeypatch.setattr(Launcher, "__call__", call)
    launch(kernel)
    by_triton.clear()
    launch(kernel)
    assert not by_triton and not direct.why_off


def test_variants_do_not_fill_memory(launched, monkeypatch):
    monkeypatch.setattr(direct, "_MOST", 3)
    kernel = fresh()
    for stride in range(2, 12):
        launch(kernel, stride=stride)
        assert len(kernel.variants) <= 3


def test_a_kernel_that_triton_does_not_compile_is_left_alone():
    kernel = SimpleNamespace()
    assert direct.direct(kernel) is kernel
