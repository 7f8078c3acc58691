"""A session with one UNet: patches come, calls are made, patches go, in any order.

The steps are drawn first, then run; a control runs the same steps, and nothing of ours is put on. What others put on a
model beside us is drawn in `tests.beside.pairs`.
"""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any, NamedTuple

import torch
from diffusers import UNet2DConditionModel
from torch import nn

import tome_core
from tests.models import ModelCase
from tests.random_stackings import calling, drawing
from tests.random_stackings.drawing import Call, Wish, a_call, a_wish, as_text, pristine, probed, weighted
from tests.traces import traces
from tome_core.models.unet_blocks import find_unet


class Fault(AssertionError):
    """A law that a case has broken."""


class Thrown(Exception):
    """What a model throws in mid-call."""


class Step(NamedTuple):
    """What is done: a method of `Stage`, and its argument."""

    kind: str
    what: Any = None

    def __str__(self) -> str:
        what = self.what
        if isinstance(what, Wish):
            what = f"{what.door} {as_text(what.settings)}"
        return f"{self.kind} {what}" if what is not None else self.kind


class Session(NamedTuple):
    """A drawn session."""

    family: str
    dtype: torch.dtype
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.family}, {self.dtype}", *(f"  {number}. {step}" for number, step in
                                                               enumerate(self.steps))])  # fmt: skip


EVENTS = {"call": 40, "merge": 8, "unmerge": 6, "again": 3, "tell": 4, "begin": 5, "end": 3, "throw": 3, "copied": 3,
          "look": 3, "compile": 0.08}  # fmt: skip


def drawn(dice: random.Random) -> Session:
    """The session of these dice."""
    family, dtype = dice.choice(tuple(drawing.FAMILIES)), weighted(dice, drawing.DTYPES)
    model = pristine(family, dtype).model
    takes_more = isinstance(model, UNet2DConditionModel)
    call = a_call(dice, takes_more)
    steps = [Step("merge", a_wish(dice)), Step("call", call)]
    for _ in range(dice.randint(1, 5)):
        kind = weighted(dice, EVENTS)
        what: Any = dice.randrange(8)
        if kind == "call":
            what = call = a_call(dice, takes_more, call)
        elif kind == "merge":
            what = a_wish(dice)
        elif kind == "tell":
            what = _a_time(dice)
        elif kind == "begin":
            what = dice.choice((None, None, 1, 2, call.batch))
        elif kind == "copied":
            what = (dice.choice(("deep copy", "pickle")), call)
        elif kind in ("throw", "compile"):
            what = (what, call)
        steps.append(Step(kind, what))
    return Session(family, next(model.parameters()).dtype, (*steps, Step("leave", dice.randrange(2**32))))


def _a_time(dice: random.Random) -> dict[str, Any]:
    time = dice.choice(({}, {"percent": dice.random()}, {"timestep": dice.uniform(0, 999)},
                        {"sigma": dice.uniform(0, 15)}))  # fmt: skip
    return {**time, "sampling": dice.choice((None, "a", "b")), "pictures": dice.choice((None, 1, 2))} if time else {}


