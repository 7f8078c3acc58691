"""What steers a picture beside its prompt, changed while a patch is on: ControlNets, IP-Adapters, LoRAs, regions.

Real pipelines with random weights; that such calls merge and repeat at all is `test_one_line.py`'s to hold.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor2_0

import tome_core
from tests.pipeline_uses import USES
from tests.pipelines import TIMES, TOKENS, assert_merged, differ, draw, latents, merged_alone
from tests.traces import traces

SWAP_AFTER = 1  # steps of `TIMES`: in the middle of what a preset keeps a match for

# --- ControlNet ------------------------------------------------------------------------------------------------------


def test_a_controlnet_is_merged_where_it_is_asked_for(build, load):
    """By a patch of its own, beside the UNet's or alone, and taken off alone."""
    pipe, call = USES["controlnet"](build(), load)
    pipe.set_progress_bar_config(disable=True)
    before, plain, unet_alone = traces(pipe.controlnet), draw(pipe, **call), merged_alone(pipe, **call)
    with tome_core.patch(pipe.controlnet) as net:
        net_alone = draw(pipe, **call)
        assert_merged(net)
        assert torch.equal(draw(pipe, **call), net_alone)
        both = merged_alone(pipe, **call)
        assert torch.equal(draw(pipe, **call), net_alone), "the UNet's came off and left the ControlNet's on"
    assert differ(plain, unet_alone, net_alone, both)
    assert torch.equal(draw(pipe, **call), plain) and traces(pipe.controlnet) == before


def test_a_controlnet_is_left_alone_where_it_is_not(build, load):
    pipe, call = USES["controlnet"](build(), load)
    pipe.set_progress_bar_config(disable=True)
    seen: list[torch.Tensor] = []
    hook = pipe.controlnet.register_forward_hook(lambda net, args, out: seen.append(out[1]))
    draw(pipe, **call)
    merged_alone(pipe, **call)
    hook.remove()
    assert len(seen) == 2 * len(TIMES) and torch.equal(seen[0], seen[len(TIMES)]), "of the same first latent"


# --- IP-Adapter ------------------------------------------------------------------------------------------------------


def test_an_image_prompts_scale_may_change_between_pictures(build, load):
    (pipe, call), (other, _) = (USES["image prompt"](build(), load) for _ in range(2))
    handle = tome_core.patch(pipe)
    pictures = []
    for scale in (1.0, 0.3, 0.0, 1.0):
        for each in (pipe, other):
            each.set_ip_adapter_scale(scale)
        pictures.append(draw(pipe, **call))
        assert torch.equal(pictures[-1], merged_alone(other, **call))
    assert differ(*pictures[:3]) and torch.equal(pictures[0], pictures[3])
    assert_merged(handle)


def test_an_image_prompt_may_come_and_go_while_a_patch_is_on(build, load):
    pipe, merged = build(), merged_alone(build())
    other, call = USES["image prompt"](build(), load)
    handle = tome_core.patch(pipe)
    assert torch.equal(draw(pipe), merged)
    USES["image prompt"](pipe, load)
    assert torch.equal(draw(pipe, **call), merged_alone(other, **call))
    pipe.unload_ip_adapter()
    assert torch.equal(draw(pipe), merged)
    assert_merged(handle)


# --- LoRA; between pictures: `test_pipeline_changes.py` --------------------------------------------------------------


def test_a_lora_swapped_within_a_picture_acts_from_there_on_and_no_further(build, load):
    def drawn(pipe: Any, swapped_to: str) -> list[torch.Tensor]:
        pipe.set_adapters("one")
        return latents(pipe, SWAP_AFTER, lambda: pipe.set_adapters(swapped_to))

    pipe, other = build(), build()
    for each in (pipe, other):
        load(each, "one", "two")
    handle = tome_core.patch(pipe)
    one, swapped, one_again = (drawn(pipe, name) for name in ("one", "two", "one"))
    same = [torch.equal(*pair) for pair in zip(one, swapped, strict=True)]
    assert same == [number < SWAP_AFTER for number in range(len(TIMES))]
    assert all(map(torch.equal, one, one_again))
    assert_merged(handle)
    with tome_core.patch(other):
        assert torch.equal(drawn(other, "two")[-1], swapped[-1]), "whatever was drawn before"
    assert not torch.equal(drawn(other, "two")[-1], swapped[-1])


# --- regional prompts ------------------------------------------------------------------------------------------------


class _ByRegion(AttnProcessor2_0):
    """The left half of the picture follows the first half of the words, the right half the others."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self._seen = seen

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: Any = None, **more: Any):
        side = round(hidden_states.shape[1] ** 0.5)
        self._seen.append(hidden_states.shape[1])
        halves = encoder_hidden_states.chunk(2, 1)
        left, right = (super(_ByRegion, self).__call__(attn, hidden_states, half, **more) for half in halves)
        is_left = (torch.arange(hidden_states.shape[1]) % side < side // 2)[:, None]
        return torch.where(is_left, left, right)


def test_prompts_by_region_see_every_token_of_their_region(build):
    """A processor in the attention to the prompt, as such extensions put it there, needs the picture's whole grid."""
    pipe, seen = build(), []
    one_prompt = merged_alone(pipe)
    regional = {name: _ByRegion(seen) if name.endswith("attn2.processor") else processor
                for name, processor in pipe.unet.attn_processors.items()}  # fmt: skip
    pipe.unet.set_attn_processor(regional)
    plain, grids = draw(pipe), [*seen]
    seen.clear()
    merged = merged_alone(pipe)
    assert seen == grids and max(grids) == TOKENS
    assert differ(plain, merged, one_prompt) and torch.equal(draw(pipe), plain)


def test_regions_of_several_calls_a_step_are_each_merged_by_themselves(build):
    """Where a loop asks for each region's prediction alone, of the same latent, and takes each where it belongs."""

    def regional(pipe: Any, handle: Any = None) -> torch.Tensor:
        dice = torch.Generator().manual_seed(3)
        latent, words = torch.randn(1, 4, 32, 32, generator=dice), torch.randn(2, 1, 7, 32, generator=dice)
        for time in TIMES:
            if handle:
                handle.set_time(timestep=time, sampling="a picture")
            with torch.no_grad():
                left, right = (pipe.unet(latent, time, text).sample for text in words)
            latent = latent - 0.1 * torch.cat([left[..., :16], right[..., 16:]], -1)
        return latent

    pipe = build()
    plain = regional(pipe)
    with tome_core.patch(pipe.unet) as handle:
        merged = regional(pipe, handle)
        assert torch.equal(regional(pipe, handle), merged), "a sampling of the same name begins anew"
        assert_merged(handle)
    assert differ(plain, merged) and torch.equal(regional(pipe), plain)
