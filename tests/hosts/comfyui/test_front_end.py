"""The nodes on a real ComfyUI's page, in a browser: example workflows, and what they show."""

from __future__ import annotations

import pytest

from tests.hosts.comfyui.page import GraphPage, overlapping
from tests.hosts.comfyui.running import run_script
from tests.hosts.comfyui.workflows import WORKFLOWS, made_small, workflow

# pixels a side; as small as merging pays on a CPU
SIZES = {"txt2img": 256, "sdxl": 512, "hires_fix": 256, "easycache": 256}
INTO_A_SUBGRAPH = """
() => { app.graph.convertToSubgraph(new Set(app.graph.nodes.filter((one) => one.type === "ApplyToMe"))); }
"""
KINDS = pytest.mark.parametrize("vue", [False, True], ids=["canvas", "vue"])


@pytest.fixture(scope="module")
def furnished(checkout, base, chromium, comfy):
    """The server, with what the workflows load."""
    run_script(checkout, "make_checkpoints.py", base / "models" / "checkpoints")
    return comfy


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


def whole_report(page: GraphPage) -> str:
    """What ApplyToMe shows. AssertionError where a part of it is outside of the node, or its lines run together."""
    (applied,) = page.nodes("ApplyToMe")
    (report,) = [text for text in applied["values"].values() if str(text).startswith("ToMe:")]
    page.look_at(300, 0)
    left, _, width, _ = applied["box"]
    texts = page.page.get_by_text(report.splitlines()[-1].strip()).all()
    # a preview beside it says the same
    text = [one for one in texts if 300 + one.bounding_box()["x"] < left + width][-1]
    assert [line.strip() for line in text.inner_text().splitlines()] == [line.strip() for line in report.splitlines()]
    seen, (_, top, _, height) = text.bounding_box(), applied["box"]
    assert top < seen["y"] and seen["y"] + seen["height"] < top + height, "the node has no room for its report"
    return report


@pytest.mark.parametrize(("name", "vue"), [*((name, False) for name in WORKFLOWS), (WORKFLOWS[0], True)])
def test_an_example_workflow_opens_as_it_was_saved_runs_and_shows_its_whole_report(page_of, name, vue):
    page = page_of(vue)
    page.open(workflow(name))
    assert not overlapping(page.nodes())
    (applied,) = page.nodes("ApplyToMe")
    assert applied["values"] == {"strength": 0.5, "start": 0, "end": 1}
    page.open(made_small(workflow(name), steps=2, size=SIZES[name], seed=int(vue)))  # a cached sampler says nothing
    page.queue()
    assert "of attention left out" in whole_report(page)
    assert not overlapping(page.nodes())


@KINDS
def test_a_node_in_a_subgraph_shows_its_report_at_the_subgraphs_node_while_that_is_in_sight(page_of, vue):
    page = page_of(vue)
    page.open(made_small(workflow("txt2img"), steps=1, size=256, seed=20 + vue))
    page.page.evaluate(INTO_A_SUBGRAPH)
    page.queue()
    (box,) = [node for node in page.nodes() if not node["type"].isalnum()]
    assert any(str(text).startswith("ToMe: strength 0.5, 1 step, ") for text in box["values"].values()), box
