"""ApplyToMe's report has room under the node: the page's script, run by node on a double of the page."""

from __future__ import annotations

import pytest

from tests.comfy_page import page_with

STUB = """
export const extensions = [], listeners = [];
export const app = {
  registerExtension(one) { extensions.push(one); },
  api: { addEventListener(kind, heard) { if (kind === "progress_text") listeners.push(heard); } },
};
"""
# a node as ComfyUI draws it: widgets of 24 pixels, and a text that asks for 58
DRIVER = """
import { app, extensions, listeners } from "./scripts/app.js";
import "./extensions/pack/report.js";
const { kind, size, vue, again } = JSON.parse(process.argv[2]);
globalThis.LiteGraph = { vueNodesMode: vue };
const node = {
  comfyClass: kind, size, widgets: Array.from({ length: 26 }, (_, number) => ({ name: `widget ${number}` })),
  computeSize() {
    return [300, this.widgets.reduce((sum, one) => sum + (one.computeLayoutSize?.().minHeight ?? 24), 34)];
  },
  setSize(size) { this.size = size; },
};
const text = { name: "$$node-text-preview", computeLayoutSize: () => ({ minHeight: 58, minWidth: 64 }) };
app.graph = { getNodeById: (id) => (id === "5" ? node : undefined) };
extensions.forEach((one) => one.setup());
async function say(id) {
  listeners.forEach((heard) => heard({ detail: { nodeId: id, text: "Token merging" } }));
  if (id === "5" && !node.widgets.includes(text)) node.widgets.push(text); // by the page's own listener
  await new Promise((done) => setTimeout(done, 5));
}
await say("7");
await say("5");
if (again) { node.size = again; await say("5"); }
console.log(JSON.stringify(node.size));
"""


@pytest.fixture(scope="module")
def size_after(tmp_path_factory):
    """The size of a node after its report, from its kind and its size before."""
    page = page_with("report.js", STUB, DRIVER, tmp_path_factory.mktemp("page"))

    def run(size, kind="ApplyToMe", vue=False, again=None):
        return page({"kind": kind, "size": size, "vue": vue, "again": again})

    return run


LEAST = 34 + 26 * 24


def test_a_node_that_was_no_taller_than_its_widgets_gets_room_for_twelve_lines(size_after):
    assert size_after([300, LEAST]) == [300, LEAST + 200]


def test_a_node_with_room_keeps_its_size(size_after):
    assert size_after([300, LEAST + 250]) == [300, LEAST + 250]


def test_who_makes_it_smaller_afterwards_is_left_alone(size_after):
    assert size_after([300, LEAST], again=[300, LEAST + 58]) == [300, LEAST + 58]


def test_other_nodes_and_nodes_2_are_left_alone(size_after):
    assert size_after([300, LEAST], kind="KSampler") == [300, LEAST]
    assert size_after([300, LEAST], vue=True) == [300, LEAST]
