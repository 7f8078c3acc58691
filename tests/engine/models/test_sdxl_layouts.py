"""Whole blocks in the layouts of SDXL's relatives, in few steps, and beside an adapter and controls."""

from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from torch import nn

import tome_core
from tests.small_models.dits import distance
from tests.small_models.least_pipeline import Pipeline
from tests.small_models.unets import SDXL, TEXT, inputs, merge_with_self, note_tokens, seeded, unet, with_ip_adapter
from tests.thoroughness import some_quick
from tome_core import MergeConfig
from tome_core.models.every_token import why_of_options
from tome_core.models.unet_blocks import find_blocks
from tome_core.settings.presets import rules_of_blocks

BALANCED = {"config": "balanced", "only_if_it_pays": False}
SIDE = 32  # of the latent


class Layout(NamedTuple):
    """A configuration beside SDXL's; (level, number of blocks) of each transformer as they run; a call's arguments."""

    changes: dict[str, Any]
    transformers: list[tuple[int, int]]
    more: Mapping[str, Any] = MappingProxyType({})


def kinds(*attends: bool) -> dict[str, tuple[str, ...]]:
    """Which levels have transformers, the finest first."""
    down = [f"{'CrossAttn' * each}DownBlock2D" for each in attends]
    return {"down_block_types": (*down,), "up_block_types": (*(kind.replace("Down", "Up") for kind in down[::-1]),)}


_DEPTHS, _REVERSED = "transformer_layers_per_block", "reverse_transformer_layers_per_block"
_OF_SDXL = [(2, 2)] * 2 + [(4, 10)] * 6 + [(2, 2)] * 3
_TWICE = {"layers_per_block": 2, _DEPTHS: [1, 2, 10]}
_PLAIN = {"layers_per_block": 2, "mid_block_type": "UNetMidBlock2D"}
_FOUR = {"block_out_channels": (16,) * 4, "attention_head_dim": 2}
LAYOUTS = {
    "SDXL": Layout(_TWICE, _OF_SDXL),
    "SSD-1B": Layout(_PLAIN | {_DEPTHS: [1, [2, 2], [4, 4]], _REVERSED: [[4, 4, 10], [2, 1, 1], 1]},
                     [(2, 2)] * 2 + [(4, 4)] * 4 + [(4, 10), (2, 2), (2, 1), (2, 1)]),
    "refiner": Layout(_FOUR | kinds(False, True, True, False) | {"layers_per_block": 2, _DEPTHS: 4},
                      [(2, 4)] * 2 + [(4, 4)] * 2 + [(8, 4)] + [(4, 4)] * 3 + [(2, 4)] * 3),
    "every depth": Layout(_PLAIN | {_DEPTHS: [1, [1, 3], [2, 1]], _REVERSED: [[1, 3, 1], [1, 2, 1], 1]},
                          [(2, 1), (2, 3), (4, 2), (4, 1), (4, 1), (4, 3), (4, 1), (2, 1), (2, 2), (2, 1)]),
    "SD2.1": Layout(_FOUR | kinds(True, True, True, False) | {_DEPTHS: 1},
                    [(1, 1), (2, 1), (4, 1), (8, 1)] + [(4, 1)] * 2 + [(2, 1)] * 2 + [(1, 1)] * 2),
    "stacks at the latent's size": Layout(kinds(True, True, True) | {_DEPTHS: 2}, [(1, 2), (2, 2)] + [(4, 2)] * 4
                                          + [(2, 2)] * 2 + [(1, 2)] * 2),
    "LCM": Layout(_TWICE | {"time_cond_proj_dim": 8}, _OF_SDXL, {"timestep_cond": torch.ones(2, 8)}),
    "inpainting": Layout(_TWICE | {"in_channels": 9}, _OF_SDXL),
    "Kolors": Layout(_TWICE | {"encoder_hid_dim": TEXT, "encoder_hid_dim_type": "text_proj",
                               "cross_attention_dim": 24}, _OF_SDXL),
    "Segmind-Vega": Layout(_PLAIN | {_DEPTHS: [1, 1, 2]}, [(2, 1)] * 2 + [(4, 2)] * 5 + [(2, 1)] * 3),
    "KOALA-700M": Layout({"mid_block_type": None, _DEPTHS: [1, 2, 5]}, [(2, 2)] + [(4, 5)] * 3 + [(2, 2)] * 2),
    "the middle alone": Layout(kinds(False, False, False) | {_DEPTHS: [1, 1, 3]}, [(4, 3)]),
}  # fmt: skip


def draw(model: nn.Module, timestep: Any = 500, keep: Any = attrgetter("sample"), **more: Any) -> Any:
    x, text = inputs(model.config.in_channels, 2, SIDE, SIDE)
    added = {"text_embeds": text[:, 0, :16], "time_ids": torch.arange(6.0).expand(2, -1),
             "image_embeds": [text[:, :1, :16]]}  # fmt: skip
    with torch.no_grad():
        return keep(model(x, timestep, text, added_cond_kwargs=added, **more))


