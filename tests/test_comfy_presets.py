"""Presets in ComfyUI: what they stand for in the nodes, and what the page's script makes of the widgets."""

from __future__ import annotations

import pytest
import torch

import tome_core
from comfy_nodes import host
from comfy_nodes.inputs import OWN, PRESETS, SETTINGS, config_of, input_types, values_of
from comfy_nodes.nodes import ApplyToMe
from tests.comfy_doubles import Guider, ModelPatcher, checkpoint
from tests.comfy_page import page_with
from tome_core import MergeConfig, MergeRule
from tome_core.presets import DEFAULT

NAMES = tome_core.PRESETS


def apply(patcher: ModelPatcher, **values) -> ModelPatcher:
    return ApplyToMe().apply(patcher, unique_id="5", **values)[0]


# --- the node --------------------------------------------------------------------------------------------------------


def test_the_preset_is_the_first_input_and_begins_with_the_engines_own():
    required = input_types()["required"]
    assert next(iter(required)) == "preset"
    choices, facts = required["preset"]
    assert choices == list(PRESETS) == ["off", *NAMES, "custom"] and facts["default"] == DEFAULT


@pytest.mark.parametrize("name", NAMES)
def test_the_inputs_can_say_all_of_a_preset(name):
    rule = tome_core.preset(name)
    assert config_of({"preset": name}) == MergeConfig(rules=(rule,))
    assert config_of({"preset": "custom", **values_of(rule)}) == MergeConfig(rules=(rule,))
    assert ApplyToMe.VALIDATE_INPUTS(preset="custom", **values_of(rule)) is True


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_outweighs_the_inputs_beside_it_but_for_seed_and_smallest_picture(name):
    wanted = config_of({"preset": name})
    assert config_of({"preset": name, "ratio": 0.123, "method": "cluster", "keep": 7.0, "early_ratio": 9}) == wanted
    own = config_of({"preset": name, "merge_seed": 5, "min_pixels": 7}).rules[0]
    assert (own.seed, own.min_pixels) == (5, 7)


def test_without_a_preset_or_with_custom_the_values_count():
    for preset in ({}, {"preset": None}, {"preset": "custom"}):
        assert config_of({**preset, "ratio": 0.3}) == MergeConfig(ratio=0.3)
        assert config_of({**preset, "early_ratio": 0.5, "keep": 40}).rules[0] == MergeRule(early_ratio=0.5, keep=40)
        assert config_of({**preset, "early_ratio": -1}) == config_of({**preset, "early_ratio": None}) == MergeConfig()


def test_a_new_nodes_values_are_the_preset_that_it_shows():
    inputs = {**input_types()["required"], **input_types()["optional"]}
    values = {name: facts["default"] for name, (_, facts) in inputs.items()}
    assert config_of(values) == MergeConfig(rules=(tome_core.preset(DEFAULT),))


def test_off_leaves_the_branch_alone_and_replaces_an_earlier_node():
    plain = checkpoint()
    off = apply(apply(plain), preset="off", ratio=0.5)
    assert host.attached(off) is None and torch.equal(Guider(off).sample(), Guider(plain).sample())
    assert ApplyToMe.VALIDATE_INPUTS(preset="off") is True


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_merges(name):
    plain, values = checkpoint(), values_of(tome_core.preset(name))
    merged = Guider(apply(plain, **{**values, "only_if_it_pays": False})).sample()  # the picture is a small one
    assert not torch.equal(merged, Guider(plain).sample())


# --- the page's script -----------------------------------------------------------------------------------------------

