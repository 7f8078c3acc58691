"""What people put on a model beside merging, a row for each; how it is put on stands in `tests.beside.ways`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from operator import attrgetter, methodcaller
from typing import NamedTuple

import accelerate
import torch
from diffusers import UNet2DConditionModel
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode as PAG
from diffusers.models.attention_processor import AttnProcessor
from torch.overrides import BaseTorchFunctionMode as Looking

from tests.beside import ways
from tests.beside.models import Beside
from tests.beside.ways import (
    CPU,
    Delegating,
    each,
    exchanged,
    first_attention,
    layers,
    model,
    offloaded,
    processor,
    wrapper,
)


class Thing(NamedTuple):
    """on: a context manager, inside which it is on. left: when attentions have to be left alone for it (are scores
    computed by hand, did it come last). reason: what the report names then, as a pattern. fits: on which models it can
    be. is_slow: takes seconds. takes_us: if it leaves before us, with what stands on it.
    """

    on: ways.On
    left: Set[tuple[bool, bool]] = frozenset()
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


def is_of_layers(beside: Beside) -> bool:
    """Such as a LoRA is known for."""
    return hasattr(beside.model, "add_adapter") and beside.name != "gligen"


def is_stable_diffusion(beside: Beside) -> bool:
    """A UNet of diffusers' that takes pictures."""
    return type(beside.model) is UNet2DConditionModel


def has_parts_alone(beside: Beside) -> bool:
    """And no weights beside them."""
    return not beside.model._parameters


def is_known_in_graphs(beside: Beside) -> bool:
    """A block of sgm's that a compiler takes is left alone, and named: its own checkpoint stands in between."""
    return beside.name != "sgm_double"


attentions, around = attrgetter("attentions"), attrgetter("around")
by_leaves = functools.partial(apply_group_offloading, onload_device=CPU, offload_type="leaf_level")
looking, guiding, on_a_device = map(ways.within, (Looking, PAG, lambda: torch.device("cpu")))

# --- the table --------------------------------------------------------------------------------------------------------


# see `Thing.left`
BENEATH = {(True, False)}  # what computes by hand merges by its own code alone, and something else runs beneath us
BY_HAND = BENEATH | {(True, True)}
OVER = {(False, True), (True, True)}  # it asks nobody what was there
BY_FUNCTION = {(False, False), (False, True)}
ANYWHERE = BY_HAND | BY_FUNCTION
THINGS = {
    "hooks on attentions": Thing(each(attentions, ways.hook)),
    "hooks on layers": Thing(each(layers, ways.hook)),
    "hooks on blocks": Thing(each(around, ways.hook)),
    "a hook on the model": Thing(each(model, ways.hook)),
    "pre-hooks": Thing(each(ways.model_and_attentions, ways.pre_hook)),
    "accelerate's hooks": Thing(each(ways.model_and_attentions, ways.accelerates_hook)),
    "diffusers' hooks": Thing(
        each(ways.model_and_attentions, ways.diffusers_hook), BENEATH, "new_forward", takes_us=True),
    "wrappers of attentions": Thing(wrapper(attentions), BENEATH, "changing"),
    "wrappers of blocks": Thing(wrapper(around)),
    "a wrapper of the model": Thing(wrapper(model)),
    "attentions, put back as bound methods": Thing(wrapper(attentions, rebinds=True), BENEATH, "changing"),
    "blocks, put back as bound methods": Thing(wrapper(around, rebinds=True)),
    "a model, put back as a bound method": Thing(wrapper(model, rebinds=True)),
    "attentions' own forward": Thing(exchanged(attentions), BY_HAND | OVER, "own_forward"),
    "one attention's own forward, partial": Thing(
        exchanged(first_attention, functools.partial), BY_HAND | OVER, "own_forward"),
    "blocks' own forward": Thing(exchanged(around)),
    "the model's own forward": Thing(exchanged(model), OVER, "own_forward"),
    "another class of attentions": Thing(each(attentions, ways.another_class), BY_HAND, "of_the_class"),
    "another method of the class": Thing(ways.method_of_the_class, BY_HAND, "of_the_class"),
    "attentions called twice": Thing(wrapper(attentions, ways.twice), BENEATH, "twice"),
    "a function that is no attention": Thing(
        ways.replaced(ways.no_softmax), BY_FUNCTION, "no_softmax|forward calls no attention function"),
    "a mode around attentions": Thing(
        wrapper(attentions, looking), BY_HAND | OVER, "BaseTorchFunctionMode|within"),
    "PAG's guider": Thing(wrapper(first_attention, guiding), ANYWHERE, "AttentionScoreSkipFunctionMode|within"),
    "a mode around the model": Thing(wrapper(model, looking), ANYWHERE, "BaseTorchFunctionMode"),
    "a device for new tensors": Thing(wrapper(model, on_a_device)),
    "a derived processor": Thing(processor(ways.derived), fits=has_processors),
    "a processor around another": Thing(processor(Delegating), BY_HAND, "Delegating", has_processors),
    "a processor by products": Thing(
        processor(lambda before: Delegating(AttnProcessor())), ANYWHERE, "Delegating", has_processors_of_unets),
    "scores by hand": Thing(processor(lambda before: AttnProcessor()), fits=has_processors_of_unets),
    "HyperTile": Thing(processor(ways.InTiles), ANYWHERE, "the picture's grid|InTiles", is_stable_diffusion),
    "fused projections": Thing(ways.switched(
        methodcaller("fuse_qkv_projections"), methodcaller("unfuse_qkv_projections")), fits=can_be_fused),
    "a LoRA": Thing(ways.switched(ways.add_lora, methodcaller("unload_lora")), fits=is_of_layers),
    "weights that come for each layer": Thing(
        offloaded(lambda model: accelerate.cpu_offload(model, CPU, offload_buffers=True))),
    "weights that come for each call": Thing(offloaded(lambda model: accelerate.cpu_offload_with_hook(model, CPU))),
    # over us, if a cache has answered before we were reached
    "offloaded leaves": Thing(offloaded(by_leaves), reason="its place: diffusers.hooks"),
    "SD.Next's offloading": Thing(offloaded(ways.as_sdnext_offloads), fits=has_parts_alone),
    "compiled blocks": Thing(
        ways.compiled_blocks, BY_HAND, "not known in a compiled model", is_known_in_graphs, is_slow=True),
}  # fmt: skip
