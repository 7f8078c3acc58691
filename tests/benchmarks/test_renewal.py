"""The benchmark of cheaper renewals: each way is another one, and leaves the engine as it was."""

import pytest
import torch

from benchmarks import renewal, results, subjects
from benchmarks.variants import engine
from demo import model
from tests.small_models import tiny_scenes
from tome_core import MergeConfig, MergeRule
from tome_core.attention import merged
from tome_core.attention.correction import first_order
from tome_core.merging.plan import MergePlan

UNET = {**tiny_scenes.UNET_XL, "sample_size": 64, "transformer_layers_per_block": [1, 2, 1]}
RULE = MergeRule(ratio=0.75, side="kv", metric="keys+values", use_rand=False, sx=4, sy=4, max_downsample=None)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.safetensors"
    model.save(tiny_scenes.make(UNET), path)
    return path


def test_each_way_predicts_otherwise_and_after_it_the_engine_predicts_as_before(path):
    subject = subjects.SceneSubject(path, torch.device("cpu"))
    noised, found = subject.add_noise(0, 2, 500), {}
    with torch.no_grad():
        for way in (*renewal.WAYS, renewal.NOW):
            with renewal.WAYS[way](), engine(config=MergeConfig(rules=(RULE,)))(subject.network, 0):
                predicted = subject.predict(noised)
            if way in found:
                assert torch.equal(found[way], predicted), "the engine is as it was"
            found[way] = predicted
    few = {"fit to half of the answers", "fit to twice the answers"}  # 1,024 tokens have 64 answers
    others = [found[way] for way in renewal.WAYS if way != renewal.NOW and way not in few]
    assert not any(torch.equal(other, found[renewal.NOW]) for other in others)


def test_the_command_measures_what_is_missing_and_its_table_is_of_errors_ratios(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(renewal, "STRENGTHS", ("max",))
    monkeypatch.setattr(renewal, "TIMES", (500,))
    arguments = ["--model", str(path), "--pictures", "2", "--output", str(tmp_path / "renewal.json")]
    assert renewal.main(arguments) == 0
    record, text = results.load(tmp_path / "renewal.json"), capsys.readouterr().out
    errors = {row["key"]: row["squared_error"] for row in record["rows"]}
    assert list(errors) == [f"tiny/max/{way}" for way in renewal.WAYS] and not record["missing"]
    (other,), (now,) = errors["tiny/max/nothing fitted"], errors["tiny/max/as it is"]
    assert "| as it is | 1.00 |\n" in text and f"| nothing fitted | {other / now:.2f} |" in text
    assert renewal.main(arguments) == 0 and results.load(tmp_path / "renewal.json")["rows"] == record["rows"]


def test_with_nothing_fitted_a_correction_is_of_first_order_alone():
    dice = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 64, 16, generator=dice) for _ in range(3))
    plan, places = MergePlan(torch.arange(64)[None] // 2, 32), torch.arange(0, 64, 2)
    first = first_order(k, v, plan.merge_pair(k, v, exact=True)[2], plan, 2, 0.3).flatten(0, 1)
    with renewal.WAYS["nothing fitted"]():
        made, _ = merged.fit_correction(q.unflatten(2, (2, 8)), places, (k, v), plan, 0.3)
    assert torch.equal(made.matrix[:, :8], first) and not made.matrix[:, 8:].any()
