"""What a person does on a real ComfyUI's page, in a browser that playwright drives."""

from __future__ import annotations

from typing import Any

MINUTE = 60_000
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
# only texts that a node shows, and only where it stands
NODES = """
() => app.graph.nodes.map((node) => ({
  id: node.id, type: node.type, box: [...node.pos, ...node.size],
  values: Object.fromEntries((node.widgets ?? []).map((one) => [one.name, one.value])),
}))
"""
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
TITLE = 30  # pixels, above a node's box


class GraphPage:
    """The page of a running server. vue: draw nodes with Vue ("Nodes 2.0") instead of on the canvas."""

    def __init__(self, browser: Any, comfy: Any, size: tuple[int, int] = (1600, 1000), vue: bool = False) -> None:
        for name, value in (("TutorialCompleted", True), ("VueNodes.Enabled", vue), ("Minimap.Visible", False)):
            comfy.ask(f"/settings/Comfy.{name}", value)
        self.page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        self.page.set_default_timeout(10 * MINUTE)
        self.page.goto(comfy.url, wait_until="domcontentloaded")
        self.page.wait_for_function(READY)

    def open(self, workflow: dict) -> None:
        """As from a file; once more if the graph that a page begins with came late and took its place."""
        kinds, shown = sorted(node["type"] for node in workflow["nodes"]), None
        while shown != kinds:
            self.page.evaluate("async (flow) => { await app.loadGraphData(flow, true, true, 'test'); }", workflow)
            self._wait_for_stillness()
            shown = sorted(node["type"] for node in self.nodes())

    def queue(self) -> None:
        """Run the graph. AssertionError with what ComfyUI says where that fails."""
        assert self.page.evaluate(QUEUE), "the page refused to queue it"
        self.page.wait_for_function("window.ended")
        kind, facts = self.page.evaluate("window.ended")
        assert kind == "execution_success", facts
        self._wait_for_stillness()

    def _wait_for_stillness(self) -> None:
        """Nodes take their sizes when they are drawn, and texts make them grow."""
        before = None
        while (now := [(node["box"], node["values"]) for node in self.nodes()]) != before:
            before = now
            self.page.wait_for_timeout(1500)
            self.page.evaluate(DRAWN)

    def nodes(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What nodes of a type hold and show."""
        return [node for node in self.page.evaluate(NODES) if kind in (None, node["type"])]

    def look_at(self, left: float, top: float) -> None:
        """Move the graph so that this point of it is in the page's upper left corner, at full size."""
        self.page.evaluate(f"() => {{ const {{ ds }} = app.canvas; ds.scale = 1; ds.offset = [{-left}, {-top}];"
                           "app.canvas.setDirty(true, true); }")  # fmt: skip
        self.page.wait_for_timeout(2000)

    def close(self) -> None:
        self.page.close()


def overlapping(nodes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Types of nodes of which one covers a part of the other."""

    def meet(one: list[float], other: list[float]) -> bool:
        (x, y, width, height), (left, top, wide, high) = one, other
        return x < left + wide and left < x + width and y - TITLE < top + high and top - TITLE < y + height

    return [(one["type"], other["type"]) for number, one in enumerate(nodes) for other in nodes[:number]
            if meet(one["box"], other["box"])]  # fmt: skip
