"""What a person does on the page, and what the page then shows: part -> value, or an update of gradio's.

Parts are the controls by name, and `SHOWN`. Nothing here knows where a part stands.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from demo import command, page_code, prompt
from demo import page_controls as controls
from demo.page_code import Wanted
from demo.page_run import DONE, WARMING, Shot, Studio, enlarged

SHOWN = ("preset", "says", "slider", "figures", "difference", "maps", "report", "stop", "script", "payload", "node",
         "lost", "link", "wrong")  # fmt: skip
# the picture's own controls: label, and what a value has to be
PICTURE = {"prompt": ("Prompt", None), "picture_seed": ("Seed of the picture", command.SEED),
           "steps": ("Steps", command.STEPS)}  # fmt: skip
NAMES = (*PICTURE, *controls.NAMES)
WORDS = f"The embedded model knows {prompt.known_words()}."
SLOW = 0.5  # seconds between two unfinished pictures, because sending them takes time from making them
PROGRESS = (
    '<p role="status">{doing}</p><progress max="1" value="{share:.3f}" aria-label="Progress"></progress><p>{left}</p>'
)

Values = Mapping[str, Any]
Parts = dict[str, Any]


class Wrong(ValueError):
    """A value that is not possible; names: of the controls to mark."""

    def __init__(self, sentence: str, names: tuple[str, ...]) -> None:
        super().__init__(sentence)
        self.names = names


class Events:
    """start: what the page shows first; model: what the script to copy names, None for the embedded model's page."""

    def __init__(self, studio: Studio, start: Wanted, model: str | None = None) -> None:
        self.studio, self.start, self.model = studio, start, model
        self._stops: dict[str, threading.Event] = {}
        self._ended = False

    def help(self, name: str) -> str:
        """What stands below a control's label while its value is right."""
        if name == "prompt":
            return WORDS if self.model is None else "What to paint."
        return controls.SETTINGS[name]["help"] if name in controls.SETTINGS else ""

    def touched(self, values: Values, wrong: tuple[str, ...], address: str) -> Parts:
        """A control was touched: its value is checked, and the settings are written out for elsewhere."""
        nothing = dict.fromkeys(("script", "payload", "node", "lost", "link"), "")
        try:
            wanted = self.wanted(values)
        except Wrong as error:
            touched = {"preset": controls.CUSTOM} if set(error.names) - set(PICTURE) else {}
            return {**nothing, **self._complaint(error, wrong), **touched}
        return {**self._marks((), wrong, ""), **self._elsewhere(wanted, address), "says": "",
                "preset": controls.preset_of(wanted.config)}  # fmt: skip

    def chosen(self, values: Values, preset: str, wrong: tuple[str, ...], address: str) -> Parts:
        """A preset was chosen: it fills the settings."""
        if preset == controls.CUSTOM:
            return {}
        filled = controls.values_of(controls.preset(controls.PRESET_OF[preset]))
        return _filled(self.touched({**values, **filled}, wrong, address), filled)

    def opened(self, query: Mapping[str, str], address: str) -> Parts:
        """The page was opened, perhaps by a link that restores it."""
        says = ""
        try:
            values = _values_of(page_code.from_query(query, self.start))
            self.wanted(values)
        except ValueError as error:
            says = f'<p role="alert"><strong>{escape(str(error))}. The link was not used.</strong></p>'
            values = _values_of(self.start)
        shown = _filled(self.touched(values, (), address), values)
        return {**shown, "says": says or shown["says"]}

    def made(self, values: Values, wrong: tuple[str, ...], session: str) -> Iterator[Parts]:
        """Generate was pressed: the progress until the pictures are there, or until Stop was pressed."""
        try:
            wanted = self.wanted(values)
        except Wrong as error:
            yield self._complaint(error, wrong)
            return
        stop = self._stops[session] = threading.Event()
        if self._ended:
            stop.set()
        yield {"says": _progress(Shot(WARMING, 0, 1), 0), "stop": update(interactive=True)}
        try:
            last = yield from self._followed(wanted, stop)
        except Exception as error:  # a library's depths raise whatever they raise: memory, a damaged model
            last = {"says": f"<strong>{type(error).__name__}: {escape(str(error))}</strong>"}
        finally:
            self._stops.pop(session, None)
        yield {**last, "stop": update(interactive=False)}

    def _followed(self, wanted: Wanted, stop: threading.Event) -> Iterator[Parts]:
        began, sent = time.monotonic(), 0.0
        for shot in self.studio.make(wanted, stop):
            if shot.doing == DONE:
                return _finished(shot)
            now = time.monotonic()
            parts = {"says": _progress(shot, now - began)}
            if shot.unfinished is not None and shot.doing != WARMING and now - sent > SLOW:
                sent, right = now, enlarged(shot.unfinished)
                parts["slider"] = (right if shot.plain is None else enlarged(shot.plain), right)
            yield parts
        return {"says": '<p role="status">Stopped.</p>'}

    def stopped(self, session: str) -> None:
        """Stop was pressed; the run of this session ends with its step."""
        stop = self._stops.get(session)
        if stop is not None:
            stop.set()

    def end(self) -> None:
        """The page ends: every run with its step, and what begins later at once."""
        self._ended = True
        for stop in tuple(self._stops.values()):
            stop.set()

    def wanted(self, values: Values) -> Wanted:
        """What the controls ask for. Raises Wrong, with the sentence to read."""
        for name, (label, parse) in PICTURE.items():
            try:
                parse(_plain(values[name])) if parse else self.model is not None or prompt.parse(values[name])
            except (argparse.ArgumentTypeError, ValueError) as error:
                raise Wrong(f"{label}: {error}", (name,)) from None
        try:
            config = controls.config_of(values)
        except ValueError as error:
            raise Wrong(str(error), controls.blamed(str(error))) from None
        return Wanted(values["prompt"], int(values["picture_seed"]), int(values["steps"]), config)

    def _complaint(self, error: Wrong, wrong: tuple[str, ...]) -> Parts:
        says = f'<p role="alert"><strong>{escape(str(error))}</strong></p>'
        return {**self._marks(error.names, wrong, str(error)), "says": says}

    def _marks(self, now: tuple[str, ...], before: tuple[str, ...], sentence: str) -> Parts:
        """The sentence beside the controls that it is about, and the usual help beside those of the last one."""
        healed = {name: update(info=self.help(name), elem_classes=[]) for name in before}
        return {**healed, **{name: update(info=sentence, elem_classes=["wrong"]) for name in now}, "wrong": now}

    def _elsewhere(self, wanted: Wanted, address: str) -> Parts:
        missing = page_code.lost(wanted.config)
        lost = [f"{host} has no control for: {', '.join(names)}." for host, names in missing.items()
                if names]  # fmt: skip
        return {
            "script": page_code.script(wanted, self.model or page_code.DEFAULT_MODEL),
            "payload": page_code.webui(wanted), "node": page_code.comfyui(wanted.config), "lost": " ".join(lost),
            "link": f"{address}?{page_code.query(wanted)}",
        }  # fmt: skip


