"""In a real webui: however it calls its model, off is the webui without us and on says so; also under its scripts."""

from __future__ import annotations

import urllib.error

import pytest

from tests.hosts.webui.running import ASKED, HALF, SAVED, ours, picture_to_start_from

TILED = "HyperTile is on, whose tiles need every token"
GUIDANCE = {
    "cond and uncond in two calls": {"override_settings": {"batch_cond_uncond": False}},
    "texts of unequal length": {"negative_prompt": "a boat on the shore, " * 20},
    "two prompts at once, several batches": {"prompt": "a lake AND a tree :0.5", "batch_size": 2, "n_iter": 2},
    "uncond left out of every second step": {"s_min_uncond": 20, "steps": 4},
    "no uncond": {"cfg_scale": 1},
}
ATTENTIONS = (
    "sdp - scaled dot product", "sdp-no-mem - scaled dot product without memory efficient attention", "sub-quadratic",
    "V1 - original v1", "InvokeAI", "Doggettx", "None",
)  # fmt: skip
HYPERNETWORK = {"prompt": "a lake <hypernet:small:1>"}


@pytest.mark.parametrize("job", GUIDANCE.values(), ids=GUIDANCE)
def test_however_the_conditions_come(twins, job):
    assert SAVED in twins.law(HALF, **job)


@pytest.fixture
def in_a1111(twins):
    """The twins, and after the test no trace of it in the next picture."""
    if twins.webui.kind != "a1111":
        pytest.skip("the Forges have neither hypernetworks nor HyperTile nor a choice of attentions")
    yield twins
    twins.webui.ask("/sdapi/v1/options", {"cross_attention_optimization": "Automatic"})
    assert SAVED in twins.law(HALF)
    twins.webui.draw(HALF)
    assert twins.webui.routes() == {"bias"}, "HyperTile's wrappers, which stay, are seen through"


def test_by_each_of_a1111s_attentions_and_behind_a_hypernetwork_the_picture_is_the_same(in_a1111):
    """Each counts merged keys as often as they stand for; else another picture would come."""
    webui = in_a1111.webui
    for job in ({}, HYPERNETWORK):
        pictures = []
        for name in ATTENTIONS:
            webui.ask("/sdapi/v1/options", {"cross_attention_optimization": name})
            pictures.append(webui.draw(HALF, **job).pixels)
            assert webui.routes() == {"bias" if name.startswith("sdp - ") else "bias, by torch's own function"}, name
        assert pictures[0] != in_a1111.without.draw_once(**job).pixels
        differences = [max(abs(a - b) for a, b in zip(pictures[0], other, strict=True)) for other in pictures]
        assert max(differences) <= 2, dict(zip(ATTENTIONS, differences, strict=True))


def test_hypertile_leaves_us_the_passes_that_it_leaves_alone(in_a1111):
    job = {"hires": True, "override_settings": {"hypertile_enable_unet_secondpass": True}}
    line = in_a1111.law(HALF, **job, n_iter=2)  # it stays on from the first hires pass to the job's end
    assert line.startswith(f"{ASKED}; first pass: 3 of 6 steps, {SAVED}; hires pass: nothing merged: HyperTile is on")
    assert line.endswith(f"; first pass: {TILED}"), line
    job = {"override_settings": {"hypertile_enable_unet": True}}
    assert in_a1111.law(HALF, **job, merges=False) == f"{ASKED}, nothing merged: {TILED}"


# --- scripts that the user selects, which go on with our jobs' pictures -----------------------------------------------

# a script's arguments in their order, how many jobs it runs, what it begins with
SCRIPTS = {
    "prompts from file or textbox": ([False, False, "start", "a lake\na wall"], 2, {}),
    "loopback": ([2, 0.5, "Linear", "None"], 2, {"init_images": [picture_to_start_from()]}),
    "sd upscale": (["", 64, 0, 2.0], 4, {"init_images": [picture_to_start_from(192)]}),
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_gets_the_pictures_that_it_would_get_and_tells_of_each_job(twins, script):
    args, jobs, more = SCRIPTS[script]
    job = {"script_name": script, "script_args": args, **more}
    if more:
        job |= {"path": "img2img", "denoising_strength": 0.6}
        for webui in twins:  # the first one of a process differs, without us too: it is encoded with unseeded noise
            webui.draw(**job)
    merged, plain = twins.webui.draw(HALF, **job), twins.without.draw(**job)
    assert len(merged.all) == len(plain.all) and len(merged.report["jobs"]) == jobs
    assert twins.webui.draw(**job).all == plain.all and twins.webui.state()["patched"] == 0


def plot(webui, axis, texts):
    """The cells of a plot along one of our axes with `HALF`, their infotexts, and the report."""
    choices = next(arg["choices"] for arg in webui.arguments_of("x/y/z plot") if arg["label"] == "X type")
    types = {"X_type": choices.index(f"[ToMe] {axis}"), **dict.fromkeys(("Y_type", "Z_type"), choices.index("Nothing"))}
    values = webui.values_of("x/y/z plot", **types, X_values=texts, Include_Sub_Images=True,
                             Use_text_inputs_instead_of_dropdowns=True)  # fmt: skip
    picture = webui.draw(HALF, script_name="x/y/z plot", script_args=values)
    cells = [image for image in picture.all if len(image) == min(map(len, picture.all))]
    return cells, picture.facts["infotexts"][-len(cells) :], picture.report


def test_each_cell_of_a_plot_is_the_picture_of_its_settings(twins):
    cells, texts, report = plot(twins.webui, "Ratio", "0, 0.5")
    alone = twins.webui.draw(HALF)
    assert cells == [twins.without.draw_once().pixels, alone.pixels]
    assert [ours(text) for text in texts] == [[], alone.ours]
    assert [job["merged"] for job in report["jobs"]] == [False, True] and report["merged"]
    start = len(twins.webui.log_text())
    with pytest.raises(urllib.error.HTTPError):
        plot(twins.webui, "Strength", "0.5, 1.5")
    assert "[ToMe] strength=1.5 is no number from 0 to 1" in twins.webui.log_text(start)
    assert not twins.webui.our_lines(start), "no cell was drawn"
