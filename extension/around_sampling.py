"""Code that runs around the next call of a job's sampler, and is gone then."""
# The webui calls no hook after an exception. So what must not outlive a pass begins and ends with its sampler's call.

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

_METHODS = ("sample", "sample_img2img")  # the webui samples by one of these


def around_next(p: Any, context: Callable[[Any], AbstractContextManager]) -> None:
    """Let the next sampling of the job `p` by ``p.sampler`` run inside the context manager that ``context(p)`` returns.

    Methods of this sampler object are replaced until then, and put back before it samples. Calling this again replaces
    an earlier `context` that was not used. Without a sampler nothing happens.
    """
    sampler = getattr(p, "sampler", None)
    if sampler is not None:
        _put_back(sampler)
        contexts = [context]
        for name in _METHODS:
            setattr(sampler, name, _Around(p, sampler, name, contexts))


class _Around:
    """A stand-in for a method of one sampler object. It keeps neither the sampler nor the job `p` alive."""

    def __init__(self, p: Any, sampler: Any, name: str, contexts: list[Callable]) -> None:
        self._p, self._sampler, self._name = weakref.ref(p), weakref.ref(sampler), name
        self._contexts = contexts  # one, shared by all methods; none after it was used
        self.replaced = vars(sampler).get(name)  # another extension's method; None if there was only the class's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sampler, running = self._sampler(), args[0] if args else kwargs.get("p")
        original = self.replaced or partial(getattr(type(sampler), self._name), sampler)
        # another extension may have kept this stand-in, or sample a copy of the job
        if not self._contexts or running is not self._p():
            return original(*args, **kwargs)
        context = self._contexts.pop()
        _put_back(sampler)
        with context(running):
            return original(*args, **kwargs)


def _put_back(sampler: Any) -> None:
    """Take our stand-ins off a sampler, except those that another extension has replaced since."""
    for name in _METHODS:
        found = vars(sampler).get(name)
        if isinstance(found, _Around):
            if found.replaced is None:
                delattr(sampler, name)
            else:
                setattr(sampler, name, found.replaced)
