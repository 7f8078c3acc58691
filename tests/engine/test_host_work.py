"""The CPU work of merging, for which a fast GPU waits: calls of our functions, and operators."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count

import pytest
import torch

import tome_core
from tests.small_models.sd_block import SpatialTransformer, UNet
from tests.small_models.unets import SDXL, inputs, seeded, unet
from tests.watching.calls import functions_called
from tests.watching.operators import OperatorCounter
from tome_core import MergeConfig, patch

UNMERGED, KEPT, CLOSED, OFF = "unmerged", "kept", "left alone", "switched off"
MOST_CALLS = {KEPT: 17, CLOSED: 12, OFF: 8}  # calls of our functions, by one block and its transformer
SETTINGS = {"side": "kv", "metric": "keys+values", "refine": 1, "keep": 100.0, "ratio": 0.9375, "sx": 4, "sy": 4,
            "use_rand": False}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


def make_run(case: str, blocks: int = 1) -> Callable[[], torch.Tensor]:
    """A warmed-up function that runs one step of a picture by a UNet of so many blocks."""
    unet = UNet([[SpatialTransformer(16, 2, 16)] for _ in range(blocks)]).eval().requires_grad_(False)
    inputs = torch.randn(1, 16, 8, 8).expand(2, -1, -1, -1), torch.full((2,), 500.0), torch.randn(2, 8, 16)
    handle, timesteps = None, count(500, -1)
    if case != UNMERGED:
        handle = patch(unet, MergeConfig(**SETTINGS, only_if_it_pays=case == CLOSED), host_clock=True)

    def run() -> torch.Tensor:
        if handle is not None:
            handle.set_time(timestep=next(timesteps), sampling="picture")
        with handle.unmerged() if case == OFF else nullcontext():
            return unet(*inputs)

    for _ in range(4):
        run()
    return run


@pytest.mark.parametrize("case", MOST_CALLS)
def test_a_kept_merge_calls_few_functions_puts_nothing_on_and_passes_through_a_block_left_alone(case):
    """Calls of one block and its transformer, with setting the time: a UNet of two blocks minus a UNet of one."""
    of_two, of_one = (functions_called(make_run(case, blocks), tome_core) for blocks in (2, 1))
    calls = of_two - of_one
    assert 0 < calls.total() <= MOST_CALLS[case], calls.most_common()
    assert ("merge_pair" in calls) == (case == KEPT)
    assert not {"install", "uninstall", "put_on", "take_off"} & set(of_two)


def test_a_block_that_is_left_alone_or_switched_off_runs_no_other_operators():
    counts = {}
    for case in (UNMERGED, CLOSED, OFF):
        run = make_run(case)
        with OperatorCounter() as counter:
            run()
        counts[case] = counter.by_name
    assert counts[OFF] == counts[UNMERGED]
    assert counts[CLOSED] - counts[UNMERGED] == {"transpose": 3}, "views with which the attention function is asked"


def test_merging_as_tomesd_draws_destinations_once_for_all_blocks_of_a_level_and_has_no_slow_maximum():
    """A UNet of two blocks minus a UNet of one."""
    counts = []
    for blocks in (2, 1):
        unet = UNet([[SpatialTransformer(16, 2, 16)] for _ in range(blocks)]).eval().requires_grad_(False)
        with patch(unet, MergeConfig(ratio=0.5, proportional=False)), OperatorCounter() as counter:
            unet(torch.randn(2, 16, 8, 8), torch.full((2,), 500.0), torch.randn(2, 8, 16))
        counts.append(counter.by_name)
    assert counts[1]["remainder"] and counts[1]["bmm"], "they are drawn, and compared"
    of_a_block = counts[0] - counts[1]
    assert of_a_block["bmm"] == 1 and not of_a_block["remainder"] and not of_a_block["max"]


DEEP = {**SDXL, "block_out_channels": (8, 16, 16), "attention_head_dim": (1, 2, 2), "layers_per_block": 2}
MOST_IN_SDXL, MOST_IN_A_MERGED_BLOCK = 1500, 20


def calls_of_sdxl(depth: int) -> Counter[str]:
    """Calls of ours in one kept call of SDXL's layout, with so many blocks in each of its coarsest transformers."""
    model = seeded(unet, **{**DEEP, "transformer_layers_per_block": (1, 2, depth)})()
    x, text = inputs(4, 2, 32, 32)
    added = {"text_embeds": text[:, 0, :16], "time_ids": torch.arange(6.0).expand(2, -1)}
    with patch(model, strength=0.5, only_if_it_pays=False, host_clock=True) as handle:

        def run(timestep: int = 470) -> None:
            handle.set_time(timestep=timestep, sampling="picture")
            model(x, timestep, text, added_cond_kwargs=added)

        for timestep in (500, 490, 480):
            run(timestep)
        called = functions_called(run, tome_core)
        assert handle.report().levels[1].block_tokens == ((64, 13),)
    return called


def test_a_kept_call_of_sdxls_seventy_blocks_calls_few_functions_also_to_ask_what_may_need_every_token():
    of_ten = calls_of_sdxl(10)
    assert of_ten.total() <= MOST_IN_SDXL, of_ten.most_common()
    more = of_ten - calls_of_sdxl(9)  # one more merged block in each of six transformers
    assert 0 < more.total() <= 6 * MOST_IN_A_MERGED_BLOCK, more.most_common()
