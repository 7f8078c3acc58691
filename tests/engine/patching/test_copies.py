"""Copies and files of a patched model merge nothing until they are patched; what shares its network merges as it."""

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tome_core
from tests.small_models import sd_pipelines, transformer_pipelines
from tests.small_models.dits import STRONG, distance
from tests.small_models.families import any_model
from tests.small_models.unets import Family, sd15
from tests.thoroughness import some_quick
from tests.watching.traces import attributes, traces
from tome_core import MergeConfig
from tome_core.models.wrap_set import wraps_on

EVERYTHING = MergeConfig(ratio=0.5, merge_crossattn=True, merge_mlp=True)
SETTINGS = {**STRONG, "keep": 600.0, "only_if_it_pays": False}


def saved(model: Any, folder: Path) -> dict[str, bytes]:
    """The files that `save_pretrained` writes, by their names."""
    model.save_pretrained(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@any_model
def test_a_deep_copy_and_a_pickle_of_a_patched_model_merge_nothing(family: Family):
    model = family.build()
    vanilla = family.call(model)
    handle = tome_core.patch(model, EVERYTHING)
    merged = family.call(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(family.call(other), vanilla) and not tome_core.report(other).patched
        assert not any(wraps_on(module) for module in other.modules()), "it shares nothing with the first"
        with tome_core.patch(other, EVERYTHING):  # over the leftovers of the copied patch
            assert torch.equal(family.call(other), merged)
        tome_core.remove_patch(other)
        assert torch.equal(family.call(other), vanilla) and traces(other) == traces(family.build())
    assert torch.equal(family.call(model), merged) and handle.report().calls == 2
    other = copy.deepcopy(model)
    for weight in model.parameters():
        weight.data.zero_()
    assert torch.equal(family.call(other), vanilla), "it runs its own weights"


def test_a_handle_is_not_copied_and_what_holds_one_is():
    handle = tome_core.patch(sd15(), MergeConfig())
    with pytest.raises(TypeError, match="patch the copy of the model"):
        pickle.dumps(handle)
    assert copy.deepcopy({"handle": handle}) == {"handle": None}


# one transformer, and Wan's two; then UNets, other meanings of time, schedulers, guiders and inputs
_FIRST = [name for name in ("Flux", "Wan 2.2, of two transformers") if name in transformer_pipelines.PRESENT]
_OTHERS = [name for name in (*sd_pipelines.KINDS, *transformer_pipelines.PRESENT) if name not in _FIRST]


@pytest.mark.parametrize("name", some_quick([*_FIRST, *_OTHERS], len(_FIRST)))
def test_a_pipeline_merges_near_to_itself_and_a_copy_is_its_own_and_from_pipe_shares_the_patch(name: str, tmp_path):
    if name in sd_pipelines.KINDS:
        pipe, draw = sd_pipelines.make(tmp_path, name), sd_pipelines.draw
        models, most = [pipe.unet], float("inf")
    else:
        pipe, call = transformer_pipelines.make(name)
        draw = partial(transformer_pipelines.draw, call=call)
        models, most = transformer_pipelines.transformers_of(pipe), 0.05
    plain, files = draw(pipe), saved(pipe, tmp_path / "plain")
    before, held = [*map(attributes, models)], set(vars(pipe))
    with tome_core.patch(pipe, **SETTINGS) as handle:
        merged, report = draw(pipe), handle.report()
        assert not report.reasons and report.levels[0].work_saved > 0.6 and 0 < distance(merged, plain) < most
        assert saved(pipe, tmp_path / "patched") == files
        other = copy.deepcopy(pipe)
        assert torch.equal(draw(other), plain) and not tome_core.report(other).patched
        with tome_core.patch(other, **SETTINGS):
            assert torch.equal(draw(other), merged)
        sibling = type(pipe).from_pipe(pipe, **pipe.components)
        assert not torch.equal(draw(sibling), plain) and handle.report().calls == 2 * report.calls
    assert torch.equal(draw(sibling), plain) and torch.equal(draw(pipe), plain)
    assert [*map(attributes, models)] == before and set(vars(pipe)) == held
