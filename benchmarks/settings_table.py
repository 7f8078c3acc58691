"""The settings as a table, from the text that each of them carries: `benchmarks.doc_tables` puts it on its page."""

from __future__ import annotations

from typing import Any

from tome_core import describe_settings


def settings() -> str:
    """One row a setting: name, with the hosts' where it is another, default, range, what it does."""
    rows = ["| setting | default | range | what it does |", "|---|---|---|---|"]
    for setting in describe_settings():
        default = setting.get("unset", "automatic") if setting["default"] is None else f"`{setting['default']}`"
        known_as = f", in the hosts `{setting['known_as']}`" if "known_as" in setting else ""
        cells = (f"`{setting['name']}`{known_as}", default, _range(setting), setting["help"])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _range(setting: dict[str, Any]) -> str:
    if "choices" in setting:
        return ", ".join("automatic" if choice is None else f"`{choice}`" for choice in setting["choices"])
    if "minimum" not in setting:
        return "on, off"
    end = "" if setting["limit"] is None else f" to {setting['limit']:.10g}"
    return f"from {setting['minimum']:.10g}{end}"
