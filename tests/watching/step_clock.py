"""A clock for the steps of samplings, so that no test depends on how fast it runs."""

from types import SimpleNamespace

from tome_core.hosting import Steps


def put_on(monkeypatch, step: float = 1.0) -> SimpleNamespace:
    """Advance ``now`` by `step` seconds at each reported step; a test may change both."""
    clock = SimpleNamespace(now=0.0, step=step)

    def tell():
        clock.now += clock.step
        return clock.now

    monkeypatch.setattr(Steps, "clock", staticmethod(tell))
    return clock
