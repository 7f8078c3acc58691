"""Every attention processor of diffusers is in the table, where it is and as the engine knows it.

A class that a newer diffusers brings is in none of its parts, and that fails.
"""

from __future__ import annotations

import diffusers
import pytest
from diffusers.models import attention_processor
from diffusers.models.attention_processor import Attention

from tests.conformance_diffusers import HEADS, WIDTH
from tests.diffusers_processors import ALONE, HOME, KNOWN, LEFT_ALONE, MADE, TOGETHER, found, of_diffusers, unmade
from tome_core.attention import KnownAttention, LeftAlone, known_of, name_of, processors


def test_the_table_decides_for_every_attention_processor_of_diffusers():
    undecided = {name: modules for name, modules in found().items() if name not in (*KNOWN, *TOGETHER, *ALONE)}
    assert not undecided, (
        f"diffusers {diffusers.__version__} has attention processors that nobody has decided about: {undecided}. "
        f"Read each: if it computes plain attention of a UNet block's tokens to themselves, describe it in "
        f"tome_core/attention/processors.py and put it into KNOWN of tests/diffusers_processors.py; if it may sit on "
        "such a block's attn1 and is right on a shorter sequence, put it into TOGETHER; if it may, and must see every "
        "token, describe it as `LeftAlone` and put it into LEFT_ALONE; else into NEVER_THERE."
    )


def test_no_class_is_in_the_table_twice():
    names = [*KNOWN, *TOGETHER, *ALONE]
    assert len(names) == len(set(names))


def test_the_known_ones_are_where_the_engine_looks_for_them_and_nowhere_else():
    assert all(found()[name] == [HOME] for name in KNOWN if name in found())


def test_reading_the_home_of_processors_finds_every_class_that_importing_it_finds():
    """No class comes about in another way, or under a name that the pattern overlooks."""
    here = {name for name, one in vars(attention_processor).items() if isinstance(one, type) and "Processor" in name}
    imported = {"IPAdapterMaskProcessor"}  # for pictures
    assert here - imported == {name for name, modules in found().items() if HOME in modules}


@pytest.mark.parametrize("name", [*KNOWN, *TOGETHER, *ALONE])
def test_the_engine_knows_what_the_table_says_it_knows(name):
    """Of a class that cannot be made here the engine sees an object that was not."""
    kind = of_diffusers(name) if name in MADE else getattr(attention_processor, name, None)
    if kind is None:
        return  # in a module of its own, which the engine does not look at
    module = Attention(WIDTH, heads=HEADS, dim_head=WIDTH // HEADS)
    module.set_processor(unmade(kind))
    known = known_of(module)
    assert isinstance(known, KnownAttention) == (name in KNOWN)
    assert isinstance(known, LeftAlone) == (name in LEFT_ALONE)
    assert (known is None) == (name not in KNOWN and name not in LEFT_ALONE)
    assert name_of(module) == name
    assert name not in KNOWN or type(known) is processors._KNOWN[name]
