"""What people put on a model beside merging, one a row; how each is put on stands in `tests.beside.ways`.

A thing is a context manager that takes itself off again; one that gives something back gives what is called instead of
the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from contextlib import nullcontext
from operator import attrgetter
from typing import NamedTuple

import torch
from diffusers import UNet2DConditionModel
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode as PAG
from diffusers.models.attention_processor import AttnProcessor

from tests import offloading
from tests.attention_packages import sageattn
from tests.beside import savers, ways
from tests.beside.models import Beside


class Thing(NamedTuple):
    """on: puts it on. left: where attentions have to be left alone for it (are scores computed by hand, did it come
    last); None where it may be so or not. found: what the reasons name then, as a pattern. fits: on which models it can
    be. is_slow: takes seconds. takes_us: if it leaves before us, with what stands on top of it.
    """

    on: ways.On
    left: Set[tuple[bool, bool]] | None = frozenset()
    found: str = "nothing"
    fits: Callable[[Beside], bool] = lambda beside: True
    is_slow: bool = False
    takes_us: bool = False


# --- on which models --------------------------------------------------------------------------------------------------


def has_processors(beside: Beside) -> bool:
    return hasattr(beside.attentions[0], "processor")


def has_processors_of_unets(beside: Beside) -> bool:
    return type(getattr(beside.attentions[0], "processor", None)).__name__ == "AttnProcessor2_0"


def can_be_fused(beside: Beside) -> bool:
    """SD3.5's second attentions raise then, unmerged as well."""
    return hasattr(beside.model, "fuse_qkv_projections") and beside.name != "SD3.5"


def brings_no_masks(beside: Beside) -> bool:
    """Of its own: without those a picture is none that anybody wants."""
    return not beside.name.startswith(("Qwen-Image", "HunyuanVideo", "LTX", "Lumina", "Z-Image"))


def calls_it_by_place(beside: Beside) -> bool:
    """Its attention function: diffusers' dispatcher calls it by names, which not all of them have."""
    code = type(getattr(beside.attentions[0], "processor", None)).__call__
    return "dispatch_attention_fn" not in getattr(getattr(code, "__code__", None), "co_names", ())


def is_of_layers(beside: Beside) -> bool:
    """Such as a LoRA is known for."""
    return hasattr(beside.model, "add_adapter") and beside.name not in ("gligen",)


def is_stable_diffusion(beside: Beside) -> bool:
    """A UNet of diffusers' that takes pictures."""
    return type(beside.model) is UNet2DConditionModel


def has_parts_alone(beside: Beside) -> bool:
    """And no weights beside them."""
    return not beside.model._parameters


def takes_an_image(beside: Beside) -> bool:
    return beside.name in ("sd15", "sd2", "sdxl")


def knows_first_blocks(beside: Beside) -> bool:
    return beside.name.startswith(("Wan", "Flux", "Qwen-Image"))


def stops_compilers(beside: Beside) -> bool:
    """Within its attentions, if a mode is in force."""
    return beside.name.startswith(("Wan", "Qwen-Image", "LTX"))


# --- the table --------------------------------------------------------------------------------------------------------


