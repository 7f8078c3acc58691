"""A host reports one picture at a time."""

from __future__ import annotations

import tome_core
from tests.models import CASES, call_case
from tome_core import MergeConfig

CASE = next(case for case in CASES if case.name == "ldm_sd1")


def test_counts_and_maps_begin_anew_and_count_on():
    model = CASE.build()
    with tome_core.patch(model, MergeConfig(ratio=0.5)) as handle:
        handle.keep_maps()
        call_case(CASE, model)
        first = handle.report()
        assert first.calls == 1 and first.merged_anything and handle.maps()
        handle.reset_counts()
        empty = handle.report()
        assert empty.calls == 0 and not empty.merged_anything and not handle.maps()
        assert empty.levels[0].work_saved is None
        call_case(CASE, model)
        assert handle.report() == first and handle.maps()
