"""The benchmark of the engine's own error: what it draws and keeps, and the figures that it makes of rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tome_core
from benchmarks import own_error, results, subjects
from benchmarks import own_error_report as tables
from benchmarks.own_error import ALONE, ATTENTION, BOUNDED, CURVE, USUAL, Row
from demo import model, prompt, sampler
from tests.small_models import tiny_scenes
from tome_core.engine.own_error import allowed
from tome_core.settings.presets import SDXL

pytestmark = pytest.mark.pays  # for the runs that tests share, which begin before a test does


@pytest.fixture(scope="module")
def whole(tiny_file, tmp_path_factory) -> tuple[Path, str]:
    """The result of a run of one picture in four steps, and what the command printed."""
    path = tmp_path_factory.mktemp("whole") / "result.json"
    run(tiny_file, path)
    return path, path.with_suffix(".md").read_text(encoding="utf-8")


def run(model: Path, output: Path) -> results.Record:
    arguments = ["--model", str(model), "--pictures", "1", "--steps", "4", "--output", str(output)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(own_error.torch, "set_num_threads", lambda number: None)
        assert own_error.main(arguments) == 0
    return results.load(output)


def test_a_row_has_a_pictures_error_its_work_and_the_engines_estimates_and_the_tables_show_them(whole):
    record, text = results.load(whole[0]), whole[1]
    assert record["missing"] == [] and len(record["rows"]) == len(own_error.STRENGTHS) + 4
    for row in record["rows"]:
        assert row["squared_error"] > 0 and len(row["timesteps"]) == row["steps"] == 4
        assert sum(row["weights"]) == pytest.approx(1, abs=1e-3) and row["errors"]
        for part, level, timestep, share, error in row["errors"]:
            assert part == "attn" and 0 <= level < len(row["weights"]) and timestep in row["timesteps"]
            assert 0 < share < 1 and error > 0
    last = next(row for row in record["rows"] if (row["way"], row["amount"]) == (CURVE, 1.0))
    psnr = tables.decibels(last["squared_error"])
    assert f"| tiny | 4 | curve 1 | {last['work_saved']:.1%} | {psnr:.1f} | n/a | n/a |" in text
    assert "| errors / allowed |" in text and "fitted to other models |" not in text, "one model has no other half"


def test_a_stopped_run_goes_on_to_the_same_rows(tiny_file, whole, tmp_path):
    record, cut = results.load(whole[0]), tmp_path / "cut.json"
    results.save({**record, "rows": record["rows"][:4]}, cut)
    assert run(tiny_file, cut)["rows"] == record["rows"]


def test_the_unmerged_picture_is_the_demos(tiny_file):
    bench = own_error.Bench({"tiny": tiny_file})
    row = Row("tiny", CURVE, 1.0, USUAL._replace(steps=2), 3)
    error = bench.measure(row)["squared_error"]
    show = subjects.PURPOSES[subjects.SHOW]
    demos = sampler.sample(bench.model, prompt.tokens(show.prompts[3]), show.first + 3, steps=2)
    ours = sampler.to_bytes(bench._plain * 2 - 1)[0]
    assert np.abs(ours.astype(int) - demos).max() <= 1
    other = Row("tiny", CURVE, 1.0, USUAL._replace(steps=2, sampler="ddim"), 3)
    assert bench.measure(other)["squared_error"] != error and bench._drawn[1].sampler == "ddim"


def test_a_way_is_the_strengths_settings_but_for_what_its_name_says():
    strength = tome_core.strength(0.5, SDXL)
    bounded, curve, attention = (own_error.config(way, 0.5, SDXL) for way in (BOUNDED, CURVE, ATTENTION))
    assert bounded == replace(strength, only_if_it_pays=False)
    assert curve == replace(bounded, max_error=None)
    assert attention.rules == curve.rules[:1] and attention.early_ratio == curve.early_ratio is not None
    alone = own_error.config(ALONE, 1e-4, SDXL)
    (rule,) = alone.rules
    assert (rule.max_error, rule.effective_ratio, alone.early_ratio) == (1e-4, 1 - 1 / 64, None)
    assert not rule.only_if_it_pays


def test_every_way_has_rows_in_the_usual_setting_and_blocks_only_where_they_merge(tiny_file):
    ways = {deep: {way for way, _ in own_error.ways(USUAL, deep)} for deep in (True, False)}
    assert ways == {True: {CURVE, BOUNDED, ALONE, ATTENTION}, False: {CURVE, BOUNDED, ALONE}}
    deep = tiny_file.with_name("deep.safetensors")
    model.save(tiny_scenes.make(tiny_scenes.UNET_XL), deep)
    planned = own_error.rows({path.stem: path for path in (tiny_file, deep)}, 2, (4, 8, 20))
    assert {row.checkpoint for row in planned if row.way == ATTENTION} == {deep.stem}
    assert len({row.key for row in planned}) == len(planned) == 2 * (2 * (5 * 5 + 3 * 4 + 3) + 2)


def made(**changes) -> dict:
    """A made-up row of two steps, the second served by the first one's match at level 0."""
    return {"model": "a", "way": CURVE, "amount": 0.5, **USUAL._asdict(), "picture": 0, "squared_error": 1e-3,
            "work_saved": 0.3, "timesteps": [550.0, 500.0], "weights": [0.25, 0.75],
            "errors": [["attn", 0, 550.0, 0.5, 0.04], ["attn", 1, 500.0, 0.25, 0.02],
                       ["block", 1, 500.0, 0.25, 0.1]], **changes}  # fmt: skip


