"""However a real webui calls its model, off it draws as without us, and on it reports the merging."""

import pytest

from tests.hosts.webui.running import ASKED, HALF, SAVED
from tests.hosts.webui.test_browser import Page

TILED = "HyperTile is on, whose tiles need every token"
GUIDANCE = {"cond and uncond in two calls": {"override_settings": {"batch_cond_uncond": False}},
            "texts of unequal length": {"negative_prompt": "a boat on the shore, " * 20},
            "two prompts at once, several batches": {"prompt": "a lake AND a tree :0.5", "batch_size": 2, "n_iter": 2},
            "uncond left out of every second step": {"s_min_uncond": 20, "steps": 4},
            "no uncond": {"cfg_scale": 1}}  # fmt: skip
# the first is the host's own choice, by which its checkout draws: on a CPU the second
ATTENTIONS = ("Automatic",  "sdp-no-mem - scaled dot product without memory efficient attention",
              "sdp - scaled dot product", "sub-quadratic", "V1 - original v1", "InvokeAI", "Doggettx",
              "None")  # fmt: skip


@pytest.mark.parametrize("job", GUIDANCE.values(), ids=GUIDANCE)
def test_however_the_conditions_come(twins, job):
    assert SAVED in twins.law(HALF, **job)


@pytest.fixture
def in_a1111(twins):
    """The twins in A1111; after the test the next picture has no trace of it."""
    if twins.webui.kind != "a1111":
        pytest.skip("the Forges have neither HyperTile nor a choice of attentions")
    yield twins
    for webui in twins:
        webui.choose(cross_attention_optimization="Automatic")
    assert SAVED in twins.law(HALF)
    twins.webui.draw(HALF)
    routes = twins.webui.state()["routes"]
    assert routes == ["bias, by torch's own function"], "HyperTile's wrappers, which stay, are seen through"


def test_by_each_of_a1111s_attentions_it_merges_and_the_picture_is_the_same(in_a1111):
    """Each attention counts a merged key once for each of its tokens; otherwise the picture would differ."""
    webui, pictures = in_a1111.webui, []
    for name in ATTENTIONS:
        told = [each.choose(cross_attention_optimization=name) for each in in_a1111]
        assert name == ATTENTIONS[0] or all("ttention optimization" in text for text in told), "it was changed"
        assert SAVED in in_a1111.law(HALF)
        pictures.append(webui.draw(HALF).pixels)
        route = "bias" if name.startswith("sdp - ") else "bias, by torch's own function"
        assert webui.state()["routes"] == [route], name
    differences = [max(abs(a - b) for a, b in zip(pictures[0], other, strict=True)) for other in pictures]
    assert max(differences) <= 2, dict(zip(ATTENTIONS, differences, strict=True))


def test_hypertile_leaves_us_the_passes_that_it_leaves_alone(in_a1111):
    job = {"hires": True, "override_settings": {"hypertile_enable_unet_secondpass": True}}
    line = in_a1111.law(HALF, **job, n_iter=2)  # merging stays on from the first hires pass to the job's end
    first = f"first pass: 3 of 6 steps in 2 batches, {SAVED}"
    assert line.startswith(f"{ASKED}; {first}; hires pass: nothing merged: HyperTile is on"), line
    assert line.endswith(f"; first pass: {TILED}"), line
    job = {"override_settings": {"hypertile_enable_unet": True}}
    assert in_a1111.law(HALF, **job, merges=False) == f"{ASKED}, nothing merged: {TILED}"


def test_the_panels_line_answers_again_after_each_picture(in_a1111, chromium):
    """HyperTile, which is set elsewhere, changes the answer. This test is the last, because its wrappers stay."""
    with chromium.new_page(viewport={"width": 1280, "height": 1300}) as tab:
        page = Page(tab, in_a1111.webui)
        page.be_small()
        page.wait("line", "/[0-9]+x[0-9]+: about /.test(it.textContent)")
        for is_on, text in ((True, "HyperTile is on"), (False, ": about ")):
            in_a1111.webui.choose(hypertile_enable_unet=is_on)
            page.draw()
            page.wait("line", f"it.textContent.includes('{text}')")
