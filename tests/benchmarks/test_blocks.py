"""SDXL's strength from whole pictures: what leaves out as much work is sorted by its error, the rest is not told."""

import pytest

from benchmarks import blocks, results
from benchmarks.variants import BLOCKS_FRONT


def record(steps: int = 8, **errors: float) -> dict:
    """A made-up result: every way has an error of 1, and the rival of 10, unless `errors` say otherwise."""
    names = (*(f"whole-blocks-{share}-below-{below}" for share, below in BLOCKS_FRONT),
             *filter(None, blocks.ATTENTION.values()), blocks.RIVAL)  # fmt: skip
    told = {**dict.fromkeys(names, 1.0), blocks.RIVAL: 10.0, **errors}
    rows = [{"measure": "pictures", "variant": name, "squared_error": [error, error]} for name, error in told.items()]
    return {"settings": {"steps": steps}, "rows": rows}


def test_a_choice_leaves_out_as_much_as_the_strength_and_the_least_error_is_first():
    good = "whole-blocks-0.0625-below-760"
    first, *others = found = blocks.choices([record(**{good: 0.5}), record(4)], "quality")
    assert (first.share, first.below, first.attention) == (0.0625, 760, "none")
    assert [one.error for one in found] == sorted(one.error for one in found)
    assert first.error == pytest.approx((0.05 * 0.1) ** 0.5) and len(first.saved) == 2 and others
    weak, strong = (blocks.choices([record()], name) for name in ("quality", "max"))
    assert {one[:3] for one in strong} < {one[:3] for one in weak}, "max asks for more work than quality"


def test_the_table_has_what_all_results_measured_and_a_result_needs_the_rival():
    table = blocks.front([record(), record(**{"whole-blocks-0.5-below-510": 3.0})]).splitlines()
    assert len(table) == 2 + len(BLOCKS_FRONT) + 4 and "0.100, 0.300" in table[2] and "1/2 of the tokens" in table[2]
    with pytest.raises(results.ResultError, match=r"no pictures of tomesd-0\.5"):
        blocks.errors({"rows": []})