# see `Thing.left`
BENEATH = {(True, False)}  # what computes by hand merges by its own code alone, and something else runs beneath us
BY_HAND = BENEATH | {(True, True)}
OVER = {(False, True), (True, True)}  # it asks nobody what was there
BY_FUNCTION = {(False, False), (False, True)}
ANYWHERE = BY_HAND | BY_FUNCTION
COMPILED = "not known in a compiled model"
HOOKED = "its place: diffusers.hooks"  # over us, if a cache has answered before we were reached
THINGS = {
    "nothing": Thing(lambda beside: nullcontext()),
    "hooks on attentions": Thing(ways.hooks(ways.attentions)),
    "pre-hooks on attentions": Thing(ways.pre_hooks(ways.attentions)),
    "hooks on to_q": Thing(ways.hooks(ways.layers("to_q"))),
    "hooks on to_k": Thing(ways.hooks(ways.layers("to_k"))),
    "hooks on to_v": Thing(ways.hooks(ways.layers("to_v"))),
    "a feature store": Thing(ways.feature_store),
    "hooks on blocks": Thing(ways.hooks(ways.around)),
    "hooks on the model": Thing(ways.hooks(ways.model)),
    "pre-hooks on the model": Thing(ways.pre_hooks(ways.model)),
    "accelerate's hooks": Thing(ways.accelerates_hooks),
    "diffusers' hooks": Thing(ways.diffusers_hooks, BENEATH, "new_forward", takes_us=True),
    "wrappers of attentions": Thing(ways.wrapper(ways.attentions), BENEATH, "changing"),
    "wrappers of blocks": Thing(ways.wrapper(ways.around)),
    "a wrapper of the model": Thing(ways.wrapper(ways.model)),
    "attentions, put back as bound methods": Thing(ways.wrapper(ways.attentions, rebinds=True), BENEATH, "changing"),
    "blocks, put back as bound methods": Thing(ways.wrapper(ways.around, rebinds=True)),
    "a model, put back as a bound method": Thing(ways.wrapper(ways.model, rebinds=True)),
    "attentions' own forward": Thing(ways.exchanged(ways.attentions), BY_HAND | OVER, "own_forward"),
    "one attention's own forward": Thing(ways.exchanged(ways.first_attention), BY_HAND | OVER, "own_forward"),
    "attentions' own forward, partial": Thing(
        ways.exchanged(ways.attentions, functools.partial), BY_HAND | OVER, "own_forward"),
    "blocks' own forward": Thing(ways.exchanged(ways.around)),
    "the model's own forward": Thing(ways.exchanged(ways.model), OVER, "own_forward"),
    "another class of attentions": Thing(ways.another_class, BY_HAND, "of_another_class"),
    "another method of the class": Thing(ways.method_of_the_class, BY_HAND, "of_the_class"),
    "attentions called twice": Thing(ways.wrapper(ways.attentions, ways.twice), BENEATH, "twice"),
    "attentions in pieces": Thing(
        ways.wrapper(ways.attentions, ways.in_pieces), BENEATH, "in_pieces", attrgetter("has_two_pictures")),
    "blocks in pieces": Thing(ways.wrapper(ways.around, ways.in_pieces), fits=attrgetter("has_two_pictures")),
    "a cache of blocks": Thing(ways.wrapper(ways.blocks, ways.every_second), None, "every_second"),
    "a cache of the model": Thing(ways.wrapper(ways.model, ways.every_second), None, "every_second"),
    "a function that swallows masks": Thing(ways.replaced(ways.swallowing_masks), fits=brings_no_masks),
    "a function that refuses masks": Thing(ways.replaced(ways.refusing_masks), fits=brings_no_masks),
    "SageAttention": Thing(ways.replaced(sageattn), fits=calls_it_by_place),
    "a function that is no attention": Thing(
        ways.replaced(ways.no_softmax), BY_FUNCTION, "no_softmax|forward calls no attention function"),
    "a mode around attentions": Thing(ways.in_mode(ways.Looking, ways.attentions), BY_HAND | OVER, "Looking|within"),
    "a mode around the model": Thing(ways.in_mode(ways.Looking, ways.model), ANYWHERE, "Looking"),
    "PAG's guider": Thing(ways.in_mode(PAG, ways.first_attention), ANYWHERE, "AttentionScoreSkipFunctionMode|within"),
    "a device for what is made": Thing(ways.in_mode(lambda: torch.device("cpu"), ways.model)),
    "a derived processor": Thing(ways.processors(ways.derived), fits=has_processors),
    "a processor of one's own": Thing(ways.processors(ways.Delegating), BY_HAND, "Delegating", has_processors),
    "a processor that does more": Thing(
        ways.processors(functools.partial(ways.Delegating, more=ways.changed)), BY_HAND, "Delegating", has_processors),
    "a processor by products": Thing(ways.processors(ways.ByProducts), ANYWHERE, "ByProducts", has_processors_of_unets),
    "layers in the place of layers": Thing(ways.exchanged_in(("to_q", "to_k", "to_v"), ways.Adapted)),
    "fused projections": Thing(ways.fused, fits=can_be_fused),
    "wrappers of to_q": Thing(ways.wrapper(ways.layers("to_q"))),
    "a LoRA": Thing(ways.lora, fits=is_of_layers),
    "other weights": Thing(ways.other_weights),
    "an image prompt": Thing(ways.image_prompt, fits=takes_an_image),
    "scores by hand": Thing(ways.processors(lambda before: AttnProcessor()), fits=has_processors_of_unets),
    "a processor that attends to nothing": Thing(
        ways.processors(ways.OfValues), ANYWHERE, "OfValues", has_processors_of_unets),
    "weights that come for each layer": Thing(ways.offloaded(offloading.sequentially)),
    "weights that come for each call": Thing(ways.offloaded(offloading.as_a_model)),
    "dispatched parts": Thing(ways.offloaded(offloading.dispatched)),
    "a hook on every module": Thing(ways.offloaded(offloading.hooked_everywhere)),
    "offloaded blocks": Thing(ways.offloaded(offloading.in_groups_of_blocks), found=HOOKED),
    "offloaded leaves": Thing(ways.offloaded(offloading.in_groups_of_leaves), found=HOOKED),
    "SD.Next's offloading": Thing(ways.offloaded(ways.as_sdnext_offloads), fits=has_parts_alone),
    "FreeU": Thing(ways.of_pipelines(savers.free_u), fits=is_stable_diffusion),
    "HyperTile": Thing(
        ways.of_pipelines(savers.hyper_tile), ANYWHERE, "the picture's grid|_InTiles", is_stable_diffusion),
    "down-sampled keys": Thing(
        ways.of_pipelines(savers.down_sampling), ANYWHERE, "not the picture's tokens|_OnCoarserKeys",
        is_stable_diffusion),
    "FirstBlockCache": Thing(ways.first_block, found=HOOKED, fits=knows_first_blocks),
    "a deep copy": Thing(ways.deep_copy),
    "a pickle": Thing(ways.pickled),
    "compiled blocks": Thing(ways.compiled_blocks, BY_HAND, COMPILED, is_slow=True),
    "compiled blocks in pieces": Thing(ways.compiled_in_pieces, BY_HAND, COMPILED, stops_compilers, is_slow=True),
}  # fmt: skip
