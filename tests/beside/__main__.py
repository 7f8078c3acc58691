"""``python -m tests.beside --count 3000``: that many random pairs of foreign things beside merging.

What two things do together nobody can look up, so a case first asks the model without merging. If that raises, or if
they do not leave the model as it was, there is no case.
"""

from __future__ import annotations

import random
import sys
from collections import Counter

from tests.beside.laws import Case, alone, hold
from tests.beside.models import MODELS, Beside
from tests.beside.things import THINGS
from tests.random_stackings.__main__ import in_silence, main

_OF_CLASSES = ("another method of the class", "another class of attentions")


def drawn(dice: random.Random) -> Case:
    """A model, two things, who comes first, and who leaves first."""
    beside = Beside(dice.choice(MODELS))
    fitting = [name for name, thing in THINGS.items() if thing.fits(beside)]
    # who has saved a method does not see that it, or its object's class, is another one then; through us it would
    things = sorted(dice.sample(fitting, 2), key=lambda name: name not in _OF_CLASSES)
    return Case(beside.name, tuple(things), dice.randrange(3), dice.randrange(3))


def run(seed: int, number: int) -> Counter:
    """What became of the case; raises AssertionError, which names it, if a law is broken."""
    case = drawn(random.Random(f"{seed} {number}"))
    try:
        alone(case.model, case.things)
    except Exception:
        return Counter({"pairs that fail without merging": 1})
    try:
        return Counter({"pairs": 1, hold(case): 1})
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}: {case}") from error
    finally:
        alone.cache_clear()


if __name__ == "__main__":
    in_silence()
    sys.exit(main(None, run, "python -m tests.beside"))
