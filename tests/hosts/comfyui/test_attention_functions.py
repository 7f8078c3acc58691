"""In a real ComfyUI, whichever function attends: merged keys give what repeated keys give."""

from __future__ import annotations

import json

import pytest

from tests.hosts.comfyui.running import run_script

ADDING = ("basic", "split", "pytorch", "xformers")  # what else there is gets wider heads alone


@pytest.fixture(scope="module")
def found(checkout):
    """Which ways each function took, in ComfyUI's own Python."""
    return json.loads(run_script(checkout, "hold_attentions.py", "--cpu").splitlines()[-1])


def test_each_function_takes_sizes_in_every_precision_and_with_logits_raised(found):
    for case, ways in found.items():
        name, *_ = case.split()
        both = ["bias", "wider heads"] if name in ADDING else ["wider heads"]
        assert ways == both, case
    assert len(found) > 30


def test_functions_that_cut_their_work_where_memory_is_short_were_among_them(found):
    assert {"split short of memory", "sub_quad short of memory", "override", "another function for masks"} <= set(found)
