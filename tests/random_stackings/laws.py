"""The laws of a session with a UNet, and those of a session with a host."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.random_stackings.drawing import pristine
from tests.random_stackings.sessions import Fault, Session, Stage, alike, drawn, first_difference
from tests.traces import traces

_USED: dict[tuple[str, torch.dtype], nn.Module] = {}  # models that a session has left as they were


def hold(dice: random.Random, repeats: bool) -> Counter:
    """Draw a session, run it, hold it to the laws; raises Fault. Gives what became of its calls.

    A model that was left as it was serves the next session. What fails on one is run again on a new one.
    """
    session = drawn(dice)
    key = session.family, session.dtype
    used = _USED.pop(key, None)
    try:
        stage = _held(session, used if used is not None else _new(session), repeats)
    except Fault as fault:
        if used is None:
            raise
        _held(session, _new(session), repeats)
        raise Fault(f"on a model that other cases have used, and on no new one: {fault}") from fault
    if stage.is_clean:
        _USED[key] = stage.model
    seen = Counter("what it raises raises without merging" if isinstance(one, BaseException) else "picture"
                   for one in stage.outcomes)  # fmt: skip
    seen["refused with a sentence"] += stage.refusals
    seen["patch that merged"] += stage.pictures_merged
    return seen


def _new(session: Session) -> nn.Module:
    return copy.deepcopy(pristine(session.family, session.dtype).model)


def _held(session: Session, model: nn.Module, repeats: bool) -> Stage:
    generators = torch.get_rng_state(), random.getstate()
    stage = Stage(session, model, True)
    try:
        stage.run()
        stage.is_clean = _judge(stage, session, generators)
        if repeats:
            torch.set_rng_state(generators[0])  # a model in training drops what lots decide
            random.setstate(generators[1])
            _hold_to_be_repeatable(stage, session)
    except Fault as fault:
        raise Fault(f"{fault}\n{session}") from fault
    except Exception as error:
        raise Fault(f"{type(error).__name__}: {error}\n{session}") from error
    return stage


def _judge(stage: Stage, session: Session, generators: tuple[Any, Any]) -> bool:
    """The control runs where there is a question that it alone can answer. Is the model as it was built?"""
    found, probe = stage.left()
    before = pristine(session.family, session.dtype)
    drew = not torch.equal(torch.get_rng_state(), generators[0]) or random.getstate() != generators[1]
    is_clean = found == before.left and torch.equal(probe, before.probe)
    is_odd = any(isinstance(one, BaseException) or not one.isfinite().all() for one in stage.outcomes)
    if is_clean and not (is_odd or drew):
        return True
    torch.set_rng_state(generators[0])
    random.setstate(generators[1])
    control = Stage(session, _new(session), False).run()
    if drew and torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]:
        raise Fault("a random generator was used")
    if len(control.outcomes) != len(stage.outcomes):
        raise Fault(f"{len(stage.outcomes)} calls, {len(control.outcomes)} without merging")
    for number, (ours, theirs) in enumerate(zip(stage.outcomes, control.outcomes, strict=True)):
        _compare(number, ours, theirs)
    left, plain = control.left()
    if found != left:
        raise Fault(f"left on the model: {first_difference(left, found)}")
    if not torch.equal(probe, plain):
        raise Fault(f"the model draws another picture now, by {(probe - plain).abs().max():.3g}")
    return is_clean


def _compare(number: int, ours: Any, theirs: Any) -> None:
    if isinstance(theirs, BaseException):
        return
    if isinstance(ours, BaseException):
        raise Fault(f"call {number} raises {type(ours).__name__}: {ours}; without merging it does not") from ours
    if ours.shape != theirs.shape:
        raise Fault(f"call {number} gives {tuple(ours.shape)}, without merging {tuple(theirs.shape)}")
    if theirs.isfinite().all() and not ours.isfinite().all():
        raise Fault(f"call {number} gives numbers that are not finite")


def _hold_to_be_repeatable(stage: Stage, session: Session) -> None:
    again = Stage(session, _new(session), True).run()
    for number, (one, two) in enumerate(zip(stage.outcomes, again.outcomes, strict=True)):
        if not alike(one, two) and not (torch.is_tensor(one) and torch.is_tensor(two) and one.isnan().any()):
            raise Fault(f"call {number} gives other bits when the case is drawn again")


def hold_in_host(dice: random.Random, repeats: bool, draw: Callable[..., tuple[Counter, list]]) -> Counter:
    """Let ``draw`` run a session: it tells what it does, and gives what became of it and its pictures; raises Fault."""
    state, generator, drawn = dice.getstate(), torch.get_rng_state(), []
    for _ in range(1 + repeats):
        dice.setstate(state)
        told: list[str] = []
        try:
            with pytest.MonkeyPatch.context() as patches:
                seen, pictures = draw(dice, patches, told)
            drawn.append(pictures)
            if not all(map(torch.equal, drawn[0], pictures)):
                raise Fault("other bits when it is drawn again")
            if not torch.equal(torch.get_rng_state(), generator):
                raise Fault("the random generator was used")
        except Exception as error:
            raise Fault(f"{type(error).__name__}: {error}\n" + "\n".join(told)) from error
    return seen


def hold_to_be_as_before(models: list[nn.Module], before: list[list]) -> None:
    """before: what `traces` found on each."""
    for model, left in zip(models, before, strict=True):
        now = traces(model)
        if now != left:
            raise Fault(f"left on the model: {first_difference(left, now)}")
