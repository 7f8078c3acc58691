"""What a person does on the page, and what the page then shows: part -> value, or an update of gradio's.

Parts have the names that `page_layout` gives them. Nothing here knows where a part stands.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

from demo import command, page_code, page_curve, prompt
from demo import page_controls as controls
from demo.page_code import Wanted
from demo.page_curve import Point
from demo.page_grid import grid
from demo.page_plot import plot
from demo.page_run import DONE, MERGED, WARMING, Shot, Studio, enlarge
from demo.sheet import difference
from tome_core import form, strength

# the picture's own controls: label, and what a value has to be
PICTURE = {"prompt": ("Prompt", None), "picture_seed": ("Seed of the picture", command.SEED),
           "steps": ("Steps", command.STEPS)}  # fmt: skip
NAMES = ("strength", "strengths", *PICTURE, *form.NAMES)
SIDE_BY_SIDE = 4
HELP = {
    "strength": "0 is off; more of it saves more time and changes more.",
    "strengths": f"Up to {SIDE_BY_SIDE} numbers from 0 to 1: the same picture with each, side by side.",
}
SLOW = 0.5  # seconds between two unfinished pictures, because sending them takes time from making them

Values = Mapping[str, Any]
Parts = dict[str, Any]
Ways = tuple[Wanted, ...]


class Seen(NamedTuple):
    """What a tab remembers. by_hand: the settings under Expert count, not the strength.

    wrong: the controls that are marked; runs: the last pictures, for the plot.
    """

    by_hand: bool = False
    wrong: tuple[str, ...] = ()
    runs: tuple[Point, ...] = ()


class Wrong(ValueError):
    """A value that is not possible; names: of the controls to mark."""

    def __init__(self, sentence: str, names: tuple[str, ...]) -> None:
        super().__init__(sentence)
        self.names = names


class Events:
    """start: what the page shows first; model: what the script to copy names, None for the embedded model's page."""

    def __init__(self, studio: Studio, start: Wanted, model: str | None = None) -> None:
        self.studio, self.start, self.model = studio, start, model
        self.curve = page_curve.read_measured()
        self._stops: dict[str, threading.Event] = {}
        self._ended = False

    def help(self, name: str) -> str:
        """What stands below a control's label while its value is right."""
        if name == "prompt":
            return f"The embedded model knows {prompt.known_words()}." if self.model is None else "What to paint."
        return form.field(name).help if name in form.NAMES else HELP.get(name, "")

    def touched(self, values: Values, seen: Seen, address: str) -> Parts:
        """A control was touched: its value is checked, and the settings are written out for elsewhere."""
        try:
            wanted = self.read(values, seen.by_hand)
        except Wrong as error:
            nothing = dict.fromkeys(("script", "payload", "node", "link"), "")
            return {**nothing, **self._complaint(error, seen)}
        by = f"Changed by hand: {', '.join(wanted.changes)}. Move the strength to have its own again."
        return {
            **self._marks((), seen, ""), "says": "", "by": update(value=by, visible=bool(wanted.changes)),
            "plot": plot(self.curve, _on_curve(wanted), seen.runs),
            "script": page_code.script(wanted, self.model or page_code.DEFAULT_MODEL),
            "payload": page_code.webui(wanted), "node": page_code.comfyui(wanted),
            "link": f"{address}?{page_code.query(wanted)}",
        }  # fmt: skip

    def set_by_hand(self, values: Values, seen: Seen, address: str) -> Parts:
        """A setting that follows from strength was touched: all under Expert count as they are from now on."""
        return self.touched(values, seen._replace(by_hand=True), address)

    def moved(self, values: Values, seen: Seen, address: str) -> Parts:
        """The strength was moved: it counts again, and the settings show what it stands for."""
        try:
            strength(values["strength"])
        except ValueError as error:
            return self._complaint(Wrong(str(error), ("strength",)), seen)
        filled = form.fill(values["strength"], self.start.layout)
        return _fill(self.touched({**values, **filled}, seen._replace(by_hand=False), address), filled)

    def opened(self, query: Mapping[str, str], address: str) -> Parts:
        """The page was opened, perhaps by a link that restores it."""
        says = ""
        try:
            wanted = page_code.from_query(query, self.start)
            self.read(_values_of(wanted), True)
        except ValueError as error:
            says = f'<p role="alert"><strong>{escape(str(error))}. The link was not used.</strong></p>'
            wanted = self.start
        values = _values_of(wanted)
        shown = _fill(self.touched(values, Seen(by_hand=bool(wanted.changes)), address), values)
        return {**shown, "says": says or shown["says"]}

    def made(self, values: Values, seen: Seen, session: str) -> Iterator[Parts]:
        """Generate was pressed: the progress until the pictures are there, or until Stop was pressed."""
        return self._make(values, seen, session, lambda wanted: (wanted,))

    def compared(self, values: Values, seen: Seen, session: str) -> Iterator[Parts]:
        """Compare was pressed: the picture in each of the strengths."""
        return self._make(values, seen, session, lambda wanted: _at_each(wanted, values["strengths"]))

    def _make(self, values: Values, seen: Seen, session: str, ways_of: Callable[[Wanted], Ways]) -> Iterator[Parts]:
        try:
            wanted = self.read(values, seen.by_hand)
            ways = ways_of(wanted)
        except Wrong as error:
            yield self._complaint(error, seen)
            return
        stop = self._stops[session] = threading.Event()
        if self._ended:
            stop.set()
        yield {**self._marks((), seen, ""), "says": _progress(Shot(WARMING, 0, 1), 0), "stop": update(interactive=True)}
        try:
            shot = yield from self._follow(wanted, tuple(way.config for way in ways), stop)
            last = self._finish(shot, wanted, ways, seen) if shot else {"says": '<p role="status">Stopped.</p>'}
        except Exception as error:  # a library's depths raise whatever they raise: memory, a damaged model
            last = {"says": f"<strong>{type(error).__name__}: {escape(str(error))}</strong>"}
        finally:
            self._stops.pop(session, None)
        yield {**last, "stop": update(interactive=False)}

    def _follow(self, wanted: Wanted, configs: tuple, stop: threading.Event) -> Iterator[Parts]:
        """Tells how far it is; gives the last shot, None where it was stopped."""
        began, sent = time.monotonic(), 0.0
        for shot in self.studio.make(wanted, stop, configs):
            if shot.doing == DONE:
                return shot
            now = time.monotonic()
            parts = {"says": _progress(shot, now - began)}
            if shot.unfinished is not None and shot.doing != WARMING and now - sent > SLOW:
                sent, right = now, enlarge(shot.unfinished)
                left = right if shot.plain is None else enlarge(shot.plain.picture)
                parts |= {"slider": (left, right), "answer": update(visible=True)}
            yield parts
        return None

    def _finish(self, shot: Shot, wanted: Wanted, ways: Ways, seen: Seen) -> Parts:
        """All that is shown of finished pictures; of several, the slider and what is below it show the last one."""
        plain, last = shot.plain, shot.merged[-1]
        named = [(_name(way), made) for way, made in zip(ways, shot.merged, strict=True)]
        cells = [(name, made.picture, f"{made.time}, {made.figures(plain)}") for name, made in named]
        runs = tuple(made.point(plain, _on_curve(way)) for made, way in zip(shot.merged, ways, strict=True))
        return {
            "says": '<p role="status">Done.</p>', "answer": update(visible=True),
            "grid": update(visible=len(ways) > 1, value=grid(cells)),
            "figures": f"{named[-1][0]}: {plain.time} without merging, {last.time} with: {last.figures(plain)}",
            "slider": (enlarge(plain.picture), enlarge(last.picture)),
            "difference": enlarge(difference(plain.picture, last.picture)),
            "maps": [(picture, title) for title, picture in last.maps],
            "report": "".join(f"<pre>{escape(f'{name}: {made.report}')}</pre>" for name, made in named),
            "plot": plot(self.curve, _on_curve(wanted), runs), "seen": seen._replace(wrong=(), runs=runs),
        }  # fmt: skip

    def stopped(self, session: str) -> None:
        """Stop was pressed; the run of this session ends with its step."""
        if stop := self._stops.get(session):
            stop.set()

    def end(self) -> None:
        """The page ends: every run with its step, and what begins later at once."""
        self._ended = True
        for stop in tuple(self._stops.values()):
            stop.set()

    def read(self, values: Values, by_hand: bool) -> Wanted:
        """What the controls ask for. Raises Wrong, with the sentence to read."""
        for name, (label, parse) in PICTURE.items():
            try:
                parse(_plain(values[name])) if parse else self._check_prompt(values[name])
            except (argparse.ArgumentTypeError, ValueError) as error:
                raise Wrong(f"{label}: {error}", (name,)) from None
        picture = values["prompt"], int(values["picture_seed"]), int(values["steps"])
        try:
            layout = self.start.layout
            return Wanted(*picture, values["strength"], controls.config_of(values, by_hand, layout), layout)
        except ValueError as error:
            raise Wrong(str(error), controls.find_blamed(str(error))) from None

    def _check_prompt(self, text: Any) -> None:
        if not isinstance(text, str):
            raise ValueError(f"{_plain(text)} is no text; write what to paint")
        if self.model is None:
            prompt.parse(text)

    def _complaint(self, error: Wrong, seen: Seen) -> Parts:
        says = f'<p role="alert"><strong>{escape(str(error))}</strong></p>'
        return {**self._marks(error.names, seen, str(error)), "says": says}

    def _marks(self, now: tuple[str, ...], seen: Seen, sentence: str) -> Parts:
        """The sentence beside the controls that it is about, and the usual help beside those of the last one."""
        healed = {name: update(info=self.help(name), elem_classes=[]) for name in seen.wrong}
        marked = {name: update(info=sentence, elem_classes=["wrong"]) for name in now}
        return {**healed, **marked, "seen": seen._replace(wrong=now)}


