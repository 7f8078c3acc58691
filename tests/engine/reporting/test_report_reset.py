"""What a report counts: one picture at a time, and all of the attention that could have merged."""

from __future__ import annotations

import tome_core
from tests.models import BY_NAME, call_case
from tome_core import MergeConfig, MergeRule

CASE = BY_NAME["ldm_sd1"]


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


def test_attention_that_rests_while_the_mlp_merges_counts_as_work():
    early = MergeRule(ratio=0.75, min_timestep=500.0)
    saved = []
    for more in ((), (MergeRule(merge_attn=False, merge_mlp=True),)):
        model = CASE.build()
        with tome_core.patch(model, MergeConfig(rules=(early, *more))) as handle:
            for timestep in (900, 100):
                call_case(CASE, model, timestep=timestep)
        saved.append(handle.report().levels[0].work_saved)
    assert 0 < saved[0] == saved[1] < 0.5


def test_a_level_is_told_the_reason_that_is_its_own():
    model = CASE.build()
    coarse, never, early = (
        MergeRule(min_pixels=1, levels=(1,)), MergeRule(ratio=0.0, max_timestep=200.0), MergeRule(min_timestep=800.0)
    )  # fmt: skip
    with tome_core.patch(model, MergeConfig(rules=(coarse, never, early))) as handle:
        reasons = []
        for timestep in (100, 500):
            handle.reset_counts()
            call_case(CASE, model, timestep=timestep)
            reasons += handle.report().levels[0].reasons
    assert reasons == ["block: a rule of ratio 0 leaves it alone", "block: outside the rules' time range"]
