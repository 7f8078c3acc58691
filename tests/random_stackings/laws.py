"""The laws: what raises raises without merging too, or says with its value what is wrong; pictures have their shape and
are finite; once all is off again the model draws the bits it drew before and nothing of ours is left on it; the random
generators are where they were; a case that is drawn again gives the same bits.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch

from tests.random_stackings.sessions import Fault, Session, Stage, drawn, pristine


def hold(dice: random.Random, repeats: bool) -> Counter:
    """Draw a session with a UNet, run it, hold it to the laws; raises Fault. Gives what became of its calls."""
    session, generators = drawn(dice), _generators()
    try:
        stage = Stage(session, merges=True).run()
        _judge(stage, session, generators)
        if repeats:
            _set(generators)  # a model in training drops what lots decide
            again = Stage(session, merges=True).run()
            if not all(map(_is_same, stage.outcomes, again.outcomes)):
                raise Fault("other bits when the case is drawn again")
    except Exception as error:
        raise Fault(f"{type(error).__name__}: {error}\n{session}") from error
    seen = Counter("what it raises raises without merging" if isinstance(outcome, Exception) else "picture"
                   for outcome in stage.outcomes)  # fmt: skip
    seen["refused with a sentence"] += stage.refusals
    seen["patch that merged"] += stage.pictures_merged
    return seen


def _generators() -> tuple[Any, Any]:
    return torch.get_rng_state(), random.getstate()


def _set(generators: tuple[Any, Any]) -> None:
    torch.set_rng_state(generators[0])
    random.setstate(generators[1])


def _are_at(generators: tuple[Any, Any]) -> bool:
    return torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]


def _is_same(outcome: Any, other: Any) -> bool:
    if torch.is_tensor(outcome) and torch.is_tensor(other):
        return torch.equal(outcome, other) or bool(outcome.isnan().any())
    return type(outcome) is type(other)


def _judge(stage: Stage, session: Session, generators: tuple[Any, Any]) -> None:
    """The control runs if there is a question that it alone can answer."""
    (left, probe), before = stage.left(), pristine(session.family, session.dtype)
    is_clean = left == before.left and torch.equal(probe, before.probe)
    is_odd = any(isinstance(outcome, Exception) or not outcome.isfinite().all() for outcome in stage.outcomes)
    is_drawn = not _are_at(generators)
    if is_clean and not (is_odd or is_drawn):
        return
    _set(generators)
    control = Stage(session, merges=False).run()
    if is_drawn and _are_at(generators):
        raise Fault("a random generator was used")
    for number, (ours, theirs) in enumerate(zip(stage.outcomes, control.outcomes, strict=True)):
        _compare(number, ours, theirs)
    expected, plain = control.left()
    if left != expected:
        raise Fault(f"left on the model: {first_difference(expected, left)}")
    if not torch.equal(probe, plain):
        raise Fault(f"the model draws another picture now, by {(probe - plain).abs().max():.3g}")


def _compare(number: int, ours: Any, theirs: Any) -> None:
    if isinstance(theirs, Exception):
        return
    if isinstance(ours, Exception):
        raise Fault(f"call {number} raises {type(ours).__name__}: {ours}; without merging it does not") from ours
    if ours.shape != theirs.shape:
        raise Fault(f"call {number} gives {tuple(ours.shape)}, without merging {tuple(theirs.shape)}")
    if theirs.isfinite().all() and not ours.isfinite().all():
        raise Fault(f"call {number} gives numbers that are not finite")


def first_difference(before: list, now: list) -> str:
    """At the module that differs, what is there more and less."""
    for old, new in zip(before, now, strict=False):
        if old != new:
            gone, added = set(map(str, old)) - set(map(str, new)), set(map(str, new)) - set(map(str, old))
            return f"at {new[0]!r}: {sorted(added)} in the place of {sorted(gone)}"
    return "more or fewer modules"
