// Room for ApplyToMe's report. ComfyUI puts a text under a node's widgets, two lines high, and scrolls the rest.
import { app } from "../../scripts/app.js";

const NODE = "ApplyToMe", TEXT = "$$node-text-preview"; // ComfyUI's name for that text, in frontend 1.49
const TALLEST = 200; // pixels, of such a text

/** Once for each node: whoever makes it smaller afterwards wants it so. With Nodes 2.0 the page itself makes room. */
function makeRoom(node) {
  const text = node?.widgets?.find((one) => one.name === TEXT);
  if (!text || node.comfyClass !== NODE || node.tomeHasRoom || globalThis.LiteGraph?.vueNodesMode) return;
  node.tomeHasRoom = true;
  const room = TALLEST - (text.computeLayoutSize?.(node).minHeight ?? 0);
  const [width, height] = node.size;
  node.setSize([width, Math.max(height, node.computeSize()[1] + room)]);
}

app.registerExtension({
  name: "tome_core.report",
  setup() {
    // the page's own listener, which adds the text, may come after this one
    app.api.addEventListener("progress_text", ({ detail }) => {
      setTimeout(() => makeRoom(app.graph.getNodeById(detail.nodeId)));
    });
  },
});
