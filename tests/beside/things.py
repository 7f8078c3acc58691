"""What people put on a model beside merging, one a row; how each is put on stands in `tests.beside.ways`.

A thing is a context manager that takes itself off again; if it gives something back, that is called in the model's
place.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Set
from operator import attrgetter, methodcaller
from typing import NamedTuple

import torch
from diffusers import UNet2DConditionModel
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode as PAG
from diffusers.models.attention_processor import AttnProcessor

from tests import offloading
from tests.beside import savers, ways
from tests.beside.models import Beside
from tests.beside.ways import exchanged, exchanged_in, hooks, pre_hooks, within, wrapper


class Thing(NamedTuple):
    """on: puts it on. left: when attentions have to be left alone for it (are scores computed by hand, did it come
    last); None if it may be so or not. reason: what the report names then, as a pattern. fits: on which models it can
    be. is_slow: takes seconds. takes_us: if it leaves before us, with what stands on top of it.
    """

    on: ways.On
    left: Set[tuple[bool, bool]] | None = frozenset()
    reason: str = "nothing"
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


def is_of_layers(beside: Beside) -> bool:
    """Such as a LoRA is known for."""
    return hasattr(beside.model, "add_adapter") and beside.name != "gligen"


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


def is_known_in_graphs(beside: Beside) -> bool:
    """A block of sgm's that a compiler takes is left alone, and named: its own checkpoint stands in between."""
    return beside.name != "sgm_double"


has_two_pictures = attrgetter("has_two_pictures")
attentions, blocks, around = attrgetter("attentions"), attrgetter("blocks"), attrgetter("around")
a_device = within(lambda: torch.device("cpu"))

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
    "hooks on attentions and layers": Thing(hooks(attentions, ways.projections)),
    "hooks on blocks and the model": Thing(hooks(around, ways.model)),
    "pre-hooks": Thing(pre_hooks(attentions, ways.model)),
    "a feature store": Thing(ways.feature_store),
    "accelerate's hooks": Thing(ways.accelerates_hooks),
    "diffusers' hooks": Thing(ways.diffusers_hooks, BENEATH, "new_forward", takes_us=True),
    "wrappers of attentions": Thing(wrapper(attentions), BENEATH, "changing"),
    "wrappers of blocks": Thing(wrapper(around)),
    "a wrapper of the model": Thing(wrapper(ways.model)),
    "attentions, put back as bound methods": Thing(wrapper(attentions, rebinds=True), BENEATH, "changing"),
    "blocks, put back as bound methods": Thing(wrapper(around, rebinds=True)),
    "a model, put back as a bound method": Thing(wrapper(ways.model, rebinds=True)),
    "attentions' own forward": Thing(exchanged(attentions), BY_HAND | OVER, "own_forward"),
    "one attention's own forward, partial": Thing(
        exchanged(ways.first_attention, functools.partial), BY_HAND | OVER, "own_forward"),
    "blocks' own forward": Thing(exchanged(around)),
    "the model's own forward": Thing(exchanged(ways.model), OVER, "own_forward"),
    "another class of attentions": Thing(ways.another_class, BY_HAND, "of_another_class"),
    "another method of the class": Thing(ways.method_of_the_class, BY_HAND, "of_the_class"),
    "attentions called twice": Thing(wrapper(attentions, ways.twice), BENEATH, "twice"),
    "attentions in pieces": Thing(wrapper(attentions, ways.in_pieces), BENEATH, "in_pieces", has_two_pictures),
    "blocks in pieces": Thing(wrapper(around, ways.in_pieces), fits=has_two_pictures),
    "a cache of blocks": Thing(wrapper(blocks, ways.every_second), None, "every_second"),
    "a cache of the model": Thing(wrapper(ways.model, ways.every_second), None, "every_second"),
    "a function that swallows masks": Thing(ways.replaced(ways.swallowing_masks), fits=brings_no_masks),
    "a function that refuses masks": Thing(ways.replaced(ways.refusing_masks), fits=brings_no_masks),
    "a function that is no attention": Thing(
        ways.replaced(ways.no_softmax), BY_FUNCTION, "no_softmax|forward calls no attention function"),
    "a mode around attentions": Thing(wrapper(attentions, within(ways.Looking)), BY_HAND | OVER, "Looking|within"),
    "PAG's guider": Thing(
        wrapper(ways.first_attention, within(PAG)), ANYWHERE, "AttentionScoreSkipFunctionMode|within"),
    "a mode around the model": Thing(wrapper(ways.model, within(ways.Looking)), ANYWHERE, "Looking"),
    "a device for new tensors": Thing(wrapper(ways.model, a_device)),
    "a derived processor": Thing(exchanged_in(("processor",), ways.derived), fits=has_processors),
    "a processor around another": Thing(
        exchanged_in(("processor",), ways.Delegating), BY_HAND, "Delegating", has_processors),
    "a processor by products": Thing(
        exchanged_in(("processor",), ways.ByProducts), ANYWHERE, "ByProducts", has_processors_of_unets),
    "scores by hand": Thing(exchanged_in(("processor",), lambda before: AttnProcessor()), fits=has_processors_of_unets),
    "layers in the place of layers": Thing(exchanged_in(ways.PROJECTIONS, ways.Adapted)),
    "fused projections": Thing(ways.switched(
        methodcaller("fuse_qkv_projections"), methodcaller("unfuse_qkv_projections")), fits=can_be_fused),
    "a LoRA": Thing(ways.switched(ways.add_lora, methodcaller("unload_lora")), fits=is_of_layers),
    "other weights": Thing(ways.other_weights),
    "an image prompt": Thing(ways.image_prompt, fits=takes_an_image),
    "weights that come for each layer": Thing(ways.offloaded(offloading.sequentially)),
    "weights that come for each call": Thing(ways.offloaded(offloading.as_a_model)),
    "offloaded leaves": Thing(ways.offloaded(offloading.in_groups_of_leaves), reason=HOOKED),
    "SD.Next's offloading": Thing(ways.offloaded(ways.as_sdnext_offloads), fits=has_parts_alone),
    "FreeU": Thing(ways.of_pipelines(savers.free_u), fits=is_stable_diffusion),
    "HyperTile": Thing(
        ways.of_pipelines(savers.hyper_tile), ANYWHERE, "the picture's grid|_InTiles", is_stable_diffusion),
    "down-sampled keys": Thing(
        ways.of_pipelines(savers.down_sampling), ANYWHERE, "not the picture's tokens|_OnCoarserKeys",
        is_stable_diffusion),
    "FirstBlockCache": Thing(ways.first_block, reason=HOOKED, fits=knows_first_blocks),
    "a deep copy": Thing(ways.copied(copy.deepcopy)),
    "a pickle": Thing(ways.copied(lambda whole: pickle.loads(pickle.dumps(whole)))),
    "compiled blocks": Thing(ways.compiled_blocks, BY_HAND, COMPILED, is_known_in_graphs, is_slow=True),
    "compiled blocks in pieces": Thing(ways.compiled_in_pieces, BY_HAND, COMPILED, stops_compilers, is_slow=True),
}  # fmt: skip
