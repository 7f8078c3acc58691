"""In a real ComfyUI, whichever function attends: merged keys give what repeated keys give."""

from __future__ import annotations

import json

import pytest

from tests.hosts.comfyui.running import run_script
from tome_core.attention.merged import BIAS, OWN_BIAS

ADDING = ("basic", "split", "pytorch")  # to others torch's own function is better


@pytest.fixture(scope="module")
def found(checkout):
    """Which way each function took, in ComfyUI's own Python."""
    return json.loads(run_script(checkout, "hold_attentions.py", "--cpu").splitlines()[-1])


def test_each_function_takes_sizes_in_every_precision_raised_and_chosen_by_a_node(found):
    for case, way in found.items():
        assert way == (BIAS if case.split()[0] in ADDING else OWN_BIAS), case
    assert len(found) > 40


def test_functions_that_cut_their_work_where_memory_is_short_were_among_them(found):
    assert {"split short of memory", "sub_quad short of memory", "pytorch behind a node"} <= set(found)