def update(**changes: Any) -> dict[str, Any]:
    """What gradio's function of this name gives, which is the form it sends; so this file does without gradio."""
    return {"__type__": "update", **changes}


def _values_of(wanted: Wanted) -> dict[str, Any]:
    return {"prompt": wanted.prompt, "picture_seed": wanted.seed, "steps": wanted.steps,
            **controls.values_of(wanted.config)}  # fmt: skip


def _plain(value: Any) -> str:
    """A number as a person writes it: 3 for 3.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _filled(parts: Parts, values: Values) -> Parts:
    """The parts, with values put into the controls."""
    return {**parts, **{name: {**update(value=value), **parts.get(name, {})} for name, value in values.items()}}


def _progress(shot: Shot, passed: float) -> str:
    doing = f"{shot.doing}: step {shot.step} of {shot.steps}" if shot.doing != WARMING else shot.doing
    left = f"about {passed * (1 - shot.share) / shot.share:.0f} s left" if shot.share > 0.05 else "&nbsp;"
    return PROGRESS.format(doing=doing, share=shot.share, left=left)


def _finished(shot: Shot) -> Parts:
    pictures = (enlarged(shot.plain), enlarged(shot.merged))
    maps = [(picture, title) for title, picture in shot.maps]
    return {"says": '<p role="status">Done.</p>', "figures": shot.figures, "slider": pictures, "maps": maps,
            "difference": enlarged(shot.difference), "report": f"<pre>{escape(shot.report)}</pre>"}  # fmt: skip
