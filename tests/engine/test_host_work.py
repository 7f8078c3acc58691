"""What merging gives the host to do: calls of our functions, changes of file, operators.

On a fast GPU a call of the UNet waits for Python and for operators that are dispatched. Times are nobody's law here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count, cycle

import pytest
import torch

from benchmarks import models
from tests.host_work import beyond, make_inputs, make_unet, watch
from tests.operators import VIEWS, OperatorCounter
from tome_core import MergeConfig, patch

# calls of our functions, and changes from file to file, of one block and its transformer; a reader follows each by hand
MOST_CALLS, MOST_CALLS_LEFT_ALONE, MOST_CALLS_SWITCHED_OFF, MOST_CHANGES = 17, 12, 8, 10
PUTTING_ON = {"install", "uninstall", "put_on", "take_off"}
KEEP = 100.0
SETTINGS = {"side": "kv", "metric": "keys+values", "refine": 1, "keep": KEEP, "ratio": 0.9375, "sx": 4, "sy": 4,
            "use_rand": False}  # fmt: skip
UNMERGED, KEPT, RENEWED, ANEW, CLOSED, OFF = "unmerged", "kept", "renewed", "anew", "left alone", "switched off"


def samplings_and_times(case: str) -> Iterator[tuple[object, float]]:
    """Before each call: steps of a picture that are closer together than a match is kept, steps that are not, or
    pictures."""
    if case == ANEW:
        return ((number, 500.0) for number in count())
    return cycle([("picture", 500.0), ("picture", 500.0 - KEEP - 1 if case == RENEWED else 499.0)])


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


def make_run(case: str, blocks: int = 1, correction: bool = True) -> Callable[[], torch.Tensor]:
    """One call of a UNet of so many blocks, as a host makes it, each time it is called; warmed up."""
    unet, inputs, told = make_unet(blocks), make_inputs(), samplings_and_times(case)
    handle = None
    if case != UNMERGED:
        config = MergeConfig(**SETTINGS, correction=correction, only_if_it_pays=case == CLOSED)
        handle = patch(unet, config, host_clock=True)

    def run() -> torch.Tensor:
        if handle is not None:
            sampling, timestep = next(told)
            handle.set_time(timestep=timestep, sampling=sampling)
        with handle.unmerged() if case == OFF else nullcontext():
            return unet(*inputs)

    for _ in range(4):
        run()
    return run


def operators(case: str, **more: bool) -> Counter:
    run = make_run(case, **more)
    with OperatorCounter() as counter:
        run()
    return counter.by_name


def kernels(case: str, **more: bool) -> Counter:
    """Operators that compute something."""
    return Counter({name: number for name, number in operators(case, **more).items() if name not in VIEWS})


@pytest.mark.parametrize("case, most", [
    (KEPT, MOST_CALLS), (CLOSED, MOST_CALLS_LEFT_ALONE), (OFF, MOST_CALLS_SWITCHED_OFF),
])  # fmt: skip
def test_a_kept_merge_is_a_short_way_through_few_files_and_a_block_left_alone_is_passed_through(case, most):
    """Of one block and its transformer: what a UNet of two calls beyond a UNet of one."""
    calls, changes = beyond(watch(make_run(case, 2)), watch(make_run(case, 1)))
    assert 0 < calls.total() <= most and changes <= MOST_CHANGES, calls.most_common()


def test_each_case_is_what_it_is_called():
    unmerged, closed, off = map(operators, (UNMERGED, CLOSED, OFF))
    assert off == unmerged and closed - unmerged == {"transpose": 3}, "views with which the attention function is asked"
    kept, renewed, anew = (kernels(case).total() for case in (KEPT, RENEWED, ANEW))
    assert kernels(UNMERGED).total() < kept < 2 * kept < renewed < anew


# Of one block beyond an unpatched one, without views: what a GPU would launch a kernel for, were none of them fused.
# Keys and values are each summed by three, the correction is three. With the correction, and without:
MOST_KERNELS = {KEPT: (9, 6), RENEWED: (86, 33), ANEW: (98, 45)}


@pytest.mark.parametrize("case", MOST_KERNELS)
def test_a_match_is_few_kernels(case):
    """Counted, so that one more is seen: whoever adds it says here what for."""
    for correction, most in zip((True, False), MOST_KERNELS[case], strict=True):
        found = kernels(case, correction=correction) - kernels(UNMERGED)
        assert found.total() <= most, found.most_common()


def called_in_a_step(name: str) -> list[list[str]]:
    """Our functions that are called in a step that runs the UNet, and in one that does not."""
    unet, inputs = models.make(name, "cpu", torch.float32, True), models.inputs(name, 512, "cpu", torch.float32, True)
    handle = patch(unet, "balanced", host_clock=True)

    def step(timestep: float, call: bool) -> None:
        handle.set_time(timestep=timestep, sampling="picture")
        with handle.unmerged():
            pass
        if call:
            unet(*inputs)

    step(500.0, True)
    return [watch(partial(step, 499.0, True)), watch(partial(step, 498.0, False))]


def test_a_step_puts_nothing_on_and_tells_the_time_without_a_look_at_the_blocks():
    sizes = set()
    for name in models.SHAPES:
        whole, outside = called_in_a_step(name)
        assert not PUTTING_ON & {name.rpartition(".")[2] for name in whole}
        sizes.add(len(outside))
    assert len(sizes) == 1, "what is done before a call does not grow with the UNet"
