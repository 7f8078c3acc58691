"""The curve of strength is what the committed results make of it."""

import ast

import pytest

from benchmarks import results, strength
from tome_core.settings import presets

SOURCES = {presets.SD: ["front-cpu-2026-11-22"], presets.SDXL: ["sdxl-front-cpu-2026-11-24"]}


@pytest.mark.parametrize("curve", presets.CURVES)
def test_a_shipped_curve_is_made_from_the_committed_results(capsys, curve):
    assert strength.main([str(results.FOLDER / f"{name}.json") for name in SOURCES[curve]]) == 0
    shipped = presets.CURVES[curve]  # SDXL's ends early
    assert ast.literal_eval(capsys.readouterr().out.splitlines()[-1])[: len(shipped)] == shipped
