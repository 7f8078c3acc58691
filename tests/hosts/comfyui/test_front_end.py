"""The nodes on a real ComfyUI's page, in a browser: example workflows, what presets show, and what a person clicks."""

from __future__ import annotations

import shutil

import pytest

from tests.hosts.comfyui.page import GraphPage, overlapping
from tests.hosts.comfyui.running import make, make_base, serve
from tests.hosts.comfyui.workflows import WORKFLOWS, made_small, workflow

# pixels a side; as small as merging pays on a CPU
SIZES = {"txt2img": 256, "sdxl": 512, "hires_fix": 256}
MERGED = {"txt2img": "level 0 (latent /1, 3 blocks): 1024 tokens", "sdxl": "(latent /2",
          "hires_fix": "level 0 (latent /1, 3 blocks): 9216 tokens"}  # fmt: skip
KINDS = pytest.mark.parametrize("vue", [False, True], ids=["canvas", "vue"])


@pytest.fixture(scope="module")
def furnished(checkout, base, chromium, tmp_path_factory):
    """A server with what the workflows load."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "models").mkdir()
    (folder / "models" / "diffusion_models").symlink_to(base / "models" / "diffusion_models")
    make_base(checkout, folder, "tome_core")
    make("make_checkpoints.py", checkout, folder / "models" / "checkpoints")
    with serve(checkout, folder) as running:
        yield running
    shutil.rmtree(folder / "models" / "checkpoints")


@pytest.fixture
def page_of(furnished, chromium):
    """Nodes drawn with Vue or not -> a page of the server."""
    pages = []

    def opened(vue: bool) -> GraphPage:
        pages.append(GraphPage(chromium, furnished, vue=vue))
        return pages[-1]

    yield opened
    for page in pages:
        page.close()


@KINDS
@pytest.mark.parametrize("name", WORKFLOWS)
def test_an_example_workflow_opens_without_nodes_over_one_another_and_with_its_presets_values(page_of, name, vue):
    page = page_of(vue)
    page.open(workflow(name))
    assert not overlapping(page.nodes())
    (applied,) = page.nodes("ApplyToMe")
    presets = page.page.evaluate("LiteGraph.registered_node_types.ApplyToMe.nodeData.input.required.preset[1].presets")
    assert presets[applied["values"]["preset"]].items() <= applied["values"].items()


@pytest.mark.parametrize(("name", "vue"), [*((name, False) for name in WORKFLOWS), (WORKFLOWS[0], True)])
def test_an_example_workflow_runs_and_shows_its_whole_report(page_of, name, vue):
    page = page_of(vue)
    page.open(made_small(workflow(name), steps=2, size=SIZES[name], seed=int(vue)))  # a cached sampler says nothing
    page.queue()
    report = whole_report(page)
    assert MERGED[name] in report and "calls merged" in report
    assert not overlapping(page.nodes())


@KINDS
def test_a_node_as_it_is_added_makes_room_for_its_report(page_of, vue):
    flow = made_small(workflow("txt2img"), steps=1, size=256, seed=10 + vue)
    for node in flow["nodes"]:
        if node["type"] == "ApplyToMe":
            node["size"] = [320, 100]  # the page makes it as tall as its inputs
    page = page_of(vue)
    page.open(flow)
    page.queue()
    assert "calls merged" in whole_report(page)


def whole_report(page: GraphPage) -> str:
    """What ApplyToMe shows. AssertionError where a part of it is outside of the node, or its lines run together."""
    (applied,) = page.nodes("ApplyToMe")
    (report,) = [text for text in applied["values"].values() if "Token merging" in str(text)]
    print(report)
    page.look_at(300, 0)
    text = page.page.get_by_text(report.splitlines()[-1].strip()).last
    assert [line.strip() for line in text.inner_text().splitlines()] == [line.strip() for line in report.splitlines()]
    seen, (_, top, _, height) = text.bounding_box(), applied["box"]
    assert top < seen["y"] and seen["y"] + seen["height"] < top + height, "the node has no room for its report"
    return report


@KINDS
def test_a_preset_shows_its_own_numbers_and_arrows_move_by_the_settings_step(page_of, vue):
    page = page_of(vue)
    page.open(workflow("txt2img"))
    page.look_at(300, 0)
    page.choose("preset", "fast")
    (node,) = page.nodes("ApplyToMe")
    assert (node["values"]["ratio"], node["shown"]["ratio"], page.text_of("ratio")) == (0.9375, "0.9375", "0.9375")
    page.less("ratio")
    (node,) = page.nodes("ApplyToMe")
    assert (node["values"]["ratio"], node["values"]["preset"]) == (0.8875, "custom")
    page.type("ratio", "0.9375")
    (node,) = page.nodes("ApplyToMe")
    assert node["values"]["ratio"] == 0.9375
