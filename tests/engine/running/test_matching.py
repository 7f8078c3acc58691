"""Strong merging of keys and values, and how many matches a call takes."""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests.families import every_family_in_time, largest_difference
from tests.models import BY_NAME, call_case
from tests.sized_attention import masked_formula
from tome_core import MergeConfig
from tome_core.attention.core import UNSIZED
from tome_core.merging.methods import METHODS
from tome_core.model.switch import switch_of


@every_family_in_time
def test_a_sixty_fourth_of_the_keys_and_every_query(case, attended):
    model = case.build()
    vanilla = call_case(case, model)
    settings = {"side": "kv", "ratio": 0.984375, "sx": 8, "sy": 8, "refine": 2}
    with tome_core.patch(model, correction=False, **settings) as handle:
        merged = call_case(case, model)
    assert merged.isfinite().all() and largest_difference(merged, vanilla) > 1e-3
    tokens, queries, keys = handle.report().levels[0].tokens[0]
    assert keys == tokens // 64 and queries == tokens
    assert attended
    for attention, plan, way, x, context, out in attended:
        assert way != UNSIZED and x.shape[1] == queries and context.shape[1] == keys
        with torch.no_grad():
            expected = masked_formula(attention, x, context, plan.sizes)
        assert largest_difference(out, expected) <= 1e-5 * max(1.0, out.abs().max().item())


@pytest.fixture
def matches(monkeypatch) -> list:
    """Every match of bipartite matching: (grid, plan)."""
    made, match = [], METHODS["bipartite"].match

    def note(x, grid, options):
        made.append((tuple(grid), match(x, grid, options)))
        return made[-1][1]

    monkeypatch.setitem(METHODS, "bipartite", METHODS["bipartite"]._replace(match=note))
    return made


@pytest.mark.parametrize("name", ["ldm_sd1", "sd15", "sdxl", "sgm_double"])
def test_a_block_matches_once_a_call_and_forgets(name, matches, attended):
    case = BY_NAME[name]
    model, alone = case.build(), case.build()
    config = MergeConfig(max_downsample=8, merge_crossattn=True, merge_mlp=True)
    with tome_core.patch(model, config) as handle:
        call_case(case, model, seed=1)
        levels = handle.report().levels
        blocks = sum(level.blocks for level in levels)
        assert len(matches) == blocks == len(attended)
        assert sum(level.calls_merged for level in levels) == 3 * blocks
        assert [id(call.plan) for call in attended] == [id(plan) for _, plan in matches]
        second = call_case(case, model, seed=2)
        smaller = call_case(case, model, batch=1, height=24, seed=3)
        assert len(matches) == 3 * blocks and switch_of(handle.unet).call is None
    for settings, picture in (({"seed": 2}, second), ({"batch": 1, "height": 24, "seed": 3}, smaller)):
        with tome_core.patch(alone, config):  # a call depends on no call before it
            assert torch.equal(call_case(case, alone, **settings), picture)


def test_parts_with_rules_of_their_own_match_apart(matches):
    case = BY_NAME["sd15"]
    keys = tome_core.MergeRule(side="kv", ratio=0.75)
    mlp = tome_core.MergeRule(merge_attn=False, merge_mlp=True)
    model = case.build()
    with tome_core.patch(model, MergeConfig(rules=(keys, mlp))) as handle:
        call_case(case, model)
    (level, *_) = handle.report().levels
    assert [plan.num_groups for _, plan in matches] == [64, 128] * level.blocks
    assert level.calls_merged == 2 * level.blocks
