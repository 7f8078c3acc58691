"""One call of a UNet, recorded: when it may be replayed, and how.

What a merged call does depends on what earlier steps have left, and on nothing else that it finds. So its questions are
noted with their answers (is there a match, is it young enough, in which form), and it is replayed where they are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from ..reporting.ledger import Ledger
from ..running.call import Call
from ..running.keep import Found, Kept, KeptPlans, Shared
from .cuda import CudaGraphs
from .forms import Form, Unrecordable, copy_all, put_together, take_apart
from .plan_buffers import PlanBuffer, form_of, load

Buffers = WeakValueDictionary[tuple, PlanBuffer]


class _Question(NamedTuple):
    """A call has asked `KeptPlans.find`.

    of_copies: about what serves all copies of the latents. answer: freshness and form.
    """

    key: tuple
    rule: Any
    device: torch.device
    renews: bool
    of_copies: bool
    answer: tuple[bool, Form] | None


class _Look(NamedTuple):
    """A call has asked `KeptPlans.look`. answer: copies, and which is matched."""

    answer: tuple[int, int] | None


class _Write(NamedTuple):
    """A call has told `KeptPlans.store`.

    kept: what was stored in the recording; since: which of the plans read gives the time.
    """

    key: tuple
    of_copies: bool
    kept: Kept
    since: int | None


class NotedPlans:
    """Stands in for the `KeptPlans` of a call that is recorded: answers as these would, and notes what was asked."""

    def __init__(self, kept: KeptPlans, buffers: Buffers) -> None:
        self._kept = kept
        self._buffers = buffers
        self.questions: list[_Question | _Look] = []
        self.read: list[tuple[Kept, PlanBuffer]] = []
        self.written: list[_Write] = []

    def look(self) -> Shared | None:
        """As of `KeptPlans`."""
        shared = self._kept.look()
        self.questions.append(_Look(_without_call(shared)))
        return shared

    def find(
        self, key: tuple, rule: Any, device: torch.device, renews: bool, shared: Shared | None = None
    ) -> Found | None:
        """As of `KeptPlans`; plans lie in buffers."""
        of_copies = shared is not None
        found = self._kept.find(key, rule, device, renews, shared)
        self.questions.append(_Question(key, rule, device, renews, of_copies, _answer(found)))
        if found is None:
            return None
        buffer = self.buffer(key, of_copies, form_of(found.kept))
        load([(found.kept, buffer)])
        kept = Kept(buffer.plans(), found.kept.timestep, rule, device)
        self.read.append((kept, buffer))
        return Found(kept, found.is_fresh)

    def store(
        self, key: tuple, plans: Any, rule: Any, device: torch.device, shared: Shared | None = None,
        since: Kept | None = None,
    ) -> Kept:  # fmt: skip
        """As of `KeptPlans`, but nothing is kept yet."""
        kept = Kept(plans, 0.0, rule, device)
        place = next((i for i, (one, _) in enumerate(self.read) if one is since), None)
        self.written.append(_Write(key, shared is not None, kept, place))
        return kept

    def buffer(self, key: tuple, of_copies: bool, form: Form) -> PlanBuffer:
        """Where such plans lie."""
        name = (key, of_copies, form)
        return self._buffers.get(name) or self._buffers.setdefault(name, PlanBuffer(form))


class RecordedCall:
    """A call as a graph has it, to be made again with other inputs.

    latents: their shape. kind: as `Capture.graphs` has it. used: the ordinal of its latest use.
    """

    def __init__(
        self, latents: tuple[int, ...], inputs: list[torch.Tensor], forward: Callable[[NotedPlans | None], Any],
        call: Call | None, buffers: Buffers, backend: CudaGraphs,
    ) -> None:  # fmt: skip
        """Record it. forward: makes the call from these inputs; call: of ours, None where nothing of ours is in it."""
        self.latents, self.used, self._inputs = latents, 0, inputs
        kept = None if call is None else call.kept
        self._noted = None if kept is None else NotedPlans(kept, buffers)
        ledger = Ledger([], ()) if call is None else call.run.ledger
        with ledger.aside():
            backend.warm_up(lambda: forward(self._noted))
        self._written = [] if self._noted is None else [
            self._noted.buffer(one.key, one.of_copies, take_apart(one.kept.plans)[0]) for one in self._noted.written
        ]  # fmt: skip
        again = None if kept is None else NotedPlans(kept, buffers)

        def forward_and_write() -> Any:
            out = forward(again)
            if again is not None:
                self._write(again)
            return out

        with ledger.aside() as self._counted:
            self._replay, out = backend.record(forward_and_write)
        self._out_form, self._out = take_apart(out)
        if self._noted is not None:  # the values of the warm-up are not needed any more
            for one in self._noted.written:
                one.kept.plans = None
            self._noted.read = [(None, buffer) for _, buffer in self._noted.read]
        self.kind = "plain" if call is None else self._kind()

    def _write(self, again: NotedPlans) -> None:
        """In place, at the end of the call: by then it has read what is overwritten, and derived what it derives."""
        values: list[torch.Tensor] = []
        for one, buffer in zip(again.written, self._written, strict=True):
            form, tensors = take_apart(one.kept.plans)
            if form != buffer.form:
                raise Unrecordable("it does not keep the same things each time it is made")
            values += tensors
        copy_all([one for buffer in self._written for one in buffer.tensors], values)

    def _kind(self) -> str:
        questions = [] if self._noted is None else [one for one in self._noted.questions if isinstance(one, _Question)]
        if not questions:
            return "merged"
        if any(one.answer is not None and not one.answer[0] for one in questions):
            return "renewed"
        return "new" if any(one.answer is None for one in questions) else "kept"

    def read_by(self, kept: KeptPlans | None) -> list[Kept] | None:
        """What a replay would read; None where this is another call."""
        found: list[Kept] = []
        shared: Shared | None = None
        for one in self._noted.questions if self._noted is not None else ():
            if isinstance(one, _Look):
                shared = kept.look()
                if _without_call(shared) != one.answer:
                    return None
                continue
            old = kept.find(one.key, one.rule, one.device, one.renews, shared if one.of_copies else None)
            if _answer(old) != one.answer:
                return None
            if old is not None:
                found.append(old.kept)
        return found

    def replay(self, given: list[torch.Tensor], call: Call | None, read: list[Kept]) -> Any:
        """The result for these inputs, which is the caller's own. call: this one; read: as of `read_by`."""
        for to, value in zip(self._inputs, given, strict=True):
            to.copy_(value)
        if self._noted is not None:
            load(zip(read, (buffer for _, buffer in self._noted.read), strict=True))
            for buffer in self._written:
                if buffer.tenant not in read:  # what is read is replaced
                    buffer.vacate()
        self._replay()
        if self._noted is not None:
            self._keep(call.kept, read)
        if call is not None:
            call.run.ledger.add(self._counted, call)
        return put_together(self._out_form, [one.clone() for one in self._out])

    def _keep(self, kept: KeptPlans, read: list[Kept]) -> None:
        for one, buffer in zip(self._noted.written, self._written, strict=True):
            shared = kept.look() if one.of_copies else None
            since = None if one.since is None else read[one.since]
            buffer.settle(kept.store(one.key, None, one.kept.rule, one.kept.device, shared, since))


def _answer(found: Found | None) -> tuple[bool, Form] | None:
    return None if found is None else (found.is_fresh, form_of(found.kept))


def _without_call(shared: Shared | None) -> tuple[int, int] | None:
    """All but the call, which is another one in each part of a picture, while one graph serves them all."""
    return None if shared is None else (shared.copies, shared.matched)
