"""In a real A1111, whichever forward it puts on an attention: merged keys give what repeated keys give."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.hosts.webui.running import HERE, environment, kind_of

FLAGS = ("--use-cpu", "all", "--no-half", "--precision", "full", "--skip-torch-cuda-test")


def test_each_forward_takes_sizes_on_both_libraries_in_every_precision_and_behind_hypernetworks(checkout):
    if kind_of(checkout) != "a1111":
        pytest.skip("the Forges' attention has one forward, which all other tests of this folder go through")
    command = [os.environ.get("WEBUI_PYTHON", sys.executable), str(HERE / "hold_attentions.py"), *FLAGS]
    done = subprocess.run(command, cwd=checkout, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ways = json.loads(done.stdout.splitlines()[-1])
    assert len(ways) == 8 * 2 * 9
    for case, way in ways.items():
        is_torchs = case.startswith("scaled_dot_product_attention_forward")
        assert way == ("bias" if is_torchs else "bias, by torch's own function"), case
