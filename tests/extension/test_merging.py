"""Which passes of which jobs merge, in the callback orders of the webuis, on a real LDM UNet."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch

from tests.models import ldm_latent_diffusion, ldm_wrapped
from tests.thoroughness import some_quick
from tests.webui_doubles import FLAVOURS, Processing, Webui, custom, merged_tokens, merges

ON = (custom(),)
ASKED = "strength 0.5, own settings"
SAVED = "75% of attention left out"
pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture(params=FLAVOURS)
def flavour(request):
    return request.param


only_a1111 = pytest.mark.parametrize("flavour", ["a1111"])


def plain(webui, **more):
    """The picture of a webui without the extension."""
    with_us, webui.script = webui.script, object()
    done = webui.job(**more)
    webui.script = with_us
    return done


def passes(webui, p):
    """Which passes (first, hires) of a job merge."""
    webui.process(p)
    records = webui.part("merging").job_of(p).records
    return tuple(any(one.merged_anything for one in getattr(records.get(hires), "reports", ()))
                 for hires in (False, True))  # fmt: skip


ZERO = {"enabled": True, "strength": 0, "method": "cluster", "only_if_it_pays": False}  # whatever is set besides
NOTHING = [(False,), (ZERO,), (True, 0.0), (True, 0), (custom(0.0),), (True, 9.0)]


@pytest.mark.parametrize("args", some_quick(NOTHING, 2))
def test_off_strength_zero_and_wrong_values_are_bit_identical_to_no_extension(webui, args):
    expected = plain(webui, enable_hr=True)
    done = webui.job(*args, enable_hr=True)
    assert torch.equal(done.latents, expected.latents)
    assert done.infotexts == expected.infotexts == [""]


@pytest.mark.parametrize(("where", "merged"), [
    ("everywhere", (True, True)), ("first pass", (True, False)), ("hires pass", (False, True)),
])  # fmt: skip
def test_each_choice_of_where(webui, where, merged):
    without, p = (Processing(webui, args, enable_hr=True) for args in ((False,), (custom(where=where),)))
    assert passes(webui, p) == merged and passes(webui, without) == (False, False)
    assert torch.equal(p.first, without.first) != merged[0]


def test_every_step_of_every_batch_merges(webui):
    done = webui.job(*ON, n_iter=3, batch_size=2)
    assert done.comments == f"ToMe: {ASKED}, 12 steps, {SAVED}\n"
    assert merged_tokens(done.extra_generation_params) == [(1, 64, 32, 32)]


@only_a1111
def test_the_report_says_what_merged_in_the_mlp(webui):
    webui.load(ldm_wrapped())  # which has a second level
    done = webui.job(custom(level="up to /2", merge_mlp=True), size=16)
    assert merged_tokens(done.extra_generation_params) == [
        (1, 256, 128, None), (1, 256, 128, 128), (2, 64, 32, None), (2, 64, 32, 32),
    ]  # fmt: skip
    assert done.comments == f"ToMe: {ASKED}, 4 steps, {SAVED}\n"


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_all_webuis_give_the_same_picture(monkeypatch, flavour):
    pictures = []
    for one in (flavour, "a1111"):
        webui = Webui(monkeypatch, one).start()
        pictures.append(webui.job(*ON, enable_hr=True).latents)
        webui.call("script_unloaded")
    assert torch.equal(*pictures)


@only_a1111
def test_a_stranger_who_samples_after_an_exception_is_not_merged(webui):
    def fail(step):
        raise RuntimeError

    expected = plain(webui)
    with pytest.raises(RuntimeError):
        webui.job(*ON, at_step=fail)
    assert torch.equal(plain(webui).latents, expected.latents)  # no hook, but its denoiser says whose it is
    webui.part("merging").armed.disarm()


def test_a_job_inside_a_job_has_its_own_wish_and_the_outer_one_goes_on(webui):
    inner = []

    def detail(step):
        if step == "postprocess_image":
            inner.append(webui.job(False).latents)

    expected = plain(webui).latents
    alone = webui.job(*ON, n_iter=2)
    done = webui.job(*ON, n_iter=2, at_step=detail)
    assert torch.equal(done.latents, alone.latents)
    assert done.comments == alone.comments
    assert all(torch.equal(one, expected) for one in inner)


@only_a1111
def test_a_job_between_two_steps_is_left_alone(webui):
    inner = []

    def interlude(step):
        if step == 1:
            inner.append(plain(webui).latents)

    expected = plain(webui).latents
    alone = webui.job(*ON)
    # at_step comes after the outer step was announced: the inner job's steps take the patch off from the third on
    done = webui.job(*ON, at_step=interlude)
    assert torch.equal(inner[0], expected)
    assert done.comments == alone.comments


def test_a_copy_of_a_job_does_not_merge_by_the_first_ones_wish(webui):
    p = Processing(webui, ON)
    webui.process(p)
    twin = copy.copy(p)
    assert webui.part("merging").job_of(twin) is None
    webui.hook("process_before_every_sampling", twin)
    assert not merges(webui.unet)


def test_the_refiner_is_merged_too(webui):
    first, second = webui.shared.sd_model, ldm_wrapped()
    done = webui.job(*ON, refiner=second)
    assert done.comments == f"ToMe: {ASKED}, 4 steps, 72% of attention left out\n", "it has a level more"
    assert not merges(second)
    webui.shared.sd_model = first


def test_a_refiner_that_cannot_merge_is_tried_once_and_named(webui, monkeypatch):
    merging, tried = webui.part("merging"), []
    monkeypatch.setattr(merging, "patch", lambda *args, own=merging.patch, **kw: tried.append(args) or own(*args, **kw))
    first, second = webui.shared.sd_model, torch.nn.Module()
    second.model = torch.nn.Module()
    second.model.diffusion_model = Blank()
    done = webui.job(*ON, refiner=second)
    assert "is not known: no attention function" in done.comments and SAVED in done.comments
    assert len(tried) == 2
    webui.shared.sd_model = first


class Blank(torch.nn.Module):
    def forward(self, x, timesteps, context):
        return x * 0.1


@only_a1111
def test_the_levels_of_another_family_count_from_its_finest(webui):
    webui.load(ldm_wrapped())
    webui.shared.sd_model.model.diffusion_model = ldm_latent_diffusion()
    done = webui.job(*ON, size=16)
    assert merged_tokens(done.extra_generation_params) == [(2, 64, 32, 32)]
    forced = webui.job(custom(level="up to /1"))
    assert "nothing merged: nothing will merge: no rule reaches a level" in forced.comments


@only_a1111
def test_an_active_sd_unet_and_hypertile_are_left_alone_and_named(webui):
    expected = plain(webui).latents
    webui.shared.opts.data["hypertile_enable_unet"] = True
    done = webui.job(*ON)
    assert torch.equal(done.latents, expected) and "HyperTile is on" in done.comments
    webui.shared.opts.data["hypertile_enable_unet"] = False
    webui.put("modules.sd_unet", current_unet=object())
    done = webui.job(*ON)
    assert torch.equal(done.latents, expected) and "an SdUnet" in done.comments


@only_a1111
def test_hypertile_in_the_second_pass_only_stops_the_second_pass(webui):
    webui.shared.opts.data["hypertile_enable_unet_secondpass"] = True
    assert passes(webui, Processing(webui, ON, enable_hr=True)) == (True, False)


@only_a1111
@pytest.mark.parametrize("while_merging", [False, True])
def test_hypertile_that_was_on_once_changes_no_picture_of_ours(webui, while_merging):
    """A1111 leaves its wrappers on the attentions for good, and they what they found: one of our wraps, it may be."""
    expected = webui.job(*ON).latents
    attentions = [one for name, one in webui.unet.named_modules() if name.endswith("attn1")]
    handle = webui.engine("hosting").patch(webui.unet, ratio=0.5)
    if not while_merging:
        handle.remove()
    for attention in attentions:
        params = types.SimpleNamespace(enabled=False, forward=attention.forward)

        @functools.wraps(params.forward)
        def wrapper(*args, params=params, **kwargs):
            return params.forward(*args, **kwargs)

        vars(attention).update(__webui_hypertile_params=params, forward=wrapper)
    handle.remove()
    assert torch.equal(webui.job(*ON).latents, expected)
    for attention in attentions:
        vars(attention)["__webui_hypertile_params"].enabled = True  # as after the first of several pictures' hires pass
    done = webui.job(*ON)
    assert torch.equal(done.latents, plain(webui).latents) and "nothing merged: HyperTile is on" in done.comments
    for attention in attentions:
        del attention.forward


@pytest.mark.parametrize("pictures", [1, 2])
def test_a_foreign_forward_left_on_the_blocks_keeps_working(webui, pictures):
    """ControlNet's reference mode replaces `_forward` of every block and leaves it there; another picture's tokens may
    come beside the own ones.
    """
    seen = []
    for block in [one for one in webui.unet.modules() if type(one).__name__ == "BasicTransformerBlock"]:
        def foreign(x, context=None, block=block):
            seen.append(x.shape[1])
            bank = block.norm1(x)
            x = block.attn1(bank, context=torch.cat([bank] * pictures, dim=1)) + x
            x = block.attn2(block.norm2(x), context=context) + x
            return block.ff(block.norm3(x)) + x

        block._forward = foreign
    expected = plain(webui).latents
    done = webui.job(*ON)
    merged = pictures == 1
    assert set(seen) == {64} and torch.equal(done.latents, expected) != merged
    assert (SAVED if merged else "nothing merged: keys and values are not the picture's tokens") in done.comments
    assert torch.equal(webui.job(False).latents, expected)


@only_a1111
def test_a_given_destination_seed_outweighs_the_images(webui):
    own, other, same = (webui.job(custom(merge_seed=seed)).latents for seed in (0, 123456, 7))
    assert not torch.equal(own, other) and torch.equal(own, same)
