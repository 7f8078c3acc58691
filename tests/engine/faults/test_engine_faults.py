"""Faults that random arguments, interrupts and threads brought up: each as small as it gets."""

from __future__ import annotations

import functools
import linecache
import sys

from tome_core.model import switch, wrap

import tome_core
from tests.models import BY_NAME
from tests.threads import at_once
from tome_core import MergeConfig

CASE = BY_NAME["sd15"]


def patched(model) -> bool:
    return any("forward" in vars(module) for module in model.modules()) or "_tome_core_patch" in vars(model)


def leaves_a_with(frame, entered: set) -> bool:
    """Is this line event the end of a ``with``? CPython lets a signal in before or after its exit, a trace between."""
    here = id(frame), frame.f_lineno
    if here in entered:
        entered.discard(here)
        return True
    if linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
        entered.add(here)
    return False


def test_an_interrupt_at_any_line_of_installing_leaves_nothing():
    model, lines = CASE.build(), 0

    def interrupt_at(number):
        seen, entered = 0, set()

        def trace(frame, event, argument):
            nonlocal seen
            if "tome_core" not in frame.f_code.co_filename:
                return None
            if event == "line" and leaves_a_with(frame, entered):
                return trace
            seen += event == "line"
            if seen == number:
                seen += 1
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with tome_core.patch(model, MergeConfig(ratio=0.5)):
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return seen

    lines = interrupt_at(-1)
    for number in range(1, lines, max(1, lines // 60)):
        interrupt_at(number)
        tome_core.remove_patch(model)
        assert not patched(model) and not switch.patch_lock()._is_owned(), number


def test_two_threads_patch_one_model():
    model, before = CASE.build(), sys.getswitchinterval()

    def work(ratio):
        for _ in range(15):
            with tome_core.patch(model, MergeConfig(ratio=ratio, proportional=False)):
                pass
            tome_core.apply_patch(model, ratio=ratio)
            tome_core.remove_patch(model)

    sys.setswitchinterval(1e-6)
    try:
        at_once(*(functools.partial(work, ratio) for ratio in (0.25, 0.5)))
    finally:
        sys.setswitchinterval(before)
    tome_core.remove_patch(model)
    assert not patched(model)


def test_whatever_takes_a_wrap_off_keeps_other_threads_from_patching(monkeypatch):
    model, owned, leave = CASE.build(), [], wrap.Wrap.leave
    monkeypatch.setattr(wrap.Wrap, "leave", lambda self: (owned.append(switch.patch_lock()._is_owned()), leave(self)))
    handle = tome_core.patch(model, MergeConfig(ratio=0.5))
    module = next(module for module in model.modules() if "forward" in vars(module))
    ours = module.forward
    module.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    handle.remove()
    while_on, module.forward = len(owned), ours
    tome_core.remove_patch(model)
    assert len(owned) > while_on > 0 and all(owned) and not patched(model)
