"""Attention calls in ComfyUI's slot: which of them merge, by which function, and what the report says of others."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from comfy_nodes import transformers
from comfy_nodes.slot_calls import SLOT, HostCall, OtherNodesFunction
from tests.host_doubles import comfy_attention as comfy
from tests.host_doubles.comfy import BaseModel, ModelPatcher, apply, latest, least_checkpoint, sample, transformer
from tests.host_doubles.comfy_models import deep_unet
from tests.hosts.comfyui.hold_attentions import TOLERANCE, way_of
from tome_core.attention.merged import BIAS, OWN_BIAS
from tome_core.engine import decision
from tome_core.hosting import Grid
from tome_core.models.unet_blocks import find_blocks
from tome_core.reporting.ledger import FEW_TOKENS, NO_GRID, OF_OTHERS, REFINED, REPLACED

attend = comfy.CrossAttention.forward

KV = {"merge_what": "k+v", "ratio": 0.75, "use_rand": False}
WAYS = {"attention_basic": BIAS, "attention_split": BIAS, "attention_pytorch": BIAS, "attention_sub_quad": OWN_BIAS,
        "attention_flash": OWN_BIAS}  # fmt: skip


class Noted:
    """A function for the slot, which adds a mask, drops it, refuses it, or does more; it notes the number of keys."""

    def __init__(self, drops: bool = False, more: float = 1.0, refuses: bool = False) -> None:
        self.drops, self.more, self.refuses, self.keys = drops, more, refuses, []

    def __call__(self, function, q, k, v, heads, mask=None, **kwargs):
        self.keys.append(k.shape[1])
        if self.refuses and mask is not None:
            raise RuntimeError("the kernel says no")
        return function(q, k, v, heads, mask=None if self.drops else mask, **kwargs) * self.more


def chosen(optimized_attention):
    """The override that ComfyUI's own set_model_optimized_attention makes of a function."""
    return lambda function, *args, **kwargs: optimized_attention(*args, **kwargs)


def with_slot(function):
    patcher = least_checkpoint()
    patcher.model_options["transformer_options"][SLOT] = function
    return patcher


def test_each_function_takes_sizes_its_own_way_by_itself_and_chosen_by_a_node():
    for (name, way), dtype, precision in itertools.product(WAYS.items(), TOLERANCE, (None, torch.float32)):
        function = getattr(comfy, name)
        through = OtherNodesFunction(chosen(function), comfy.attention_pytorch)
        ways = [way_of(attention, dtype, attn_precision=precision) for attention in (function, through)]
        assert ways == [way] * 2, (name, dtype, precision)


@pytest.mark.parametrize(("what", "calls", "why"),
                         [({}, 2 * 4, ""), ({"drops": True}, 0, ""), ({"refuses": True}, 0, ""),
                          ({"more": 1.5}, 0, "the function that it calls is no attention")])  # fmt: skip
def test_attention_in_the_slot_gets_merged_keys_or_gives_way_or_gets_every_call_unmerged(what, calls, why):
    """SageAttention gives way; the slot always serves attention to the prompt. why: the report's, if no call merges."""
    slot = Noted(**what)
    merged = apply(with_slot(slot), **KV)
    expected = with_slot(Noted(**what)) if why else apply(least_checkpoint(), **KV)
    torch.testing.assert_close(sample(merged), sample(expected), rtol=0, atol=0 if why else 1e-5)
    assert (slot.keys.count(16), slot.keys.count(7)) == (calls, 2 * 4), "four blocks, two steps"
    assert any(why in reason for reason in latest(merged).report.reasons) or not why


def test_values_whose_heads_are_apart_already_are_taken_as_others_are():
    """SD3 hands over such values."""
    q, k, v = (torch.randn(2, 5, 4 * 8) for _ in range(3))
    flat, apart = HostCall(torch.add, q, k, v, 4), HostCall(torch.add, q, k, v.unflatten(2, (4, 8)), 4)
    assert torch.equal(apart.v, flat.v) and flat.v.shape == (2, 5, 4, 8)


def merged(patcher: ModelPatcher, others: dict | None = None, **options):
    """The report on a sampling through the nodes. others: what other nodes put into transformer_options."""
    patcher.model_options["transformer_options"] = others or {}
    applied = apply(patcher, level="up to /8", use_rand=False)
    assert sample(applied, steps=1, **options).isfinite().all()
    return latest(applied).report