def update(**changes: Any) -> dict[str, Any]:
    """What gradio's function of this name gives, which is the form it sends; so this file does without gradio."""
    return {"__type__": "update", **changes}


def _on_curve(way: Wanted) -> float | None:
    """The strength that a picture is made with, None where more than that was changed."""
    return None if way.changes else way.strength


def _at_each(wanted: Wanted, text: Any) -> Ways:
    """The picture at each strength of a list, without repeats. Raises Wrong for what is none."""
    found = dict.fromkeys(re.findall(r"[^\s,;]+", str(text)))
    if not 0 < len(found) <= SIDE_BY_SIDE:
        raise Wrong(f"{len(found)} strengths to compare; give 1 to {SIDE_BY_SIDE}, such as 0.25, 0.5", ("strengths",))
    try:
        return tuple(Wanted.of_strength(**wanted.picture, strength=_number(one), layout=wanted.layout) for one in found)
    except ValueError as error:
        raise Wrong(str(error), ("strengths",)) from None


def _number(text: str) -> float | str:
    """What is none stays a text, to be refused."""
    try:
        return float(text)
    except ValueError:
        return text[:40]


def _values_of(wanted: Wanted) -> dict[str, Any]:
    return {"strength": wanted.strength, "prompt": wanted.prompt, "picture_seed": wanted.seed, "steps": wanted.steps,
            **form.values_of(wanted.config)}  # fmt: skip


def _plain(value: Any) -> str:
    """A number as a person writes it: 3 for 3.0. Of what is too long, the beginning."""
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _fill(parts: Parts, values: Values) -> Parts:
    """The parts, with values put into the controls."""
    return {**parts, **{name: {**update(value=value), **parts.get(name, {})} for name, value in values.items()}}


def _progress(shot: Shot, passed: float) -> str:
    which = f", {len(shot.merged) + 1} of {shot.ways}" if shot.doing == MERGED and shot.ways > 1 else ""
    doing = f"{shot.doing}{which}: step {shot.step} of {shot.steps}" if shot.doing != WARMING else shot.doing
    left = f"about {passed * (1 - shot.share) / shot.share:.0f} s left" if shot.share > 0.05 else "&nbsp;"
    return (f'<p role="status">{doing}</p><progress max="1" value="{shot.share:.3f}" aria-label="Progress"></progress>'
            f"<p>{left}</p>")  # fmt: skip


def _name(way: Wanted) -> str:
    return f"Strength {way.strength:g}{', changed by hand' if way.changes else ''}"
