"""Our patch and foreign things on one model, in any order: the picture is right, or what was left out is named."""

import random
from typing import Any
from zlib import crc32

import pytest

from tests.beside.laws import THINGS, Case, alone, hold
from tests.beside.models import MODELS, QUICK, Beside
from tests.beside.things_below import BELOW, RARE
from tests.thoroughness import THOROUGH, some_quick

# how many come before us, how many leave before us; and the models of such cases in a quick run, the first that fits
ORDERS = {"it came last and leaves first": (0, 1, "Wan"), "it came first and leaves last": (1, 0, "sd15"),
          "it came and leaves first": (1, 1, "ldm"), "it came and leaves last": (0, 0, "Qwen-Image")}  # fmt: skip
# quick only where the last to come leaves first: for any other order, things that put back a method stand for these
IN_TURN = ("hooks", "accelerate's hooks", "PAG's guider", "a device for new tensors", "a processor around another",
           "FreeU", "a LoRA", "weights that come for each layer", "offloaded leaves")  # fmt: skip
SHARE = 20  # for the other models, one case in so many; in a thorough run all


def _cases() -> list[Any]:
    things_of = {name: [thing for thing in THINGS if THINGS[thing].fits(beside)]
                 for name, beside in ((name, Beside(name)) for name in MODELS)}  # fmt: skip
    cases = []
    for number, (order, (before, after, model)) in enumerate(ORDERS.items()):
        for thing in THINGS:
            is_its_turn = thing not in BELOW or crc32(thing.encode()) % len(ORDERS) == number  # quick in one order
            fitting = [name for name in (model, *QUICK, *MODELS) if thing in things_of.get(name, ())]
            for name in dict.fromkeys(fitting):
                is_first = name == fitting[0] and (thing not in RARE or is_its_turn)
                if is_first or THOROUGH or crc32(f"{order} {thing} {name}".encode()) % SHARE == 0:
                    is_slow = not (is_first and is_its_turn) or (before == after and thing in IN_TURN) or thing in RARE
                    cases.append(pytest.param(Case(name, (thing,), before, after), id=f"{thing}-{name}-{order}",
                                              marks=[pytest.mark.slow] * is_slow))  # fmt: skip
    return cases


@pytest.mark.parametrize("case", _cases())
def test_the_picture_is_right_or_is_left_alone_and_nothing_of_us_stays(case: Case):
    hold(case)


@pytest.mark.parametrize("number", some_quick(range(1000 if THOROUGH else 24), 3))
def test_with_two_things_as_well(number: int):
    """Only pairs that work together without merging count."""
    dice = random.Random(f"1 {number}")
    beside = Beside(dice.choice(MODELS))
    fitting = [name for name, thing in THINGS.items() if thing.fits(beside)]
    # a thing that saved a method does not see that the object's class changed later; through our patch it would
    things = sorted(dice.sample(fitting, 2), key="another class of attentions".__ne__)
    case = Case(beside.name, tuple(things), dice.randrange(3), dice.randrange(3))
    try:
        alone(case.model, case.things)
    except Exception:
        return
    print(case)
    hold(case)


def test_what_stands_over_a_hook_of_accelerates_is_named():
    """Our wrap lies below such a hook, so the hook is never called."""
    hold(Case("sd15", ("weights that come for each layer", "attentions' own forward"), 1, 2))
