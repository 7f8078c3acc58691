"""The laws of a session with a UNet, and those of a session with a host."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.random_stackings.sessions import Fault, Session, Stage, drawn, pristine
from tests.traces import traces


def hold(dice: random.Random, repeats: bool) -> Counter:
    """Draw a session, run it, hold it to the laws; raises Fault. Gives what became of its calls."""
    session, generators = drawn(dice), _generators()
    try:
        stage = Stage(session, merges=True).run()
        _judge(stage, session, generators)
        if repeats:
            _set(generators)  # a model in training drops what lots decide
            _hold_to_be_repeatable(stage, Stage(session, merges=True).run())
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


def _hold_to_be_repeatable(stage: Stage, again: Stage) -> None:
    for number, (outcome, other) in enumerate(zip(stage.outcomes, again.outcomes, strict=True)):
        is_same = type(outcome) is type(other)
        if is_same and torch.is_tensor(outcome):
            is_same = torch.equal(outcome, other) or outcome.isnan().any()
        if not is_same:
            raise Fault(f"call {number} gives other bits when the case is drawn again")


def first_difference(before: list, now: list) -> str:
    """At the module that differs, what is there more and less."""
    for old, new in zip(before, now, strict=False):
        if old != new:
            gone, added = set(map(str, old)) - set(map(str, new)), set(map(str, new)) - set(map(str, old))
            return f"at {new[0]!r}: {sorted(added)} in the place of {sorted(gone)}"
    return "more or fewer modules"


def hold_in_host(dice: random.Random, repeats: bool, draw: Callable[..., tuple[Counter, list]]) -> Counter:
    """Let ``draw`` run a session: it notes what it does, and gives what became of it and its pictures; raises Fault."""
    state, generator, drawn = dice.getstate(), torch.get_rng_state(), []
    for _ in range(1 + repeats):
        dice.setstate(state)
        notes: list[str] = []
        try:
            with pytest.MonkeyPatch.context() as patches:
                seen, pictures = draw(dice, patches, notes)
            drawn.append(pictures)
            if not all(map(torch.equal, drawn[0], pictures)):
                raise Fault("other bits when it is drawn again")
            if not torch.equal(torch.get_rng_state(), generator):
                raise Fault("the random generator was used")
        except Exception as error:
            raise Fault(f"{type(error).__name__}: {error}\n" + "\n".join(notes)) from error
    return seen


def hold_to_be_as_before(models: list[nn.Module], before: list[list]) -> None:
    """before: what `traces` found on each."""
    for model, left in zip(models, before, strict=True):
        now = traces(model)
        if now != left:
            raise Fault(f"left on the model: {first_difference(left, now)}")
