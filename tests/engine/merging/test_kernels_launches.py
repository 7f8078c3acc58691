"""How many kernels a merged block launches beyond the unmerged one, on a GPU with Triton: counted here on the CPU."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import tome_core
from tests.small_models.sd_block import SpatialTransformer, UNet
from tests.watching.operators import OperatorCounter
from tome_core.merging import kernels
from tome_core.merging.kernels.proof import _CHECKS

# These launch no kernel: views, memory that is not filled, and fetching a number.
NO_LAUNCH = {"_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal",
             "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "new_empty", "permute", "reshape",
             "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze",
             "view"}  # fmt: skip
# These launch several: a sort in segments of up to 4,096, and operators that copy first.
LAUNCHES = {"sort": 4, "masked_fill": 2, "scatter": 2, "constant_pad_nd": 2}
# Outputs of kernels that hold numbers of groups or tokens, which have to be valid.
NUMBERS = {"best_keys": (5,), "mean_rows": (2, 3), "assign_groups": (5,)}


@pytest.fixture
def launches(monkeypatch) -> Counter[str]:
    """Launches by operator or kernel. Attention counts as one, however this CPU computes it."""
    counted = Counter()

    def as_one(name, function):
        def launch(*args, **kwargs):
            before = counted.copy()
            out = function(*args, **kwargs)
            counted.clear()
            counted.update(before, **{name: 1})
            return out

        return launch

    def double(name):
        def fill(*arguments):
            is_given = name == "mean_rows" and arguments[9] is None  # order and offsets, which others use too
            for place in () if is_given else NUMBERS.get(name, ()):
                arguments[place].zero_()

        return as_one(name, fill)

    replaced = {"DEVICES": ("cpu",), "_is_loaded": True, "_give_up": lambda name, why: pytest.fail(f"{name}: {why}"),
                "_kernels": SimpleNamespace(**{name: double(name) for name in _CHECKS}), "find_fault": lambda *_: ""}
    for name, value in replaced.items():
        monkeypatch.setattr(kernels, name, value)
    attention = as_one("attention", torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    return counted


class Launches(OperatorCounter):
    """A context in which each operator counts as its number of launches."""

    def note(self, func, met) -> None:
        name = func.overloadpacket.__name__
        if name not in NO_LAUNCH:
            self.by_name[name] += LAUNCHES.get(name, 1)


# in one sampling: the first call makes a match, the next is within 60 timesteps of it, the third is not
EARLY, LATE = (950.0, 940.0, 850.0), (300.0, 299.0, 200.0)


@pytest.mark.parametrize("preset, times, bounds", [
    ("balanced", EARLY, (13, 2, 7)),  # two of a first call check whether the batch is two times one latent
    pytest.param("balanced", LATE, (10, 2, 8), marks=pytest.mark.slow),
    ("max", LATE, (15, 2, 7)),
], ids=str)  # fmt: skip
def test_a_match_new_kept_and_renewed_costs_so_many_launches(preset, times, bounds, launches):
    """The block has 64 x 64 tokens, and both halves of guidance share one match. Channels cost no launches."""
    model = UNet([[SpatialTransformer(40, 1, 8)]]).to(torch.bfloat16).requires_grad_(False)
    inputs = torch.randn(1, 40, 64, 64).bfloat16().repeat(2, 1, 1, 1), None, torch.randn(2, 77, 8).bfloat16()

    def count() -> Counter[str]:
        launches.clear()
        with Launches() as operators:
            operators.by_name = launches
            model(*inputs)
        return launches.copy()

    counts = []
    with torch.no_grad():  # in inference mode some operators arrive in pieces
        model(*inputs)
        alone = count()
        with tome_core.patch(model, preset, host_clock=True) as handle:
            for sampling in range(2):  # the first sampling makes constants for all pictures
                for time in times:
                    handle.set_time(timestep=time, sampling=sampling, pictures=1)
                    counts.append(count())
                    counts[-1].subtract(alone)
    assert tuple(counted.total() for counted in counts[3:]) == bounds, counts
    assert counts[4]["mean_rows"] == 1 and not {"sort", "best_keys", "ridge"} & set(+counts[4])