STUB = """
export const app = { registerExtension(one) { this.extension = one } };
"""
# a node as the frontend makes it: widgets at their defaults; a workflow sets them by position, a person through
# callbacks, and a prompt asks serializeValue
DRIVER = """
import { app } from "./scripts/app.js";
import "./extensions/pack/presets.js";
const { inputs, cases } = JSON.parse(process.argv[2]);
const nodeData = { name: "ApplyToMe", input: inputs };
class ApplyToMe {}
app.extension.beforeRegisterNodeDef(ApplyToMe, nodeData);
class Other {}
app.extension.beforeRegisterNodeDef(Other, { name: "KSampler", input: {} });
if (Object.getOwnPropertyNames(Other.prototype).length > 1) throw "another node was changed";

// as the frontend's useFloatWidget has it, 1.49.6
function asFloat({ step, round }) {
  return { step2: step, round, precision: Math.max(0, -Math.floor(Math.log10(step))) };
}
function round(widget) {
  const { round, precision } = widget.options;
  if (typeof widget.value === "number") {
    widget.value = Number((Math.round(widget.value / round) * round).toFixed(precision));
  }
}

const acts = {
  load(node, values) {
    values.forEach((value, place) => { node.widgets[place].value = value });
    node.onConfigure({ widgets_values: values });
  },
  touch(node, [name, value]) {
    const widget = node.widgets.find((one) => one.name === name);
    widget.value = value;
    widget.callback(value);
  },
  async wait() { await new Promise((done) => setTimeout(done)) },
};
async function told(steps) {
  const node = Object.assign(new ApplyToMe(), { drawn: 0, setDirtyCanvas() { this.drawn += 1 } });
  node.widgets = Object.entries({ ...inputs.required, ...inputs.optional }).map(([name, [kind, facts]]) => ({
    name, value: facts.default, options: kind === "FLOAT" ? asFloat(facts) : {},
    callback() { this.called = true; if (kind === "FLOAT") round(this) },
  }));
  node.onNodeCreated();
  for (const [act, argument] of steps) await acts[act](node, argument);
  const values = Object.fromEntries(node.widgets.map((one) => [one.name, one.value]));
  const prompt = Object.fromEntries(node.widgets.map((one) => [one.name, one.serializeValue?.() ?? one.value]));
  const shown = Object.fromEntries(node.widgets.filter((one) => one.options.step2 && !isNaN(one.value))
    .map((one) => [one.name, one.value.toFixed(one.options.precision)]));
  const called = node.widgets.filter((one) => one.called).map((one) => one.name);
  return { values, prompt, shown, drawn: node.drawn, called };
}
console.log(JSON.stringify(await Promise.all(cases.map(told))));
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """What a node of the page is like after some acts: lists of (act, argument) to what it tells."""
    page = page_with("presets.js", STUB, DRIVER, tmp_path_factory.mktemp("page"))

    def run(*steps):
        return page({"inputs": input_types(), "cases": [steps]})[0]

    return run


WAIT = ("wait", None)
DEFAULTS = {name: facts["default"] for part in input_types().values() for name, (_, facts) in part.items()}
OLD = ["custom", 0.35, "up to /2", 0.1, 0.8, 65536, "bipartite", "q+k+v", True, True, 3, 4, False, 99]


def filled(name: str) -> dict:
    return {**DEFAULTS, "preset": name, **values_of(tome_core.preset(name))}


def test_a_new_node_is_filled_with_what_its_preset_stands_for(page):
    told = page(WAIT)
    assert told["values"] == filled(DEFAULT)
    assert told["prompt"] == {**filled(DEFAULT), "preset": "custom"}, "the prompt holds the resolved values"


@pytest.mark.parametrize("name", NAMES)
def test_choosing_a_preset_fills_the_widgets(page, name):
    own = {"merge_seed": 5, "min_pixels": 7}
    told = page(WAIT, *(("touch", one) for one in own.items()), ("touch", ("preset", name)))
    assert told["values"] == {**filled(name), **own}
    assert config_of(told["prompt"]) == config_of({"preset": name, **own})
    assert told["drawn"], "a canvas shows the old values until it is drawn anew"


@pytest.mark.parametrize("name", NAMES)
def test_a_presets_numbers_are_shown_as_they_are_and_can_be_typed(page, name):
    """Two decimals, as many as the step has, show 0.9375 as 0.94, and make it 0.94 where a person types it."""
    told = page(WAIT, ("touch", ("preset", name)))
    assert {name: float(text) for name, text in told["shown"].items()}.items() <= filled(name).items()
    by_hand = [("touch", one) for one in values_of(tome_core.preset(name)).items()]
    typed = page(WAIT, ("touch", ("preset", "custom")), *by_hand)
    assert typed["values"] == {**filled(name), "preset": "custom"}


def test_numbers_have_no_more_decimals_than_they_need(page):
    shown = page(WAIT, ("touch", ("preset", "custom")), ("touch", ("ratio", 0.5)))["shown"]
    assert (shown["ratio"], shown["start_percent"], shown["query_ratio"], shown["keep"]) == (
        "0.500000", "0.00", "0.00", f"{tome_core.preset(DEFAULT).keep:g}")  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in OWN])
def test_touching_a_widget_makes_it_custom_and_its_own_callback_is_still_called(page, name):
    told = page(WAIT, ("touch", (name, "another")))
    assert told["values"] == {**filled(DEFAULT), "preset": "custom", name: "another"} and name in told["called"]


def test_custom_and_off_leave_the_values_alone_and_off_stays_off(page):
    told = page(WAIT, ("touch", ("preset", "custom")))
    assert told["values"] == {**filled(DEFAULT), "preset": "custom"} == told["prompt"]
    told = page(WAIT, ("touch", ("preset", "off")), ("touch", ("ratio", 0.4)))
    assert told["values"] == {**filled(DEFAULT), "preset": "off", "ratio": 0.4} == told["prompt"]


def test_an_old_workflow_means_what_it_meant(page):
    told = page(("load", OLD), WAIT)
    assert told["values"] == {**DEFAULTS, **dict(zip(DEFAULTS, OLD, strict=False))} == told["prompt"]
    before = {name: value for name, value in zip(DEFAULTS, OLD, strict=False) if name != "preset"}
    assert config_of(told["prompt"]) == config_of(before)


def test_a_saved_preset_opens_as_it_was_saved(page):
    assert page(("load", list(filled(NAMES[-1]).values())), WAIT)["values"] == filled(NAMES[-1])


def test_a_workflow_whose_values_are_no_longer_its_presets_opens_as_custom(page):
    saved = {**filled(NAMES[-1]), "ratio": 0.123}
    told = page(("load", list(saved.values())), WAIT)
    assert told["values"] == {**saved, "preset": "custom"} == told["prompt"]


def test_a_preset_without_values_opens_filled(page):
    """As a workflow made by hand has it, or one saved where this script did not run."""
    for values in ([NAMES[0]], [NAMES[0], *list(DEFAULTS.values())[1:]]):
        assert page(("load", values), WAIT)["values"] == filled(NAMES[0])
