"""Copies, pickles and files of a patched model: a copy merges nothing until it is patched itself; what shares a network
merges as the network does.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tome_core
from tests import pipelines, transformer_pipelines
from tests.families import Family, every_model
from tests.models import sd15
from tests.thoroughness import some_quick
from tests.tiny_transformers import STRONG
from tests.traces import traces
from tome_core import MergeConfig
from tome_core.models.wrap import wraps_on

EVERYTHING = MergeConfig(ratio=0.5, merge_crossattn=True, merge_mlp=True)


def saved(model: Any, folder: Path) -> dict[str, bytes]:
    """The files that `save_pretrained` writes, by their names."""
    model.save_pretrained(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@every_model
def test_a_deep_copy_and_a_pickle_of_a_patched_model_merge_nothing(one: Family):
    model = one.build()
    vanilla = one.call(model)
    handle = tome_core.patch(model, EVERYTHING)
    merged = one.call(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(one.call(other), vanilla) and not tome_core.report(other).patched
        assert not any(wraps_on(module) for module in other.modules()), "it shares nothing with the first"
        with tome_core.patch(other, EVERYTHING):  # over what the copy has brought along
            assert torch.equal(one.call(other), merged)
        tome_core.remove_patch(other)
        assert torch.equal(one.call(other), vanilla) and traces(other) == traces(one.build())
    assert torch.equal(one.call(model), merged) and handle.report().calls == 2
    other = copy.deepcopy(model)
    for weight in model.parameters():
        weight.data.zero_()
    assert torch.equal(one.call(other), vanilla), "it runs its own weights"


def test_a_handle_is_not_copied_and_what_holds_one_is():
    handle = tome_core.patch(sd15(), MergeConfig())
    with pytest.raises(TypeError, match="patch the copy of the model"):
        pickle.dumps(handle)
    assert copy.deepcopy({"handle": handle}) == {"handle": None}


# --- pipelines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some_quick(
    ["Flux", *pipelines.KINDS, *(name for name in transformer_pipelines.PRESENT if name != "Flux")]))  # fmt: skip
def test_a_pipelines_copy_is_its_own_and_from_pipe_shares_the_patch(name: str, tmp_path):
    if name in pipelines.KINDS:
        pipe, draw = pipelines.make(tmp_path, name), pipelines.draw
    else:
        pipe, call = transformer_pipelines.make(name)
        draw = partial(transformer_pipelines.draw, call=call)
    plain, files = draw(pipe), saved(pipe, tmp_path / "plain")
    with tome_core.patch(pipe, **STRONG, only_if_it_pays=False) as handle:
        merged, before = draw(pipe), handle.report().calls
        assert saved(pipe, tmp_path / "patched") == files and not torch.equal(merged, plain)
        other = copy.deepcopy(pipe)
        assert torch.equal(draw(other), plain) and not tome_core.report(other).patched
        with tome_core.patch(other, **STRONG, only_if_it_pays=False):
            assert torch.equal(draw(other), merged)
        sibling = type(pipe).from_pipe(pipe, **pipe.components)
        assert not torch.equal(draw(sibling), plain) and handle.report().calls == 2 * before
    assert torch.equal(draw(sibling), plain) and torch.equal(draw(pipe), plain)