def reasons(report) -> dict[str, int]:
    return {why.removeprefix("attn: "): count for why, count in report.reasons.items()}


def forget(h, context, values, options):
    options.pop("activations_shape", None)
    return h, context, values


@pytest.mark.parametrize("others", [{}, {"patches": {"attn1_patch": [forget]}}], ids=["it is told", "the latent's"])
def test_each_block_merges_by_the_grid_that_its_transformer_tells_or_else_by_the_latents(others):
    report = merged(ModelPatcher(BaseModel(deep_unet())), others=others, size=(16, 24))
    assert [level.tokens for level in report.levels] == [((384, 192, 192),), ((96, 48, 48),)]
    assert all(level.calls_merged == level.blocks > 2 and not level.reasons for level in report.levels)


@pytest.mark.parametrize(("name", "places", "keys", "why"), [
    ("attn1", [("middle", 0), ("input", 1, 0)], 64, {f"{REPLACED}: {__name__}.test_a_self_attention_that_another_node_"
                                                     "stands_in_for_is_left_alone_and_its_node_named": 2}),
    ("attn2", [("middle", 0)], 7, {})])  # fmt: skip
def test_a_self_attention_that_another_node_stands_in_for_is_left_alone_and_its_node_named(name, places, keys, why):
    """Perturbed-attention guidance does so, and needs every token. An attention to the prompt is no loss."""
    lengths = []

    def other(q, k, v, extra):
        lengths.append((q.shape[1], k.shape[1]))
        return q

    report = merged(least_checkpoint(), {"patches_replace": {name: dict.fromkeys(places, other)}})
    calls = sum(why.values())
    assert report.calls_merged == report.levels[0].blocks - calls and reasons(report) == why
    assert report.work_saved > 0 and lengths == [(64, keys)] * len(places)


def tiles(h, context, values, options):
    """Cut the tokens into tiles, as HyperTile does."""
    h = h.unflatten(1, (4, -1)).flatten(0, 1)
    return h, h, h


def halves(h, context, values, options):
    """Halve the queries alone, as TomePatchModel does."""
    return h[:, ::2], context, values


@pytest.mark.parametrize(("before", "after"), [
    (tiles, lambda h, options: h.unflatten(0, (-1, 4)).flatten(1, 2)),
    (halves, lambda h, options: h.repeat_interleave(2, 1))])  # fmt: skip
def test_tokens_that_a_node_has_changed_first_are_left_whole_and_the_node_is_named(before, after):
    report = merged(least_checkpoint(), others={"patches": {"attn1_patch": [before], "attn1_output_patch": [after]}})
    why = f"another node's patch changed the tokens ({__name__}.{before.__name__})"
    assert reasons(report) == {why: report.levels[0].blocks} and not report.merged_anything


def with_more_keys(attention, n, keys, values, options):
    """Show each token a reference picture too."""
    return attend(attention, n, *(torch.cat([tokens, tokens], 1) for tokens in (keys, values)), options)


def with_fewer_tokens(attention, n, keys, values, options):
    return attend(attention, n[:, ::2], keys[:, ::2], values[:, ::2], options).repeat_interleave(2, 1)


def under_a_mask(attention, n, keys, values, options):
    mask = torch.arange(n.shape[1]) < 40
    q, k, v = attention.to_q(n), attention.to_k(keys), attention.to_v(values)
    out = comfy.optimized_attention(q, k, v, attention.heads, mask[None, None, None].expand(len(q), 1, 1, -1),
                                    transformer_options=options)  # fmt: skip
    return attention.to_out(out)


@pytest.mark.parametrize(("forward", "why"), [
    (with_more_keys, OF_OTHERS), (with_fewer_tokens, NO_GRID), (under_a_mask, "an attention mask hides a part of the"),
])  # fmt: skip
def test_tokens_that_no_patch_has_changed_are_left_whole_for_what_is_found_there(monkeypatch, forward, why):
    """In the place of each self-attention; attention to the prompt is the class's own."""
    def of_texts_too(self, x, context=None, value=None, options=None):
        is_self = context is not None and context.shape[:2] == x.shape[:2]
        return (forward if is_self else attend)(self, x, context, value, options)

    monkeypatch.setattr(comfy.CrossAttention, "forward", of_texts_too)
    report = merged(least_checkpoint(), {"patches": {"attn1_patch": []}})
    ((told, count),) = reasons(report).items()
    assert told.startswith(why) and count == report.levels[0].blocks and not report.merged_anything


