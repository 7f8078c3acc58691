"""Which passes of which jobs merge, in the callback orders of the webuis, on a real LDM UNet."""

from __future__ import annotations

import functools
import types

import pytest
import torch

from tests.models import ldm_wrapped
from tests.webui_doubles import ASKED, FLAVOURS, FREE, ON, SAVED, custom, merged_tokens, merges

# whatever is set besides; a wrong strength; and no argument that says it
OFF = [(), (False,), ({**FREE, "strength": 0, "method": "cluster"},), (custom(0.0),), (True, 9.0)]
WHERE = {"everywhere": (True, True), "first pass": (True, False), "hires pass": (False, True)}


@pytest.mark.parametrize("flavour", [*FLAVOURS, "sdnext"])
def test_off_is_bit_identical_and_on_exactly_the_passes_that_are_asked_for_merge(webui):
    plain = webui.plain(enable_hr=True)
    for args in OFF:
        job = webui.job(*args, enable_hr=True)
        assert torch.equal(job.latents, plain.latents) and job.infotexts == [""], args
    webui.process(unmerged := webui.processing(webui, (False,), enable_hr=True))
    for where, merged in WHERE.items():
        job = webui.process(p := webui.processing(webui, (custom(where=where),), enable_hr=True))
        passes = [merged_tokens(job.extra_generation_params, name) != [] for name in ("first pass", "hires pass")]
        assert passes == [*merged] and torch.equal(p.first, unmerged.first) != merged[0]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_step_of_every_batch_merges(webui):
    assert webui.job(*ON, n_iter=3, batch_size=2).comments == f"ToMe: {ASKED}, 12 steps, {SAVED}\n"


# --- other jobs beside ours, and other models -------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", ["a1111", "forge"])
def test_a_job_inside_a_job_has_its_own_wish_and_the_outer_job_goes_on(webui):
    inner, goes_on = [], []

    def between_batches(step):
        if step == "postprocess_image":
            inner.append(webui.job(False).latents)

    def between_steps(step):
        # it comes after the outer step was announced: the inner job's steps take the patch off from the third on
        if step == 1:
            inner.append(webui.plain().latents)
        elif step == 2:
            goes_on.append(merges(webui.unet))

    expected, alone = webui.plain().latents, webui.job(*ON, n_iter=2)
    for look in (between_batches, between_steps):
        job = webui.job(*ON, n_iter=2, at_step=look)
        assert job.comments == alone.comments
        assert look is between_steps or torch.equal(job.latents, alone.latents)
    assert goes_on == [True, True] and len(inner) == 4 and all(torch.equal(latents, expected) for latents in inner)


@pytest.mark.parametrize("flavour", ["a1111", "forge"])
def test_the_refiner_merges_too_or_is_named(webui):
    first, second = webui.shared.sd_model, ldm_wrapped()
    job = webui.job(*ON, refiner=second)
    assert job.comments == f"ToMe: {ASKED}, 4 steps, 72% of attention left out\n", "it has a level more"
    assert not merges(second)
    webui.shared.sd_model = first
    second.model.diffusion_model = torch.nn.Linear(2, 2)  # without an attention that is known
    second.model.diffusion_model.forward = lambda x, timesteps, context: x * 0.1
    comments = webui.job(*ON, refiner=second).comments
    assert comments.count("is not known: no attention function") == 1 and SAVED in comments
    webui.shared.sd_model = first


# --- what has put something on the model ------------------------------------------------------------------------------


def test_an_active_sd_unet_and_hypertile_are_left_alone_and_named(webui):
    expected, settings = webui.plain().latents, webui.shared.opts.data
    settings["hypertile_enable_unet_secondpass"] = True
    comments = webui.job(*ON, enable_hr=True).comments
    assert f"first pass: 4 steps, {SAVED}; hires pass: nothing merged: HyperTile" in comments
    settings["hypertile_enable_unet"] = True
    job = webui.job(*ON)
    assert torch.equal(job.latents, expected) and "HyperTile is on" in job.comments
    settings["hypertile_enable_unet"] = False
    webui.put("modules.sd_unet", current_unet=object())
    job = webui.job(*ON)
    assert torch.equal(job.latents, expected) and "an SdUnet" in job.comments


def test_hypertile_that_was_on_once_changes_no_picture_of_ours(webui):
    """A1111 leaves its wrappers on the attentions for good, and they what they found: one of our wraps, it may be."""
    expected = webui.job(*ON).latents
    handle = webui.engine("hosting").patch(webui.unet, ratio=0.5)
    attentions = [module for name, module in webui.unet.named_modules() if name.endswith("attn1")]
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
    job = webui.job(*ON)
    assert torch.equal(job.latents, webui.plain().latents) and "nothing merged: HyperTile is on" in job.comments
    for attention in attentions:
        del attention.forward
