"""The webui's own controls that the panels go by: sizes, Hires. fix, and our settings among the quicksettings.

The webui names each control as it makes it, in an order that its user can change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .options import DIAL_KEYS

_HIRES = ("hr-checkbox", "hr_scale", "hr_resize_x", "hr_resize_y")
_IN_SDNEXT = {"enable_hr": "hr-checkbox", "scale": "hr_scale", "resize_width": "hr_resize_x",
              "resize_height": "hr_resize_y"}  # fmt: skip
_OTHERWISE = {f"txt2img_{theirs}": f"txt2img_{name}" for theirs, name in _IN_SDNEXT.items()}
_OF_TAB = {"txt2img": ("width", "height", *_HIRES), "img2img": ("width", "height")}
_SETTINGS = tuple(f"setting_{key}" for key in DIAL_KEYS)
WANTED = frozenset({*_SETTINGS, *_OTHERWISE, *(f"{tab}_{name}" for tab, names in _OF_TAB.items() for name in names)})
_found: dict[str, Any] = {}
_waiting: dict[str, Callable[[dict[str, Any]], None]] = {}  # by tab
_followers: dict[str, list[Any]] = {}  # by setting


def note(elem_id: str, control: Any) -> None:
    """The webui has made one of `WANTED`."""
    if elem_id in _SETTINGS:
        _link(elem_id, control)
        return
    _found[_OTHERWISE.get(elem_id, elem_id)] = control
    _tell(elem_id.partition("_")[0])


def when_made(tab: str, tell: Callable[[dict[str, Any]], None]) -> None:
    """Call back with the tab's own controls, by name, as soon as all of them are there."""
    _waiting[tab] = tell
    _tell(tab)


def forget(tab: str) -> None:
    """The tab is being made anew: what was known of an earlier page is not its."""
    for followers in _followers.values():
        followers[:] = [one for one in followers if one[0] != tab]


def follow(tab: str, name: str, control: Any) -> None:
    """From now on the control shows what our setting of this name is moved to."""
    _followers.setdefault(f"setting_tome_{name}", []).append((tab, control))


def _tell(tab: str) -> None:
    names = _OF_TAB[tab]
    if tab in _waiting and all(f"{tab}_{name}" in _found for name in names):
        _waiting.pop(tab)({name: _found.pop(f"{tab}_{name}") for name in names})


def _link(elem_id: str, setting: Any) -> None:
    controls = [control for _, control in _followers.get(elem_id, [])]
    if controls:
        setting.change(fn=lambda value: [value] * len(controls), inputs=[setting], outputs=controls,
                       show_progress=False, queue=False)  # fmt: skip