def test_an_estimate_is_a_mean_over_steps_of_what_served_there():
    row = made()
    assert tables.share_kept(row) == pytest.approx(((0.25 * 0.5 + 0.75) + (0.25 * 0.5 + 0.75 * 0.25)) / 2)
    assert tables.estimate(row, of_blocks=0) == pytest.approx((0.01 + (0.01 + 0.015)) / 2)
    assert tables.estimate(row, of_blocks=0.5) == pytest.approx((0.01 + (0.01 + 0.015 + 0.05)) / 2)
    weighted = 0.01 / allowed("attn", 550.0) + 0.025 / allowed("attn", 500.0)
    assert tables.estimate(row, 1.0, 0) == pytest.approx(weighted / 2)
    renewed = made(errors=[["attn", 0, 500.0, 0.5, 0.08], *row["errors"][:1]])
    assert tables.estimate(renewed) == pytest.approx((0.01 + 0.02) / 2), "a new match replaces the old one"
    over = made(timesteps=[550.0, 489.0])
    assert tables.estimate(over, of_blocks=0) == pytest.approx((0.01 + 0.015) / 2), "a match serves 60 timesteps"


def test_ranks_and_decades_are_those_of_textbooks():
    assert tables.rank_correlation([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)
    assert tables.rank_correlation([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9**0.5), "ranks 1.5, 1.5, 3, 4"
    assert tables.rank_correlation([1, 2], [5, 5]) is None
    assert tables.decades([0, 1, 2, 3], [1, 3, 5, 7]) == pytest.approx(0)
    assert tables.decades([0, 0, 0, 0], [1, 3, 1, 3]) == pytest.approx(1)
    assert tables.decades([0, 1], [1, 3], has_line=True) == pytest.approx(2.5**0.5)


def test_single_pictures_are_told_from_their_settings_mean():
    rows = [made(amount=amount, picture=picture, squared_error=10 ** -(amount + picture))
            for amount in (1.0, 5.0) for picture in (0, 1)]  # fmt: skip
    pairs = tables.beside_means(rows, lambda row: row["amount"])
    assert [pair[1] for pair in pairs] == pytest.approx([0.5, -0.5, 0.5, -0.5])
    assert {pair[0] for pair in pairs} == {0.0}, "what is equal in a setting tells nothing of its pictures"


def test_a_fit_finds_the_weights_that_made_the_errors():
    dice = np.random.default_rng(0)
    rows = []
    for number in range(40):
        steps = (4, 8, 20)[number % 3]
        times = [999 - 1000 * step / steps for step in range(steps)]
        errors = [[part, level, time, 0.5, float(10 ** dice.uniform(-4, -1))]
                  for time in times for part, level in (("attn", 0), ("attn", 1), ("block", 1))]  # fmt: skip
        row = made(model="ab"[number % 2], steps=steps, timesteps=times, errors=errors)
        squared = 0.1 * tables.estimate(row, 1.5, 0.03) ** 0.5 * steps**0.25
        rows.append({**row, "squared_error": squared})
    fit = tables.Fit.to(rows)
    assert (fit.power, fit.of_blocks) == (1.5, 0.03) and fit.line == pytest.approx((-1, 0.5, 0.25))
    assert [fit(row) for row in rows] == pytest.approx([tables.measured(row) for row in rows])
    assert set(tables.fits(rows)) == {("a",), ("b",)}
    text = tables.fitted_table([{"rows": rows}])
    assert "| a | b | 1.50 | 0.03 | 0.50 | 0.25 | 0.00 | 0.00 |" in text
    (line,) = [line for line in tables.predictions([{"rows": rows}]).splitlines() if "fitted to other" in line]
    assert line.count("1.00, 0.00") == 4, "all rows, both models and single pictures; means are no such product"


def test_what_is_fitted_to_a_half_is_tried_on_the_models_that_it_has_not_seen():
    rows = [made(model=model, squared_error=10**-power, errors=[["attn", 0, 550.0, 0.5, error]])
            for model, power in (("a", 2), ("b", 4)) for error in (0.01, 0.02)]  # fmt: skip
    fitted = tables.fits(rows)
    assert fitted["b",](rows[-1]) == pytest.approx(-2) and fitted["a",](rows[0]) == pytest.approx(-4)


def test_a_way_is_compared_with_the_curves_line_at_its_work():
    rows = [made(amount=0.1, work_saved=0.2, squared_error=1e-4), made(amount=1.0, work_saved=0.4, squared_error=1e-3),
            made(way=BOUNDED, work_saved=0.2, squared_error=5e-5),
            made(way=BOUNDED, work_saved=0.4, squared_error=1.5e-4, picture=1),
            made(way=ALONE, amount=1e-4, work_saved=0.1, squared_error=1e-6),
            made(way=BOUNDED, work_saved=0.3, squared_error=1.0, sampler="ddim")]  # fmt: skip
    cases = {case.way: case for case in tables.at_equal_work(rows)}
    bounded = cases[BOUNDED]
    assert (bounded.work, bounded.psnr, bounded.of_curve) == pytest.approx((0.3, 40, 35))
    assert bounded.gain == pytest.approx(5)
    assert cases[ALONE].of_curve is cases[ALONE].gain is None, "the curve has no such work"
    text = tables.equal_work([{"rows": rows[:2]}, {"rows": rows[2:]}])
    assert "| a | 8 | bounded 0.5 | 30.0% | 40.0 | 35.0 | +5.0 |" in text
    usual = [made(picture=picture, work_saved=0.3, squared_error=error, errors=[["attn", 0, 550.0, 0.5, told]])
             for picture, error, told in ((0, 1e-4, 0.01), (1, 1e-2, 0.04))]  # fmt: skip
    (line,) = tables.by_model([{"rows": [*rows, *usual]}]).splitlines()[2:]
    assert "| 30%, 23.0 | 30%, 40.0 | 6.7, 20.0 | 2.0, 4.0 |" in line, "one of three settings has two pictures"
    assert tables.by_model([{"rows": rows}]).endswith("| 0.0, 0.0 | 1.0, 1.0 | +5.0 (+5.0 to +5.0) | n/a |")


def test_shares_by_error_alone_are_beside_attentions_curve_if_blocks_merge():
    rows = [made(way=way, amount=amount, work_saved=work, squared_error=error)
            for way, amount, work, error in (
                (CURVE, 0.1, 0.2, 1e-4), (CURVE, 1.0, 0.6, 1e-4), (ATTENTION, 0.5, 0.3, 1e-3),
                (ATTENTION, 1.0, 0.5, 1e-2), (ALONE, 1e-4, 0.4, 1e-3))]  # fmt: skip
    cases = {case.way: case for case in tables.at_equal_work(rows)}
    assert cases[ALONE].gain == pytest.approx(5) and cases[ATTENTION].gain == pytest.approx(-20)
