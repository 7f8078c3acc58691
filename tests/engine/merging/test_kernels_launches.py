"""How many kernels a merged block launches on a GPU with Triton, beyond those of the unmerged block.

Counted here on the CPU: the engine is told that its kernels serve the CPU, doubles stand for them that compute nothing,
and every operator that would be a launch counts. A number that grows is a regression for everyone whose GPU waits for
its host; one that falls is written down here.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import tome_core
from benchmarks.sd_block import SpatialTransformer, UNet
from tests.kernel_harness import NAMES
from tests.operators import OperatorCounter
from tome_core.merging import kernels

# What makes no kernel: views, memory that is not filled, and fetching a number.
NO_LAUNCH = {
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "empty",
    "empty_like", "empty_strided", "expand", "lift_fresh", "new_empty", "permute", "reshape", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
# What makes several: a sort in segments of up to 4,096, and operators that copy first.
LAUNCHES = {"sort": 4, "masked_fill": 2, "scatter": 2, "constant_pad_nd": 2}
# Outputs of kernels that number groups or tokens: they have to be some that there are.
NUMBERS = {"best_keys": (5,), "segments": (1, 2), "place_tokens": (5,)}


class Launches(OperatorCounter):
    """Inside it launches are counted, by operator or kernel."""

    inside = False

    def note(self, func, met) -> None:
        name = func.overloadpacket.__name__
        if not self.inside and name not in NO_LAUNCH:
            self.by_name[name] += LAUNCHES.get(name, 1)

    def of_one(self, name, function):
        """The function, all of which is one launch of this name."""

        def launch(*args, **kwargs):
            self.by_name[name] += 1
            self.inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self.inside = False

        return launch


@pytest.fixture
def launches(monkeypatch) -> Launches:
    """The engine's kernels are there, and attention is one launch whatever this CPU makes of it."""
    counted = Launches()

    def double(name):
        return counted.of_one(name, lambda *outputs: [outputs[place].zero_() for place in NUMBERS.get(name, ())])

    replaced = {"DEVICES": ("cpu",), "_asked": True, "_give_up": lambda name, why: pytest.fail(f"{name}: {why}"),
                "_kernels": SimpleNamespace(**{name: double(name) for name in NAMES}),
                "find_fault": lambda *_: ""}  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(kernels, name, value)
    attention = counted.of_one("attention", torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    return counted


def more_than_unmerged(launches, width, depth, settings, times) -> list[dict[str, int]]:
    """Launches of a transformer's call at each of these times, one after the other in one sampling, beyond those of the
    model alone: on 64 x 64 tokens, for the halves of guidance, which share one match. Channels cost no launches.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = UNet([[SpatialTransformer(width, 1, 8, depth)]]).to(torch.bfloat16).requires_grad_(False)
        inputs = torch.randn(1, width, 64, 64).bfloat16().repeat(2, 1, 1, 1), None, torch.randn(2, 77, 8).bfloat16()

    def count() -> Counter[str]:
        launches.by_name = Counter()
        with launches:
            model(*inputs)
        return launches.by_name

    found = []
    with torch.no_grad():  # in inference mode some operators come by in pieces, some do not
        model(*inputs)
        alone = count()
        with tome_core.patch(model, settings, host_clock=True) as handle:
            for time in (*times, *times):  # in the first round what stays the same for all pictures is made
                handle.set_time(timestep=time, sampling=len(found) // len(times), pictures=1)
                merged = count()
                found.append({name: more for name in sorted(merged | alone) if (more := merged[name] - alone[name])})
    return found[len(times) :]


# in one sampling: the first call matches anew, the next is within 60 timesteps of it, the third is not
EARLY, LATE = (950.0, 940.0, 850.0), (300.0, 299.0, 200.0)
BOUNDS = {  # two of a sampling's first call are the look whether its batch is two times the same latent
    ("balanced", EARLY): (26, 2, 18),
    ("balanced", LATE): (21, 2, 19),
    ("fast", LATE): (26, 2, 19),
    ("max", LATE): (29, 2, 18),
}


@pytest.mark.parametrize("preset, times", BOUNDS, ids=str)
def test_a_match_new_kept_and_renewed_costs_so_many_launches(preset, times, launches):
    found = more_than_unmerged(launches, 40, 1, preset, times)
    assert [sum(one.values()) for one in found] == list(BOUNDS[preset, times]), found
    assert found[1].get("mean_rows") == 1 and not {"sort", "best_keys", "segments", "ridge"} & set(found[1])


def test_blocks_of_one_transformer_each_match_for_themselves_and_no_more(launches):
    """SDXL's transformers have up to ten blocks."""
    new, kept, renewed = more_than_unmerged(launches, 64, 3, "balanced", EARLY)
    for found, searches in ((new, 3), (renewed, 1)):
        assert found["best_keys"] == found["segments"] == 3 * searches and found["ridge"] == 3
    assert "best_keys" not in kept and kept["mean_rows"] == kept["correct"] == 3
