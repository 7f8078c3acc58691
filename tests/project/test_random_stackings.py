"""A small share of the random stackings at every run, always the same; `python -m tests.random_stackings` does more.

Seeds move on by a change of `SEED` alone, so that nobody's change is red for what another's would be.
"""

from __future__ import annotations

import json
import logging

import pytest

from tests.random_stackings import __main__ as command
from tests.random_stackings import cases, comfy_graphs, laws

pytestmark = pytest.mark.slow
SEED = 1  # `--seed 0 --count 10000` is the long run's
SHARE = {laws: 90, comfy_graphs: 20}


@pytest.mark.parametrize("kind", SHARE, ids=lambda kind: kind.__name__.rpartition(".")[2])
def test_random_stackings_end_in_a_picture_or_a_sentence(kind, monkeypatch, capsys):
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    monkeypatch.setattr(cases, "KINDS", {kind.hold: 1})
    seen = sum((cases.run(SEED, number) for number in range(SHARE[kind])), start=cases.Counter())
    with capsys.disabled():
        print(f"\n  {', '.join(f'{count} {what}' for what, count in sorted(seen.items()))} ", end="")
    assert sum(seen.values()) - seen[kind.__name__.rpartition(".")[2]] >= SHARE[kind]


def test_a_case_that_fails_says_how_to_repeat_it_and_the_run_goes_on(monkeypatch, capsys, tmp_path):
    numbers, plain = [], cases.run

    def broken(dice, repeats):
        if numbers[-1] == 3:
            raise laws.Fault("by the test")
        return cases.Counter()

    monkeypatch.setattr(cases, "KINDS", {broken: 1})
    run = lambda seed, one: numbers.append(one) or plain(seed, one)  # noqa: E731
    arguments = ["--count", "6", "--seed", "5", "--output", str(tmp_path / "seen.json")]
    assert command.main(arguments, run) == 1 and numbers == list(range(6))
    again = "python -m tests.random_stackings --seed 5 --first 3 --count 1"
    assert again in capsys.readouterr().err
    kept = json.loads((tmp_path / "seen.json").read_text())
    assert kept["done"] == 5 and kept["faults"] == [{"number": 3, "fault": "by the test", "repeat": again}]
    assert command.main(arguments, run) == 1 and len(numbers) == 6, "what was done is not done again"


def test_a_fault_of_the_engine_is_found(monkeypatch):
    """The laws can fail: wraps that do not come off."""
    from tome_core.models.wrap import Wrap

    monkeypatch.setattr(cases, "KINDS", {laws.hold: 1})
    monkeypatch.setattr(Wrap, "uninstall", lambda self: None)
    with pytest.raises(laws.Fault):
        for number in range(20):
            cases.run(SEED, number)
