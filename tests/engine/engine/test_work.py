"""The work that the report tells is what torch counts, and merging that costs more than it saves does not happen."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import tome_core
from tests.small_models.families import MODELS, some_models
from tests.small_models.unets import on_small
from tome_core import MergeConfig
from tome_core.hosting import expected_share
from tome_core.models import weights
from tome_core.patching import curve_of
from tome_core.reporting.ledger import COSTS

WORDS = 7  # tokens of the tests' prompts


class Multiplications(TorchDispatchMode):
    """Counts the multiplications of all matrix products and convolutions, by torch's formulas."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        self.count += formula(*args, **(kwargs or {}), out_val=out) // 2 if formula else 0
        return out


def counted(run) -> int:
    with sdpa_kernel(SDPBackend.MATH), Multiplications() as counter:
        run()
    return counter.count


def wanted(model, strength: float = 0.5) -> MergeConfig:
    return replace(tome_core.strength(strength, curve_of(model)), only_if_it_pays=False)


@pytest.fixture(autouse=True)
def short_prompt(monkeypatch):
    monkeypatch.setattr(weights, "TEXT", WORDS)


@some_models("ldm_sd1", "ldm_sd2", "sd15", "sd2", "sdxl", "ip_adapter", "motion", "Flux", "Flux, a reference", "SD3.5",
             "Qwen-Image", "Wan", "Z-Image", "Lumina 2", "HunyuanVideo", "LTX", "Flux.2", "Chroma",
             "Mochi")  # fmt: skip
def test_the_work_without_and_with_merging_is_what_torch_counts(family):
    model = family.build()
    plain = counted(lambda: family.call(model))
    for strength in (0.25, 1.0):
        with tome_core.patch(model, wanted(model, strength)) as handle:
            merged = counted(lambda: family.call(model))
        full, left = handle.report().work
        assert full == pytest.approx(plain, rel=0.04) and left == pytest.approx(merged, rel=0.1)
        assert left - full == pytest.approx(merged - plain, rel=0.06, abs=0.01 * plain)


ALL_PARTS = {"merge_crossattn": True, "merge_mlp": True, "proportional": False, "use_rand": False}
BLOCKS = {"merge_attn": False, "merge_blocks": True, "metric": "input", "ratio": 0.75, "sx": 4, "sy": 4,
          "min_downsample": 1, "use_rand": False}  # fmt: skip


@pytest.mark.parametrize("settings, name", [(ALL_PARTS, "sd15"), (ALL_PARTS, "ldm_sd1"), (BLOCKS, "sdxl")])
def test_so_is_that_of_parts_and_of_whole_blocks(settings, name):
    family = MODELS[name]
    model = family.build()
    plain = counted(lambda: family.call(model))
    with tome_core.patch(model, MergeConfig(**settings)) as handle:
        merged = counted(lambda: family.call(model))
    full, left = handle.report().work
    assert merged < 0.98 * plain and full == pytest.approx(plain, rel=0.02)
    assert full - left == pytest.approx(plain - merged, rel=0.03)


def test_a_quantised_or_wrapped_layer_counts_as_the_layer_that_it_is():
    layer = torch.nn.Linear(64, 32)
    packed = torch.nn.Module()
    packed.in_features, packed.out_features = 64, 32
    wrapped = torch.nn.Module()
    wrapped.in_features, wrapped.out_features, wrapped.base_layer = 64, 32, layer
    assert weights.per_token(layer) == weights.per_token(packed) == weights.per_token(wrapped) == 64 * 32


@pytest.mark.pays
@pytest.mark.parametrize("ratio, merges", [(0.9, True), (0.05, False)])
def test_what_costs_more_than_it_saves_does_not_merge_and_says_so(ratio, merges):
    family = MODELS["ldm_sd1"]
    model = family.build()
    vanilla = family.call(model)
    with tome_core.patch(model, ratio=ratio, correction=False, use_rand=False) as handle:
        picture = family.call(model)
    report = handle.report()
    assert report.merged_anything == merges != torch.equal(picture, vanilla)
    assert merges or (report.headline == f"nothing merged: {COSTS}" and set(report.reasons) == {f"attn: {COSTS}"})


@pytest.mark.pays
@pytest.mark.parametrize("height, width, merges", [(16, 16, False), (16, 48, True)])
def test_a_part_alone_does_not_merge_if_the_match_is_more_work(height, width, merges, monkeypatch):
    from tome_core.engine import work

    rule = MergeConfig(merge_attn=False, merge_mlp=True).rules[0]
    grid = tome_core.hosting.Grid(height, width)
    monkeypatch.setattr(work, "of_match", lambda *args, **more: 1000)
    assert work.pays_in_part.__wrapped__(rule, grid, 4, 4) == merges


@pytest.mark.parametrize("name, strength", [("ldm_sd1", 0.5), ("sd15", 1.0), ("sdxl", 0.5), ("sdxl", 1.0)])
def test_what_is_expected_of_a_size_is_what_a_sampling_of_this_size_tells(name, strength):
    family = MODELS[name]
    model, steps = family.build(), 10
    config = wanted(model, strength)
    timesteps = [999 - 1000 * step / steps for step in range(steps)]
    with tome_core.patch(model, config) as handle, handle.sampling(2, timesteps), torch.no_grad():
        for timestep in timesteps:
            family.call(model, timestep=torch.tensor(timestep))
    expected = expected_share(model, config, 128, 128, steps)
    assert expected == pytest.approx(handle.report().work_saved, abs=0.01)


def test_nothing_is_expected_where_it_is_not_known():
    unet = MODELS["sd15"].build()
    assert expected_share(unet, MergeConfig(proportional=False), 128, 128) is None, "as tomesd merges"
    assert expected_share(MODELS["Flux"].build(), on_small("balanced"), 512, 512) is None
