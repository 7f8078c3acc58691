"""Example workflows on a real ComfyUI's page, in a browser: each opens as saved, runs, and shows the whole report."""

import itertools
from typing import Any

import pytest

from tests.hosts.comfyui.running import run_script, workflow

SIZE, STEPS = 256, 2  # the smallest picture for which merging pays on a CPU
SEEDS = itertools.count()  # seeds of samplers, which report nothing if their result is in the cache
PATIENCE = 600_000  # milliseconds
READY = "window.app?.extensionManager && window.app.vueAppReady !== false && window.app.canvas && window.app.graph"
OPEN = "async (flow) => { await app.loadGraphData(flow, true, true, 'test'); }"
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


@pytest.fixture(scope="module")
def furnished(checkout, base, chromium, comfy):
    """The server, with the checkpoint that the workflows load."""
    run_script(checkout, "make_models.py", "checkpoint", base / "models")
    return comfy


@pytest.fixture(params=[False, True], ids=["canvas", "vue"])
def page(request, chromium, furnished):
    """vue: nodes are drawn with Vue ("Nodes 2.0")."""
    for name, value in (("TutorialCompleted", True), ("VueNodes.Enabled", request.param)):
        furnished.ask(f"/settings/Comfy.{name}", value)
    opened = chromium.new_page(viewport={"width": 1600, "height": 1000})
    opened.set_default_timeout(PATIENCE)
    opened.goto(furnished.url, wait_until="domcontentloaded")
    opened.wait_for_function(READY)
    yield opened
    opened.close()


def nodes_of(page: Any) -> list[dict[str, Any]]:
    """The type, box and widgets' texts of each node, after drawing and texts have enlarged it."""
    before = None
    while (now := page.evaluate(NODES)) != before:
        before = now
        page.wait_for_timeout(1500)
    return now


def open_graph(page: Any, flow: dict) -> list[dict[str, Any]]:
    """Open a graph as from a file; again if the page's first graph loaded late and replaced it."""
    kinds, nodes = sorted(node["type"] for node in flow["nodes"]), []
    while sorted(node["type"] for node in nodes) != kinds:
        page.evaluate(OPEN, flow)
        nodes = nodes_of(page)
    return nodes


def applied_in(nodes: list[dict]) -> dict[str, Any]:
    (node,) = [node for node in nodes if node["type"] == "ApplyToMe"]
    return node


def made_small(flow: dict) -> dict:
    """The workflow with fewer steps and smaller pictures; other sizes in pixels shrink too."""
    scale = SIZE / next(node["widgets_values"][0] for node in flow["nodes"] if node["type"] == "EmptyLatentImage")
    for node in flow["nodes"]:
        values = node.get("widgets_values")
        if node["type"] == "KSampler":
            values[0], values[2] = next(SEEDS), STEPS
        elif node["type"] == "EmptyLatentImage":
            values[:2] = [SIZE, SIZE]
        elif node["type"] == "LatentUpscale":
            values[1:3] = [round(side * scale / 8) * 8 for side in values[1:3]]
    return flow


def run(page: Any, flow: dict) -> list[dict[str, Any]]:
    """Open a graph and run it; return its nodes after the end."""
    open_graph(page, flow)
    assert page.evaluate(QUEUE), "the page refused to queue it"
    page.wait_for_function("window.ended")
    kind, facts = page.evaluate("window.ended")
    assert kind == "execution_success", facts
    return nodes_of(page)


def assert_whole_report_is_seen(page: Any, node: dict, said: str = "% less work") -> None:
    """Assert that the report, with words that it says, lies inside the node, and that no line is wrapped."""
    left, top, width, height = node["box"]
    (report,) = [text for text in node["values"].values() if str(text).startswith("ToMe:")]
    assert said in report
    page.evaluate(AT_FULL_SIZE)
    page.wait_for_timeout(2000)
    texts = page.get_by_text(report.splitlines()[-1].strip()).all()
    # a preview to the right has the same text
    text = [shown for shown in texts if shown.bounding_box()["x"] - 300 < left + width][-1]
    assert [line.strip() for line in text.inner_text().splitlines()] == [line.strip() for line in report.splitlines()]
    seen = text.bounding_box()
    assert top < seen["y"] and seen["y"] + seen["height"] < top + height, "the node has no room for its report"


def test_example_workflows_open_as_they_were_saved_run_and_show_their_whole_report(page):
    """The workflow sdxl is left out: it is txt2img with another checkpoint."""
    for name in ("txt2img", "hires_fix", "easycache"):
        nodes = open_graph(page, workflow(name))
        assert applied_in(nodes)["values"] == {"strength": 0.5, "start": 0, "end": 1}
        assert_whole_report_is_seen(page, applied_in(run(page, made_small(workflow(name)))))


def test_a_node_whose_model_goes_to_no_sampler_says_so_at_the_end_and_inside_itself(page):
    flow = made_small(workflow("txt2img"))
    nodes = {node["type"]: node for node in flow["nodes"]}
    loader, applied, sampler = (nodes[kind] for kind in ("CheckpointLoaderSimple", "ApplyToMe", "KSampler"))
    (link,) = [link for link in flow["links"] if link[1] == applied["id"] and link[3] == sampler["id"]]
    applied["widgets_values"][0] += next(SEEDS) / 100  # a node that is in the cache does not run
    link[1] = loader["id"]
    applied["outputs"][0]["links"].remove(link[0])
    loader["outputs"][0]["links"].append(link[0])
    node = applied_in(run(page, flow))
    assert_whole_report_is_seen(page, node, "no sampler used this model")
