"""A random case by its seed and number: a model, two foreign things, who came first, and who leaves first.

What two things do together nobody can look up, so a case first asks the model without merging. If that raises, or if
they do not leave the model as it was, there is no case.
"""

from __future__ import annotations

import random
from collections import Counter

from tests.beside.laws import Case, alone, hold
from tests.beside.models import MODELS, Beside
from tests.beside.things import THINGS

COMMAND = "python -m tests.beside"
_OF_CLASSES = ("another method of the class", "another class of attentions")
PAIR, NO_PAIR = "pairs", "pairs that fail without merging"


def drawn(dice: random.Random) -> Case:
    """The pair of these dice."""
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
        return Counter({NO_PAIR: 1})
    try:
        return Counter({PAIR: 1, hold(case): 1})
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}: {case}") from error
    finally:
        alone.cache_clear()