class Stage:
    """Where a session runs. model: as it was built; merges: False in the control.

    outcomes: of each call, a picture or what it raised.
    """

    def __init__(self, session: Session, model: nn.Module, merges: bool) -> None:
        self.case: ModelCase = drawing.FAMILIES[session.family]
        self.session, self.model, self.merges = session, model, merges
        self.handles: list[Any] = []
        self.scopes: list[Any] = []
        self.outcomes: list[torch.Tensor | BaseException] = []
        self.refusals = self.pictures_merged = 0
        self.is_clean = False

    def run(self) -> Stage:
        """All steps."""
        for step in self.session.steps:
            getattr(self, f"_{step.kind}")(step.what)
        return self

    def _pick(self, items: list[Any], number: Any) -> Any:
        return items[number % len(items)] if items else None

    def _merge(self, wish: Wish) -> None:
        if not self.merges:
            return
        try:
            handle = wish.put_on(self.model)
        except (ValueError, TypeError) as error:
            self._refused(wish, error)
        else:
            if handle is not None:
                self.handles.append(handle)

    def _refused(self, wish: Wish, error: Exception) -> None:
        text = str(error)
        if wish.is_right or not any(f"{name}={value!r}" in text for name, value in wish.settings.items()):
            raise Fault(f"refused without naming what is wrong: {type(error).__name__}: {text}") from error
        self.refusals += 1

    def _unmerge(self, number: int) -> None:
        if not self.merges:
            return
        handle = self._pick(self.handles, number)
        if number % 4 == 0 or handle is None:
            tome_core.remove_patch(self.model)
        elif number % 4 == 1:
            handle.uninstall()
        else:
            handle.remove()

    def _again(self, number: int) -> None:
        handle = self._pick(self.handles, number)
        if handle is not None:
            handle.install()

    def _tell(self, time: dict[str, Any]) -> None:
        for handle in self.handles[-1:]:
            handle.set_time(**time)

    def _begin(self, pictures: int | None) -> None:
        for handle in self.handles[-1:]:
            self.scopes.append(handle.sampling(pictures))
            self.scopes[-1].__enter__()

    def _end(self, number: int = 0) -> None:
        if self.scopes:
            self.scopes.pop().__exit__(None, None, None)

    def _call(self, call: Call, target: Any = None, model: nn.Module | None = None) -> None:
        try:
            out: Any = calling.made(self.case, model or self.model, self.session.dtype, call, target)
        except Fault:
            raise
        except Exception as error:
            out = error
        self.outcomes.append(out)

    def _throw(self, what: tuple[int, Call]) -> None:
        """Some module throws in the next call."""
        number, call = what
        modules = [one for one in find_unet(self.model).modules() if not list(one.children())]

        def throw(*_: Any) -> None:
            raise Thrown

        hook = self._pick(modules, number * 7919).register_forward_hook(throw)
        try:
            self._call(call)
        finally:
            hook.remove()

    def _copied(self, what: tuple[str, Call]) -> None:
        """A copy draws as well, and is rid of merging as the model is."""
        kind, call = what
        try:
            twin = copy.deepcopy(self.model) if kind == "deep copy" else pickle.loads(pickle.dumps(self.model))
        except Exception as error:
            self.outcomes.append(error)
            return
        self._call(call, model=twin)
        if self.merges:
            tome_core.remove_patch(twin)
            remains = [f"{name} of {where!r}" for where, module in find_unet(twin).named_modules()
                       for name, value in vars(module).items() if "tome_core" in f"{name} {_home(value)}"]  # fmt: skip
            if remains:
                raise Fault(f"the copy keeps {remains}")

    def _look(self, number: int) -> None:
        """Reports and maps."""
        for handle in self.handles:
            handle.keep_maps(number % 2 == 0)
            if not str(handle.report()) or handle.maps() is None:
                raise Fault("an empty report")
            if number % 4 == 3:
                handle.reset_counts()

    def _compile(self, what: tuple[int, Call]) -> None:
        torch._dynamo.reset()
        self._call(what[1], target=torch.compile(find_unet(self.model), backend="eager", dynamic=False))
        torch._dynamo.reset()

    def _leave(self, seed: int) -> None:
        """All patches go, in any order; then the model is held against what it was."""
        self.pictures_merged = sum(handle.report().merged_anything for handle in self.handles)
        while self.scopes:
            self._end()
        for handle in random.Random(seed).sample(self.handles, len(self.handles)):
            handle.remove()
        if self.merges:
            tome_core.remove_patch(self.model)

    def left(self) -> tuple[list, torch.Tensor]:
        """What lies on the model, and a picture of it."""
        return traces(self.model), probed(self.case, self.model, self.session.dtype)


def _home(value: Any) -> str:
    """The module of who owns a method."""
    return type(getattr(value, "__self__", value)).__module__


def alike(one: Any, other: Any) -> bool:
    """The same picture, or errors of one kind."""
    return torch.equal(one, other) if torch.is_tensor(one) and torch.is_tensor(other) else type(one) is type(other)


def first_difference(before: list, now: list) -> str:
    for one, two in zip(before, now, strict=False):
        if one != two:
            added, gone = (sorted(set(map(str, b)) - set(map(str, a))) for a, b in (
                ((one[2], two[2]), (two[2], one[2])) if len(one) > 2 else (([one], [two]), ([two], [one]))))
            return f"at {two[0]!r}: {added} more, {gone} missing, hooks {one[3:]} {two[3:]}"
    return "more or fewer modules"