def shrink(h, options):
    """Halve the picture inside the model, as Deep Shrink does."""
    return F.avg_pool2d(h, 2) if options["block"][1] == 0 else h


def grow(h, skipped, options):
    return F.interpolate(h, skipped.shape[2:]) if h.shape != skipped.shape else h, skipped


@pytest.mark.parametrize(("fewest", "told"), [
    (64, {f"{FEW_TOKENS}, because another node made the picture smaller ({__name__}.shrink)": 3}),
    (65, {FEW_TOKENS: 4}), (16, {})])  # fmt: skip
def test_if_a_node_made_the_picture_too_small_it_is_named_and_not_if_all_of_it_is_too_small(monkeypatch, fewest, told):
    """Of four blocks the last gets the picture at its own size, 64 tokens; the others get 16."""
    monkeypatch.setattr(decision, "_LEAST", {"cpu": fewest})
    patcher = least_checkpoint()
    patcher.model_options["transformer_options"] = {"patches": {"input_block_patch_after_skip": [shrink],
                                                                "output_block_patch": [grow]}}  # fmt: skip
    applied = apply(patcher, use_rand=False, only_if_it_pays=True)
    assert sample(applied, steps=1).isfinite().all()
    assert reasons(latest(applied).report) == told and not latest(applied).report.hindered


def test_frames_do_not_merge():
    """After a block, film models call an attention of frames, which gets the options of that block."""
    patcher, over_time, seen = least_checkpoint(), comfy.CrossAttention(32, 32, 4), []
    transformer = patcher.model.diffusion_model.input_blocks[1][1]
    forward = transformer.forward

    def with_frames(x, context, options):
        out, tokens = forward(x, context, options), x.flatten(2).permute(2, 0, 1)  # [places, frames, C]
        seen.append(tokens.shape[1])
        return out + over_time(tokens, transformer_options=options).permute(1, 2, 0).reshape(x.shape)

    transformer.forward = with_frames
    report = merged(patcher, batch=2)
    assert seen == [4] and not report.reasons and report.calls_merged == report.levels[0].blocks


def test_what_answers_in_the_models_place_is_counted_as_not_merged_unless_easycache_leaves_out_the_step():
    patcher = least_checkpoint()
    patcher.model.diffusion_model.forward = lambda x, t, context, transformer_options: x
    report = merged(patcher)
    assert reasons(report) == {REPLACED: report.levels[0].blocks}
    assert not merged(patcher, others={"easycache": SimpleNamespace(name="EasyCache", skip_current_step=True)}).reasons


JOINT = {**KV, "metric": "keys+values", "only_if_it_pays": False}
SIZE, GRID = (24, 32), Grid(12, 16)  # a latent's size, and the grid of its 192 tokens


