"""The roofline of the speed benchmark: what it counts is what is computed, and no call can be quicker."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tome_core
from benchmarks.speed_costs import Rates, roofline
from benchmarks.speed_measure import measure_rates
from benchmarks.speed_models import TINY_SHAPES, make_inputs, make_unet
from benchmarks.speed_report import table
from benchmarks.speed_summary import summaries
from benchmarks.speed_variants import CONTROL, IDEAL
from tests.speed_records import synthetic

EVEN = Rates(1.0, 1e30)  # seconds are operations, and bytes cost nothing


def product(rows, inner, columns):
    return lambda: torch.ones(rows, inner) @ torch.ones(inner, columns)


@pytest.mark.parametrize("inference", [True, False])
def test_a_product_takes_its_operations_or_its_bytes_whichever_is_longer(inference):
    run, operations, moved = product(3, 5, 7), 2 * 3 * 5 * 7, 4 * (3 * 5 + 5 * 7 + 3 * 7)
    with torch.inference_mode(inference):
        assert roofline(run, Rates(1.0, 1e9)) == (operations, moved, operations)
        assert roofline(run, Rates(1e9, 1.0)) == (operations, moved, moved)


def test_every_product_has_its_own_limit():
    """One is limited by what it computes, one by what it moves: no overlap is counted on."""

    def both():
        product(64, 64, 64)()
        product(1, 4096, 1)()

    parts = [roofline(product(*sides), Rates(8.0, 1.0)) for sides in ((64, 64, 64), (1, 4096, 1))]
    assert parts[0].seconds == parts[0].operations / 8 and parts[1].seconds == parts[1].bytes
    assert roofline(both, Rates(8.0, 1.0)).seconds == parts[0].seconds + parts[1].seconds


def test_what_is_no_product_is_free():
    x = torch.randn(64, 64)
    assert roofline(lambda: F.layer_norm(x.relu().softmax(-1) + x.sort().values, (64,)), EVEN) == (0, 0, 0)


def test_what_is_expanded_is_moved_once():
    assert roofline(lambda: torch.ones(1, 3, 5).expand(4, 3, 5).bmm(torch.ones(4, 5, 7)), EVEN).bytes == 4 * (
        3 * 5 + 4 * 5 * 7 + 4 * 3 * 7
    )


@pytest.mark.slow
@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("naive", [True, False])
@pytest.mark.parametrize("model", sorted(TINY_SHAPES))
def test_operations_are_those_that_torch_counts(model, naive, inference):
    """In inference mode operators arrive whole, otherwise in parts."""
    def call(device):
        unet = make_unet(TINY_SHAPES[model], "cpu", torch.float32).to(device)
        if naive:
            unet.set_attn_processor(AttnProcessor())
        positional, named = make_inputs(TINY_SHAPES[model], 512, 2, device, torch.float32)
        return lambda: unet(*positional, **named)

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call("meta")()  # of a CPU's own attention kernel it knows nothing
    with torch.inference_mode() if inference else torch.no_grad():
        assert roofline(call("cpu"), EVEN).operations == counter.get_total_flops() > 0


def test_merged_keys_lower_the_bound_and_a_match_raises_it():
    block, (x, *rest) = _block()
    config = tome_core.MergeConfig(side="kv", ratio=0.75, use_rand=False, keep=100.0)
    with torch.inference_mode():
        unmerged = roofline(lambda: block(x, *rest), EVEN).operations
        with tome_core.patch(block, config) as handle:
            handle.set_time(timestep=500.0, sampling="a")
            new = roofline(lambda: block(x, *rest), EVEN).operations
            handle.set_time(timestep=490.0, sampling="a")
            kept = roofline(lambda: block(x, *rest), EVEN).operations
    assert kept < new and kept < unmerged


def _block() -> tuple[nn.Module, tuple]:
    from benchmarks.sd_block import make_block, make_inputs

    return make_block(), tuple(make_inputs(32, 2, "cpu", torch.float32))


def test_rates_are_those_of_the_device():
    rates = measure_rates("cpu", torch.float32)
    assert 1e8 < rates.operations < 1e14 and 1e7 < rates.bytes < 1e13


def test_the_table_states_both_bounds_and_by_which_rates():
    record = synthetic(**{CONTROL: [10.0], "tomesd": [6.0], IDEAL: [5.0]})
    case = record["rows"][0]["case"]
    bounds = {name: {"operations": 1, "bytes": 1, "seconds": s} for name, s in ((CONTROL, 4.0), ("tomesd", 2.0),
                                                                                 (IDEAL, 1.0))}  # fmt: skip
    record["rows"].append({"key": "x #costs", "case": case, "failed": {}, "roofline": bounds,
                           "rates": {"operations": 2e12, "bytes": 3e9}})  # fmt: skip
    (summary,) = summaries(record)
    assert summary.figures["tomesd"].bound == 2.0 and summary.figures["tomesd"].of_bound == pytest.approx(2 / 6)
    record |= {"device": {"name": "x", "kind": "cpu"}, "versions": {}, "created": "2026-01-01", "commit": "c",
               "command": "c", "missing": []}  # fmt: skip
    record["settings"] |= {"tiny_models": False, "dtype": "float32"}
    text = table([record])
    assert "2 TFLOP/s" in text and "3 GB/s" in text
    assert "unmerged 4.00 s, merged 2.00 s (tomesd)" in text and "2.00x as fast" in text
