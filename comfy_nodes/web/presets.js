// The preset of ApplyToMe: choosing one fills the other widgets, and touching one of those makes it custom.
//
// What a preset stands for comes with the node's definition, from the engine. A prompt holds the filled-in values and
// "custom", a workflow the values and the preset's name: both give the same picture after presets have changed, and a
// workflow whose values are no longer its preset's opens as custom. Without this file the preset decides in the nodes.
import { app } from "../../scripts/app.js";

const NODE = "ApplyToMe", CUSTOM = "custom";

/** What the widgets are at in a prompt that does not mention them. */
function defaultsOf(nodeData) {
  const inputs = { ...nodeData.input.required, ...nodeData.input.optional };
  return Object.fromEntries(Object.entries(inputs).map(([name, [, facts]]) => [name, facts?.default]));
}

class Presets {
  constructor(node, table, defaults) {
    this.node = node;
    this.table = table;
    this.defaults = defaults;
    this.widgets = Object.fromEntries((node.widgets ?? []).map((widget) => [widget.name, widget]));
    this.preset = this.widgets.preset;
    this.listen(this.preset, () => this.fill());
    for (const name of Object.keys(Object.values(table)[0])) {
      this.listen(this.widgets[name], () => this.touched());
      this.showDecimals(this.widgets[name]);
    }
    this.preset.serializeValue = () => (this.isAt(this.values()) ? CUSTOM : this.preset.value);
  }

  /** Only a person's doing calls a widget's callback. The canvas would show old values until the mouse moves. */
  listen(widget, heard) {
    const before = widget.callback, draw = () => this.node.setDirtyCanvas?.(true, true);
    widget.callback = function (...args) {
      const answer = before?.apply(this, args);
      heard();
      draw();
      return answer;
    };
  }

  /** As many as the presets' values have: the step's two would show 0.9375 as 0.94, and make it 0.94 when typed. */
  showDecimals({ name, options }) {
    if (typeof options?.precision !== "number") return;
    const decimals = Object.values(this.table).map((values) => `${values[name]}`.split(".")[1]?.length ?? 0);
    options.precision = Math.max(options.precision, ...decimals);
  }

  /** The chosen preset's values; undefined for off and custom. */
  values() {
    return this.table[this.preset.value];
  }

  fill() {
    for (const [name, value] of Object.entries(this.values() ?? {})) this.widgets[name].value = value;
  }

  touched() {
    if (this.values() && !this.isAt(this.values())) this.preset.value = CUSTOM;
  }

  isAt(values) {
    return !!values && Object.entries(values).every(([name, value]) => this.widgets[name].value === value);
  }

  /** Widgets and preset say the same: of a new node, or of one from a workflow, whose saved values count. */
  settle() {
    const values = this.values();
    if (!values || this.isAt(values)) return;
    const untouched = Object.fromEntries(Object.keys(values).map((name) => [name, this.defaults[name]]));
    if (this.isAt(untouched)) this.fill();
    else this.preset.value = CUSTOM;
  }
}

app.registerExtension({
  name: "tome_core.presets",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== NODE) return;
    const table = nodeData.input.required.preset[1]?.presets;
    if (!table) return;
    const { onNodeCreated, onConfigure } = nodeType.prototype;
    nodeType.prototype.onNodeCreated = function (...args) {
      const answer = onNodeCreated?.apply(this, args);
      this.tomePresets = new Presets(this, table, defaultsOf(nodeData));
      queueMicrotask(() => this.tomePresets.settle()); // whoever made the node may be about to set its values
      return answer;
    };
    nodeType.prototype.onConfigure = function (...args) {
      const answer = onConfigure?.apply(this, args);
      this.tomePresets?.settle();
      return answer;
    };
  },
});