@pytest.mark.parametrize(("name", "multiple", "beside"), [("Flux", 1, 7), ("NextDiT", 50, 7 + 8)])
def test_joint_attention_merges_the_picture_alone_and_the_rest_is_told(name, multiple, beside):
    plain = transformer(name, pad_tokens_multiple=multiple)
    merged, before = apply(plain, **JOINT), sample(plain, size=SIZE)
    assert 0 < (sample(merged, size=SIZE) - before).norm() < 0.2 * before.norm()
    report = latest(merged).report
    (level,) = report.levels
    assert level.downsample == 2 and level.tokens == ((192 + beside, 192 + beside, 192 // 4 + beside),)
    assert level.calls_merged == 2 * 2
    assert not report.reasons and len(latest(merged).details) <= 10
    ((downsample, merge_map),) = latest(merged).maps.values()
    assert downsample == 2 and tuple(merge_map.grid[:2]) == (12, 16) and merge_map.group.shape[-1] == 192


def test_what_a_model_does_before_its_blocks_is_no_defect():
    """Z-Image pads its picture, and first refines the text alone and the picture alone."""
    merged = apply(transformer("NextDiT", refines=True, pad_tokens_multiple=50), **JOINT)
    sample(merged, steps=1, size=SIZE)
    assert latest(merged).report.merged_anything and reasons(latest(merged).report) == {REFINED: 2}
    assert len(latest(merged).lines) == 1 and REFINED in "\n".join(latest(merged).details)


def test_start_and_end_are_of_the_flows_own_schedule():
    merged = apply(transformer(), start=0.2, end=0.6, **JOINT)
    sample(merged, steps=4)  # the steps are at 0, .25, .5, .75
    assert latest(merged).report.levels[0].calls_merged == 2 * 2


def test_a_picture_whose_place_is_not_known_does_not_merge():
    plain = transformer("Unplaced")
    merged = apply(plain, **JOINT)
    assert torch.equal(sample(merged), sample(plain))
    assert [*reasons(latest(merged).report)] == [transformers.BESIDE]


PLACES = (  # a model, its attributes; the number of other tokens; the model's options; the picture's first token
    ("Flux", {}, 0, {}, 0), ("Flux", {}, 7, {}, 7), ("Flux", {}, -1, {}, transformers.PART),
    ("Flux", {}, -1, {"patches": {"attn1_patch": [tiles]}},
     f"another node's patch changed the tokens ({__name__}.tiles)"),
    ("Flux", {}, 7 + 50, {"reference_image_num_tokens": [20, 30]}, 7),
    # the picture is last, with its padding after it; a text, or references too, come before it
    ("NextDiT", {"pad_tokens_multiple": None}, 7, {}, 7), ("NextDiT", {"pad_tokens_multiple": 32}, 7 + 64, {}, 7 + 64),
    ("NextDiT", {"pad_tokens_multiple": 50}, 7 + 8, {}, 7),
    # before a model names its block it may refine a text, which may be longer than the picture or as long
    *((name, {}, beside, {"block_type": None}, REFINED)
      for name in ("HunyuanVideo", "NextDiT", "SingleStreamDiT") for beside in (0, 7)),
    ("HunyuanVideo", {}, 7, {}, 7), ("SingleStreamDiT", {}, 7, {}, 7),
)  # fmt: skip


@pytest.mark.parametrize(("name", "attributes", "beside", "told", "first"), PLACES)
def test_where_a_pictures_tokens_lie_is_known_by_the_models_name_or_said_to_be_unknown(name, attributes, beside, told,
                                                                                       first):  # fmt: skip
    model = type(name, (), attributes)()
    place = transformers.where_tokens_lie(model, GRID, 192 + beside, {"block_type": "double", **told})
    assert place == first if isinstance(first, str) else place.first == first


PATCHES = (  # a model's attributes, a latent, its grid
    ({"patch_size": 2}, (1, 16, 63, 64), (32, 32, 1)),
    ({"patch_size": (1, 2, 2)}, (1, 16, 5, 60, 104), (150, 52, 5)),
    ({"patch_size": 1}, (1, 128, 4, 8, 8), (32, 8, 4)),
    ({"patch_spatial": 2, "patch_temporal": 1}, (1, 16, 2, 8, 8), (8, 4, 2)),
    ({"patchifier": SimpleNamespace(patch_size=(1, 2, 2))}, (1, 16, 8, 8), (4, 4, 1)),
    ({"patch": 2}, (1, 16, 8, 8), (4, 4, 1)),
    ({"patch_size": True}, (1, 16, 8, 8), None), ({}, (1, 16, 8, 8), None), ({"patch": 2}, (16, 8, 8), None),
)  # fmt: skip


@pytest.mark.parametrize(("names", "latent", "grid"), PATCHES)
def test_the_grid_is_the_latents_in_whole_tokens_whichever_name_the_model_has_for_them(names, latent, grid):
    computed = transformers.grid_of(SimpleNamespace(**names), torch.zeros(latent))
    assert computed == grid and (grid is None or isinstance(computed, Grid))


def test_a_block_without_a_self_attention_is_left_alone():
    """The first attention of such a block is to the text."""
    plain = ModelPatcher(BaseModel(deep_unet()))
    applied = apply(plain, ratio=0.5, use_rand=False)
    assert not torch.equal(sample(applied), sample(plain))
    for place in find_blocks(plain.model.diffusion_model):
        place.block.disable_self_attn = True
    assert torch.equal(sample(applied), sample(plain))
    assert not latest(applied).report.merged_anything and not latest(applied).report.reasons