@pytest.mark.parametrize("name", some_quick(LAYOUTS, 6))
def test_all_blocks_but_a_transformers_first_merge_from_a_quarter_of_the_latent_down(name: str, monkeypatch):
    layout = LAYOUTS[name]
    model, counts, expected, blocks = seeded(unet, **SDXL | layout.changes)(), [], [], {}
    plain, is_sd = draw(model, **layout.more), layout.transformers[0][0] == 1  # SD's strengths merge attention alone
    for place in find_blocks(model):
        note_tokens(place.block.ff, counts)
    with tome_core.patch(model, **BALANCED) as handle:
        merged = draw(model, **layout.more)
        fewer = dict(handle.report().block_tokens)
        assert all(left <= tokens / 3 for tokens, left in fewer.items())
        for down, depth in layout.transformers:
            tokens = (SIDE // down) ** 2
            expected += [tokens] + [tokens if down < 4 or is_sd else fewer[tokens]] * (depth - 1)
            blocks[down] = blocks.get(down, 0) + (depth - 1) * (down >= 4 and not is_sd)
        assert counts == expected and handle.adapter.curve == ("sd" if is_sd else "sdxl")
        assert handle.report().merged_anything and not torch.equal(merged, plain)
        assert {level.downsample: sum(number for (part, *_), number in level.merged.items() if part == "block")
                for level in handle.report().levels} == blocks
        merge_with_self(monkeypatch)
        assert distance(draw(model, **layout.more), plain) < 1e-4, "every token its own group"
    assert torch.equal(draw(model, **layout.more), plain)
    with tome_core.patch(model, strength=0.0):
        assert torch.equal(draw(model, **layout.more), plain)


SCHEDULE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
TRAILING = {**SCHEDULE, "timestep_spacing": "trailing"}
ZERO_SNR = {**TRAILING, "prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
ONE_TO_EIGHT = {1: 0, 2: 1, 4: 3, 8: 6}


@pytest.mark.parametrize("name, settings, merged", [
    ("LCM", SCHEDULE, ONE_TO_EIGHT), ("TCD", SCHEDULE, ONE_TO_EIGHT), ("EulerDiscrete", TRAILING, ONE_TO_EIGHT),
    ("EulerAncestralDiscrete", TRAILING, ONE_TO_EIGHT), ("DDIM", TRAILING, ONE_TO_EIGHT),
    ("EulerDiscrete", {**SCHEDULE, "steps_offset": 1, "timestep_spacing": "leading"}, {4: 4, 8: 7, 20: 16}),
    ("EulerDiscrete", ZERO_SNR, {1: 0, 2: 1, 4: 2, 8: 5, 20: 14}),
    ("EulerDiscrete", {**SCHEDULE, "beta_end": 0.014, "num_train_timesteps": 1100, "steps_offset": 1,
                       "timestep_spacing": "leading"}, {4: 3, 8: 6, 20: 14}),
    ("EDMDPMSolverMultistep", {}, {1: 0, 2: 1, 4: 2, 8: 4, 20: 10})])  # fmt: skip
def test_whole_blocks_merge_below_their_noise_with_the_schedulers_of_distilled_and_other_models(name, settings, merged):
    """Lightning and Turbo have trailing steps, Hyper DDIM's or TCD's; then NoobAI, Kolors, Playground 2.5."""
    pipe = Pipeline(getattr(diffusers, f"{name}Scheduler")(**settings))
    pipe.unet, latent = seeded(unet, **SDXL)(), torch.zeros(1, 4, 8, 8)
    with torch.no_grad(), tome_core.patch(pipe) as handle:
        for steps, expected in merged.items():
            pipe.scheduler.set_timesteps(steps)
            with handle.sampling():
                rules = [handle.time.next_call(timestep, latent)[0].rules for timestep in pipe.scheduler.timesteps]
            found = [coarse.block is not None for _, coarse in rules]
            assert found == [False] * (len(rules) - expected) + [True] * expected, steps
            assert all(fine.attn for fine, _ in rules)


TOO_EARLY = "whole blocks merge later than in these steps: below timestep 760"


def test_a_picture_of_one_step_says_why_its_whole_blocks_do_not_merge():
    model = seeded(unet, **SDXL)()
    blocks = MergeConfig(rules=rules_of_blocks(0.5))
    for config, headline in (("balanced", "less work"), (blocks, "nothing merged: these steps stay whole, by the")):
        with tome_core.patch(model, config, only_if_it_pays=False) as handle:
            draw(model, 999)
            assert headline in handle.report().headline and TOO_EARLY in handle.report().hints
            draw(model, 500)
            assert handle.report().block_tokens and TOO_EARLY not in handle.report().notes
            handle.reset_counts()
            draw(model, 999)
            assert TOO_EARLY in str(handle.report()) and not handle.report().block_tokens
    for changes, timestep in (({"start_percent": 0.9}, 500), ({}, torch.tensor([500, 600])), ({}, 500)):
        with tome_core.patch(model, blocks, **changes) as handle:
            draw(model, timestep)
            assert not handle.report().merged_anything and TOO_EARLY not in handle.report().notes, "not by this time"


BLOCKS = {"config": MergeConfig(rules=rules_of_blocks(0.5)), "only_if_it_pays": False}


def reasons_of_blocks(handle: Any) -> list[str]:
    return [why for why in handle.report().reasons if why.startswith("block: ")]


def test_whole_blocks_merge_beside_an_ip_adapter_and_stay_whole_for_its_masks(monkeypatch):
    model, mask = seeded(lambda: with_ip_adapter(unet(**SDXL)))(), torch.ones(1, 1, SIDE, SIDE)
    mask[..., : SIDE // 2] = 0
    masks = {"cross_attention_kwargs": {"ip_adapter_masks": [mask]}}
    plain, masked = draw(model), draw(model, **masks)
    with tome_core.patch(model, **BLOCKS) as handle:
        assert torch.equal(draw(model, **masks), masked) and not torch.equal(masked, plain)
        assert "(ip_adapter_masks)" in "".join(reasons_of_blocks(handle)) and not handle.report().block_tokens
        handle.reset_counts()
        assert not torch.equal(draw(model), plain)
        assert handle.report().block_tokens and not reasons_of_blocks(handle)
        merge_with_self(monkeypatch)
        assert distance(draw(model), plain) < 1e-4


def test_whole_blocks_merge_in_a_controlnet_and_beside_what_it_adds(monkeypatch):
    model = seeded(unet, **SDXL)()
    net = seeded(diffusers.ControlNetModel.from_unet, unet=model, conditioning_embedding_out_channels=(8, 8))()
    control = {"controlnet_cond": torch.rand(2, 3, 2 * SIDE, 2 * SIDE)}

    def controlled() -> torch.Tensor:
        down, middle = draw(net, **control, keep=lambda out: (out.down_block_res_samples, out.mid_block_res_sample))
        return draw(model, down_block_additional_residuals=down, mid_block_additional_residual=middle)

    plain = controlled()
    with tome_core.patch(model, **BLOCKS) as handle, tome_core.patch(net, **BLOCKS) as of_net:
        assert not torch.equal(controlled(), plain)
        for each in (handle, of_net):
            assert each.report().block_tokens and not reasons_of_blocks(each)
        merge_with_self(monkeypatch)
        assert distance(controlled(), plain) < 1e-4
    assert torch.equal(controlled(), plain)


def get_hacked_forward(original_forward: Any, seen: list[int]) -> Any:
    """ControlNet-LLLite in sd-webui-controlnet: it adds to a layer's input, by the place of each token."""

    def forward(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.append(x.shape[1])
        return original_forward(x + torch.linspace(-1, 1, x.shape[1])[:, None], **kwargs)

    return forward


def test_blocks_with_layers_of_controlnet_lllite_stay_whole_and_name_it():
    model, seen = seeded(unet, **SDXL)(), []
    blocks = [place for place in find_blocks(model) if place.halvings == 2]
    middle = [place for place in blocks if place.path.startswith("mid_block")]
    for places in (middle, [place for place in blocks if place not in middle]):
        for place in places:
            for layer in ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q"):
                linear = place.block.get_submodule(layer)
                linear.forward = get_hacked_forward(linear.forward, seen)
        plain = draw(model)
        with tome_core.patch(model, **BLOCKS) as handle:
            assert torch.equal(draw(model), plain) == (places is not middle), "blocks of other transformers merge"
            assert set(seen) == {(SIDE // 4) ** 2}
            (why,) = reasons_of_blocks(handle)
            assert "get_hacked_forward" in why and "at attn1.to_q" in why


def load_control_net_lllite_patch() -> Any:
    """As the pack for ComfyUI makes it: an object of a local class."""

    class control_net_lllite_patch:
        def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict) -> Any:
            return q, k, v

    return control_net_lllite_patch()


@pytest.mark.parametrize("kind", ["attn1_patch", "attn2_patch"])
def test_a_patch_of_controlnet_lllite_in_comfyui_keeps_blocks_whole_and_is_named(kind: str):
    why = why_of_options({"patches": {kind: [load_control_net_lllite_patch()]}})
    assert why.startswith("a patch of attention may need every token") and "load_control_net_lllite_patch)" in why
