"""The model of cards tells what the measured card said, equal things twice, and how many launches a renewal takes."""

import re

import pytest
import torch

from benchmarks import card_trace, cards, gpu_rows, models, results, work
from benchmarks.gpu_rows import TOMESD, UNMERGED
from benchmarks.models import SD15, SDXL
from tome_core.merging import kernels

# The most operators and kernels of the engine's that a renewed call of attention alone, by `balanced`, takes more than
# an unmerged one. SD1.5's is what is wanted. SDXL's is lowered whenever kernels become fewer, until it is 500.
MOST_MORE = {"sd15 call, 1024 px": 87, "sdxl call, 2048 px": 572}
WITHIN = 0.15


# rows and ways of which the engine does today what it did on the card
SAME = [pytest.param(row, way, marks=[pytest.mark.slow] * (name == SDXL))
        for row, (name, _) in cards.ROWS.items() for way in cards.UNCHANGED]  # fmt: skip


@pytest.mark.parametrize("row, way", SAME)
def test_the_card_s_time_and_launches_are_predicted_as_they_were_measured(row, way):
    (ms, measured_ms), (launches, measured), *_ = cards.predict(row, way)
    assert ms == pytest.approx(measured_ms, rel=WITHIN)
    # a correction was added in pieces then, each a launch
    assert launches == pytest.approx(measured, rel=WITHIN) or (way == "kept" and 0 < launches < measured)


@pytest.mark.parametrize("row", MOST_MORE)
def test_a_renewed_call_launches_little_more_than_an_unmerged_one(row):
    assert 0 < cards.predict(row, "renewed").more <= MOST_MORE[row]


@pytest.mark.parametrize("row", [next(iter(cards.ROWS)), pytest.param("sdxl call, 1024 px", marks=pytest.mark.slow)])
def test_measured_calls_match_renew_a_match_and_keep_it(row):
    new, renewed, kept = (cards.call(*cards.ROWS[row], gpu_rows.ALONE, times) for times in cards.MEASURED.values())
    assert new.total() > renewed.total() > kept.total() > cards.call(*cards.ROWS[row], UNMERGED).total()
    assert [any(one.name == "ridge" for one in trace) for trace in (new, renewed, kept)] == [True, True, False]


@pytest.mark.parametrize("way, when", [(UNMERGED, "new"), (TOMESD, "new"), ("balanced", "renewed")])
def test_a_call_has_equal_launches_whenever_it_is_traced_and_leaves_nothing_behind(way, when):
    before = kernels.launch
    first, second = (cards.call.__wrapped__(SD15, 512, way, gpu_rows.WHEN[when]) for _ in range(2))
    assert first == second and any(one.is_ours for one in first) == (way == "balanced")
    assert kernels.launch is before and torch.empty(1, device="meta").is_meta


def test_every_kernel_of_the_engine_that_is_launched_has_a_cost_of_its_own_and_takes_longer_on_a_slow_card():
    calls = [cards.call(name, 1024, "balanced", times) for name in (SD15, SDXL) for times in gpu_rows.WHEN.values()]
    launched = {one for trace in calls for one in trace if one.is_ours}
    assert {one.name for one in launched} == cards._OURS.keys()
    fast, slow = cards.CARDS[cards.H200], cards.CARDS["RTX 3060"]
    assert all(0 < cards._of_ours(one, fast) < cards._of_ours(one, slow) for one in launched)


def test_views_launch_nothing_and_attention_is_one_operator():
    x = torch.empty(2, 8, 64, 40, device="meta", dtype=torch.float16)

    def run():
        attended = torch.nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)
        return attended[:, ::2].unflatten(2, (8, -1)) + 1

    ((attention, addition),) = card_trace.trace(run)
    assert (attention.name, addition.name) == (card_trace.ATTENTION, "add")
    assert addition.operands[0].shape == (2, 32, 8, 40)


@pytest.mark.slow
def test_a_better_card_takes_less_and_a_picture_s_steps_gain_between_kept_and_renewed_ones():
    times = [cards.of_card(cards.call(SD15, 1024, UNMERGED), card) for card in cards.CARDS.values()]
    assert times == sorted(times)
    kept, renewed, steps, clock = cards.gains(SD15, 1024, "balanced", cards.CARDS["RTX 3060"])
    assert 1 < renewed < steps < kept and clock < kept


@pytest.mark.slow
def test_whole_blocks_merge_so_a_slow_card_gains_almost_what_is_counted():
    *_, steps, _ = cards.gains(SDXL, 1024, "balanced", cards.CARDS["RTX 3060"])
    assert steps == pytest.approx(1 / (1 - work.share(SDXL, "balanced", 1024)), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", work.LABELS)
def test_the_page_says_what_is_modelled(name):
    """A column of the table is computed again. It may be older by a few kernels."""
    page = (results.ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    for label, card in cards.CARDS.items():
        (line,) = re.findall(rf"^\| {label} \| {work.LABELS[name]} \| (.*) \|$", page, re.MULTILINE)
        said = line.split(" | ")[cards.PIXELS.index(1024)]
        *_, steps, clock = cards.gains(name, 1024, "balanced", card)
        assert [float(figure) for figure in re.findall(r"[\d.]+", said)] == pytest.approx([steps, clock], abs=0.04)


@pytest.mark.slow
def test_the_command_prints_tables(monkeypatch, capsys):
    block = {row: place for row, place in cards.ROWS.items() if place[0] == models.BLOCK}
    monkeypatch.setattr(cards, "ROWS", block)
    monkeypatch.setattr(cards, "PIXELS", (512,))
    monkeypatch.setattr(cards, "LABELS", {SD15: "SD1.5"})
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert cards.main([]) == 0
    out = capsys.readouterr().out
    assert all(row in out for row in block) and out.count("| SD1.5 | 512 |") == len(cards.CARDS)
    assert out.count("other kernels then") == len(block) * (len(gpu_rows.WHEN) - 1)
