"""The section "Token Merging (ToMe)" of the settings tab, with four items. They can be read without the tab."""

from typing import Any

from . import host
from .job_settings import DEFAULTS, WHERE

SECTION = ("tome", "Token Merging (ToMe)")
REPORT = "tome_report"
BOTH, CONSOLE, PAGE, NOWHERE = REPORTS = ("console and page", "console", "page", "nowhere")
# the first three are the defaults of jobs without these values (API calls); as quicksettings they change the panels
_ITEMS = (
    ("tome_enabled", DEFAULTS["enabled"], "Merge tokens",
     "the default of API calls; if you change it, the panels change too", {}),
    ("tome_strength", DEFAULTS["strength"], "Strength of merging",
     "0 is off, .25 quality, .5 balanced, .75 fast, 1 max", {"minimum": 0.0, "maximum": 1.0, "step": 0.01}),
    ("tome_where", DEFAULTS["where"], "Where to merge", "for pictures with Hires. fix", {"choices": list(WHERE)}),
    (REPORT, BOTH, "Show the report in", "a line after each job; API calls always get the report",
     {"choices": list(REPORTS)}),
)  # fmt: skip
_DEFAULTS = {key: default for key, default, *_ in _ITEMS}


def value(key: str) -> Any:
    """Return the value of a setting of this section by key, such as "tome_strength"; its default if None or missing."""
    return host.option(key, _DEFAULTS[key])


def default_of(name: str) -> Any:
    """Return the tab's unchecked "enabled", "strength" or "where" (its default if unset), for jobs without it."""
    return value(f"tome_{name}")


def is_shown(place: str) -> bool:
    """Tell whether the report is shown in a place, `CONSOLE` or `PAGE`."""
    return value(REPORT) in (BOTH, place)


def register() -> None:
    """Add the section to the settings tab. The webui calls this when it builds the tab."""
    for item in _ITEMS:
        host.add_option(*item, SECTION)
