"""Example workflows on a real ComfyUI's page, in a browser: they open as saved, run, and show the whole report."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.hosts.comfyui.running import run_script
from tests.hosts.comfyui.workflows import made_small, overlapping, workflow

SIZE = 256  # pixels a side; as small as merging pays on a CPU
PATIENCE = 600_000  # milliseconds
SEEDS = itertools.count()  # of samplers, which say nothing if their result is in the cache
READY = "window.app?.extensionManager && window.app.vueAppReady !== false && window.app.canvas && window.app.graph"
QUEUE = """
async () => {
  window.ended = null;
  for (const kind of ["execution_success", "execution_error", "execution_interrupted"]) {
    app.api.addEventListener(kind, (event) => { window.ended = [kind, event.detail]; }, { once: true });
  }
  return await app.queuePrompt(0, 1);
}
"""
NODES = """
() => app.graph.nodes.map((node) => ({
  type: node.type, box: [...node.pos, ...node.size],
  values: Object.fromEntries((node.widgets ?? []).map((one) => [one.name, one.value])),
}))
"""
AT_FULL_SIZE = """
() => { app.canvas.ds.scale = 1; app.canvas.ds.offset = [300, 0]; app.canvas.setDirty(true, true); }
"""
INTO_A_SUBGRAPH = """
() => { app.graph.convertToSubgraph(new Set(app.graph.nodes.filter((one) => one.type === "ApplyToMe"))); }
"""


class GraphPage:
    """What a person does on the page of a running server. vue: nodes are drawn with Vue ("Nodes 2.0")."""

    def __init__(self, browser: Any, comfy: Any, vue: bool) -> None:
        for name, value in (("TutorialCompleted", True), ("VueNodes.Enabled", vue)):
            comfy.ask(f"/settings/Comfy.{name}", value)
        self.page = browser.new_page(viewport={"width": 1600, "height": 1000})
        self.page.set_default_timeout(PATIENCE)
        self.page.goto(comfy.url, wait_until="domcontentloaded")
        self.page.wait_for_function(READY)

    def open(self, flow: dict) -> None:
        """As from a file; once more if the graph that a page begins with came late and took its place."""
        kinds, shown = sorted(node["type"] for node in flow["nodes"]), None
        while shown != kinds:
            self.page.evaluate("async (flow) => { await app.loadGraphData(flow, true, true, 'test'); }", flow)
            self._wait_for_stillness()
            shown = sorted(node["type"] for node in self.nodes())

    def queue(self) -> None:
        """Run the graph. AssertionError with what ComfyUI says if it fails."""
        assert self.page.evaluate(QUEUE), "the page refused to queue it"
        self.page.wait_for_function("window.ended")
        kind, facts = self.page.evaluate("window.ended")
        assert kind == "execution_success", facts
        self._wait_for_stillness()

    def _wait_for_stillness(self) -> None:
        """Nodes take their sizes when they are drawn, and texts make them grow."""
        before = None
        while (now := self.nodes()) != before:
            before = now
            self.page.wait_for_timeout(1500)

    def nodes(self) -> list[dict[str, Any]]:
        """Of each node its type, its box, and what its widgets hold and show."""
        return self.page.evaluate(NODES)

    def applied(self) -> dict[str, Any]:
        """The ApplyToMe."""
        (node,) = [node for node in self.nodes() if node["type"] == "ApplyToMe"]
        return node


@pytest.fixture(scope="module")
def furnished(checkout, base, chromium, comfy):
    """The server, with the checkpoint that the workflows load."""
    run_script(checkout, "make_models.py", "checkpoint", base / "models")
    return comfy


@pytest.fixture(params=[False, True], ids=["canvas", "vue"])
def page(request, furnished, chromium):
    opened = GraphPage(chromium, furnished, request.param)
    yield opened
    opened.page.close()


def assert_whole_report_is_seen(page: GraphPage) -> None:
    """It is inside of the node, each of its lines a line."""
    left, top, width, height = page.applied()["box"]
    (report,) = [text for text in page.applied()["values"].values() if str(text).startswith("ToMe:")]
    assert "of attention left out" in report
    page.page.evaluate(AT_FULL_SIZE)
    page.page.wait_for_timeout(2000)
    texts = page.page.get_by_text(report.splitlines()[-1].strip()).all()
    # a preview beside it says the same
    text = [one for one in texts if one.bounding_box()["x"] - 300 < left + width][-1]
    assert [line.strip() for line in text.inner_text().splitlines()] == [line.strip() for line in report.splitlines()]
    seen = text.bounding_box()
    assert top < seen["y"] and seen["y"] + seen["height"] < top + height, "the node has no room for its report"


def test_example_workflows_open_as_they_were_saved_run_and_show_their_whole_report(page):
    """sdxl is txt2img by another checkpoint."""
    for name in ("txt2img", "hires_fix", "easycache"):
        page.open(workflow(name))
        assert not overlapping(page.nodes())
        assert page.applied()["values"] == {"strength": 0.5, "start": 0, "end": 1}
        page.open(made_small(workflow(name), steps=2, size=SIZE, seed=next(SEEDS)))
        page.queue()
        assert_whole_report_is_seen(page)
        assert not overlapping(page.nodes())


def test_a_node_in_a_subgraph_shows_its_report_at_the_subgraphs_node_while_that_is_in_sight(page):
    page.open(made_small(workflow("txt2img"), steps=1, size=SIZE, seed=next(SEEDS)))
    page.page.evaluate(INTO_A_SUBGRAPH)
    page.queue()
    (box,) = [node for node in page.nodes() if not node["type"].isalnum()]
    assert any(str(text).startswith("ToMe: strength 0.5, 1 step, ") for text in box["values"].values()), box
