"""What tests of several rooms of the engine ask for by name."""

from __future__ import annotations

import pytest
import torch

from tome_core.running import matching


@pytest.fixture
def fresh_compiler():
    """For a module that compiles: `pytestmark = pytest.mark.usefixtures("fresh_compiler")`."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def work(monkeypatch) -> list[str]:
    """What is done for plans while graphs run, or without any."""
    done = []
    for name, word in (("_match", "match"), ("_renewed", "renew")):
        plain = getattr(matching.Matcher, name)

        def noted(self, asked, made, *more, plain=plain, word=word):
            if not asked.x.is_meta:
                done.append(word)
            return plain(self, asked, made, *more)

        monkeypatch.setattr(matching.Matcher, name, noted)
    return done
