"""SD.Next's differences from the other webuis: diffusers' pipelines, no hook between passes, its own names."""

import pytest
import torch

from tests.host_doubles.webuis import FREE, ON, Component, merges, report
from tests.small_models import transformer_pipelines


@pytest.fixture
def flavour():
    return "sdnext"


def test_equal_seeds_give_equal_pictures_whatever_ran_before(webui):
    first = webui.job(FREE, n_iter=2, batch_size=2)  # this job keeps its matches from step to step
    webui.job(*ON)
    assert torch.equal(webui.job(FREE, n_iter=2, batch_size=2).latents, first.latents) and report(first)["merged"]


@pytest.mark.parametrize("is_hires", [False, True])
def test_a_pass_that_fails_leaves_nothing(webui, is_hires):
    expected = webui.job(False).latents
    webui.failing_pass = is_hires
    assert webui.job(*ON, enable_hr=True) is None and not merges(webui.unet)
    webui.failing_pass = None
    assert torch.equal(webui.job(False).latents, expected)


MERGED = "% less work"


@pytest.mark.parametrize(("settings", "lines"), [
    ({"token_merging_method": "ToDo", "todo_ratio": 0.3}, ["SD.Next's own token merging (ToDo 0.3) is on"] * 2),
    ({"hypertile_unet_enabled": True, "hypertile_hires_only": True}, [MERGED, "HyperTile is on"]),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_it_steps_aside_for_the_webuis_own_that_is_on(webui, settings, lines):
    webui.shared.opts.data.update(settings)
    job = webui.job(*ON, enable_hr=True)
    _, first, second = report(job)["line"].split("; ", 2)
    assert lines[0] in first and lines[1] in second
    assert report(job)["merged"] is (MERGED in lines) is (job.infotexts != [""])


def test_a_transformer_that_the_engine_knows_merges_by_its_own_strengths(webui):
    webui.shared.sd_model, webui.given = transformer_pipelines.make("Flux")
    plain, job = webui.job(False).latents, webui.job(FREE)
    assert report(job)["merged"] and job.infotexts != [""] and not torch.equal(job.latents, plain)
    assert webui.part("host").curve() == "transformer"
    assert torch.equal(webui.job(False).latents, plain)


def test_steps_are_the_pipelines_also_if_it_calls_the_model_twice_in_each(webui):
    """Once for each prompt."""
    webui.shared.sd_model, webui.given = transformer_pipelines.make("Wan")
    job = webui.job(FREE)
    assert report(job)["passes"]["first pass"]["calls"] == 4 and ", 2 steps, " in report(job)["line"]


def test_the_infotext_does_not_take_the_name_of_its_own_setting(webui):
    webui.put("modules.infotext", mapping=[("ToMe", "tome_ratio")])
    assert webui.job(FREE).infotexts == ["ToMe strength: 0.5; only_if_it_pays=False"]
    written, value = {"ToMe strength": "0.5; only_if_it_pays=False"}, webui.part("infotext").Paste().value
    assert value("enabled", written) is True and value("strength", written) == 0.5
    assert value("enabled", {"ToMe": "0.5"}) is True, "of another webui"


def test_the_page_knows_the_webuis_controls_by_its_own_names(webui):
    webui.script.ui(False)
    names = ("width", "height", "enable_hr", "scale", "resize_width", "resize_height")
    controls = {f"txt2img_{name}": Component() for name in names}
    for elem_id, control in controls.items():
        webui.call("after_component", control, elem_id)
    assert controls["txt2img_width"].followed[0]["inputs"][-6:] == [*controls.values()]
