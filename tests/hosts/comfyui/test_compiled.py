"""A compiled UNet merges in a real ComfyUI, by each of its attention functions, in any order of the nodes."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.hosts.comfyui.graphs import Graph, bytes_of, report_of
from tests.hosts.comfyui.running import ROOT, run_script

COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a compiler")
BRANCHES = ("after", "before", "off", "more", "again", "removed")


@pytest.mark.parametrize(("backend", "attention"), [
    ("eager", "pytorch"), ("eager", "split"), ("eager", "quad"), pytest.param("inductor", "quad", marks=COMPILER),
])  # fmt: skip
def test_it_merges_and_is_off_as_without_a_compiler_whichever_function_attends(checkout, base, backend, attention):
    model = base / "models" / "diffusion_models" / "sd1.safetensors"
    seen = json.loads(run_script(checkout, "sample_compiled.py", model, ROOT, backend, attention).splitlines()[-1])
    print(seen)
    most = 0 if backend == "eager" else 1e-3 * seen["merging moves it by"]
    assert seen["merging moves it by"] > 1 and all(seen[name] <= most for name in BRANCHES)
    assert all(seen[f"{name}, counted"] == 0 and "left out" in seen[f"{name}, line"]
               for name in ("after", "before", "more", "again"))  # fmt: skip


def test_it_merges_in_any_order_and_the_branches_beside_it_as_ever(comfy):
    graph = Graph(steps=2)
    applied = graph.apply()
    before = graph.apply(graph.add("TestCompile", model=graph.model))
    graph.sample_all({
        "plain": graph.model, "plain compiled": graph.add("TestCompile", model=graph.model), "applied": applied,
        "compiled after": graph.add("TestCompile", model=applied), "compiled before": before,
        "plain compiled again": graph.add("TestCompile", model=graph.model), "applied again": graph.apply(),
    })  # fmt: skip
    seen = comfy.good(graph.graph)
    assert "256 tokens -> 128" in report_of(seen, before)
    for name in ("plain compiled", "plain compiled again"):
        assert bytes_of(seen, name) == bytes_of(seen, "plain"), name
    for name in ("compiled after", "compiled before", "applied again"):
        assert bytes_of(seen, name) == bytes_of(seen, "applied") != bytes_of(seen, "plain"), name
