"""The plot of quality results: error over attention work left, one line a method."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple

from benchmarks.quality_figures import Mean, Section

MARKERS, COLOURS = "osDv^<>pPXhd", [f"C{number}" for number in range(10)]
TICKS = {1 / 64: "1/64", 1 / 16: "1/16", 1 / 10: "1/10", 1 / 4: "1/4", 1 / 2: "1/2", 1: "1"}
STYLES = {"control": {"color": "firebrick", "linestyle": "--"}, "yardstick": {"color": "grey", "linestyle": ":"}}


class Panel(NamedTuple):
    """What one row of panels shows."""

    label: str
    figures: Callable[[Section], dict[str, Any]]
    error: Callable[[Any], Mean]
    scale: str


PANELS = (
    Panel("dev, % of the unmerged v-loss", lambda section: section.noised, lambda one: one.dev, "log"),
    Panel("PSNR to the unmerged pictures, dB", lambda section: section.pictures, lambda one: one.psnr, "linear"),
)


def size(sections: list[Section]) -> tuple[float, float]:
    """Inches, width and height."""
    return 3 + 5.5 * max(1, len(sections)), 1 + 4.5 * len(_panels(sections))


def _panels(sections: list[Section]) -> list[Panel]:
    return [panel for panel in PANELS if any(panel.figures(section) for section in sections)]


def draw(figure: Any, sections: list[Section]) -> None:
    """Panels into a matplotlib figure: measures below each other, checkpoints side by side."""
    panels = _panels(sections)
    looks = _looks(sections)
    axes = figure.subplots(len(panels), len(sections), squeeze=False, sharey="row")
    for row, panel in zip(axes, panels, strict=True):
        for axis, section in zip(row, sections, strict=True):
            _draw_panel(axis, panel, section, looks)
        row[0].set_ylabel(panel.label)
    named = [pair for axis in axes.flat for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in named}
    figure.legend(handles.values(), handles, loc="outside right upper", fontsize=8)


def _looks(sections: list[Section]) -> dict[str, dict[str, Any]]:
    """Method -> how its line looks, the same in every panel."""
    methods = dict.fromkeys(one["method"] for section in sections for one in section.variants.values()
                            if one["role"] == "method")  # fmt: skip
    # twelve markers and ten colours: sixty pairs before one comes again
    looks = {method: {"color": colour, "marker": marker}
             for method, colour, marker in zip(methods, cycle(COLOURS), cycle(MARKERS), strict=False)}  # fmt: skip
    return {**looks, "tomesd": {"color": "black", "marker": "*", "markersize": 11, "linewidth": 2.5, "zorder": 5}}


def _draw_panel(axis: Any, panel: Panel, section: Section, looks: dict[str, dict[str, Any]]) -> None:
    figures = panel.figures(section)
    lines: dict[str, list[tuple[float, Mean]]] = {}
    beside = cycle((0.01, 0.28, 0.6))  # labels of lines that nearly coincide stand beside each other
    for name, one in figures.items():
        described, error = section.variants[name], panel.error(one)
        if described["role"] in STYLES:
            style = STYLES[described["role"]]
            axis.axhline(error.value, linewidth=1, **style)
            axis.annotate(described["method"], (next(beside), error.value), xycoords=("axes fraction", "data"),
                          fontsize=7, va="bottom", color=style["color"])  # fmt: skip
        else:
            lines.setdefault(described["method"], []).append((one.work, error))
    for method, points in lines.items():
        points.sort(key=lambda point: point[0])
        works, means = zip(*points, strict=True)
        # a schedule's settings are no steps of one dial
        style = {"linestyle": "none"} if method == "schedule" else {"linestyle": "-"}
        axis.errorbar(works, [mean.value for mean in means], [mean.error or 0 for mean in means], label=method,
                      capsize=2, **{**style, "markersize": 6, "linewidth": 1.2, **looks[method]})  # fmt: skip
    axis.set(xscale="log", yscale=panel.scale, xlabel="attention work left", title=section.checkpoint)
    axis.set_xticks(list(TICKS), TICKS.values())
    axis.minorticks_off()
    axis.set_xlim(min(TICKS) * 0.8, 1.1)
    axis.grid(alpha=0.3, which="both")
