"""Copies, pickles, files and processes of whatever is patched: what is another's merges nothing, until it is patched
itself; what shares a network merges as the network does.

Reload UI, after which an older copy of the engine has left its patch, is in `tests/extension/test_shim.py`.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch

import tome_core
from tests import pipelines, transformer_pipelines
from tests.copies import CAN_FORK, bits, drawn_by_forked, drawn_by_spawned, saved
from tests.families import MODELS, Family, every_model, largest_difference
from tests.models import sd15
from tests.thoroughness import some_quick
from tests.tiny_transformers import STRONG
from tests.traces import traces
from tome_core import MergeConfig

EVERYTHING = MergeConfig(ratio=0.5, merge_crossattn=True, merge_mlp=True)


@every_model
def test_a_deep_copy_and_a_pickle_of_a_patched_model_merge_nothing(one: Family):
    model = one.build()
    vanilla = one.call(model)
    handle = tome_core.patch(model, EVERYTHING)
    merged = one.call(model)
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in others:
        assert torch.equal(one.call(other), vanilla) and not tome_core.report(other).patched
        tome_core.remove_patch(other)
        assert torch.equal(one.call(other), vanilla) and traces(other) == traces(one.build())
        with tome_core.patch(other, EVERYTHING):
            assert torch.equal(one.call(other), merged)
    assert torch.equal(one.call(model), merged) and handle.report().calls == 2
    other = copy.deepcopy(model)
    handle.remove()
    del model
    assert torch.equal(one.call(other), vanilla)
    with tome_core.patch(other, EVERYTHING):  # over what the copy has brought along
        assert torch.equal(one.call(other), merged)
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    assert largest_difference(one.call(other), vanilla) > 1e-3


@every_model
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_merges_as_its_parent_and_what_is_saved_says_nothing_of_it(one: Family, tmp_path):
    """A copy of all memory has our patch as well."""
    model = one.build()
    files = saved(model, tmp_path / "plain") if hasattr(model, "save_pretrained") else None
    vanilla = one.call(model)
    with tome_core.patch(model, EVERYTHING) as handle:
        merged = one.call(model)
        assert not CAN_FORK or drawn_by_forked(lambda: one.call(model)) == bits(merged)
        assert torch.equal(one.call(model), merged) and handle.report().calls == 2
        if files is not None:
            assert saved(model, tmp_path / "patched") == files
    assert not CAN_FORK or drawn_by_forked(lambda: one.call(model)) == bits(vanilla)
    assert torch.equal(one.call(model), vanilla)


@pytest.mark.slow
def test_a_spawned_process_merges_nothing_with_what_it_is_given():
    """The default of a DataLoader's workers on Windows and macOS."""
    plain, pickles = {}, {}
    for name, one in MODELS.items():
        model = one.build()
        plain[name] = bits(one.call(model))
        with tome_core.patch(model, EVERYTHING):
            one.call(model)
            pickles[name] = pickle.dumps(model)
    found = list(drawn_by_spawned(pickles))
    assert len(found) == len(MODELS)
    for name, picture, is_patched in found:
        assert picture == plain[name] and not is_patched, name


def test_a_handle_is_not_copied():
    handle = tome_core.patch(sd15(), MergeConfig())
    with pytest.raises(TypeError, match="patch the copy of the model"):
        pickle.dumps(handle)


# --- pipelines --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", some_quick(["Flux", *pipelines.KINDS, *(
    one for one in transformer_pipelines.PRESENT if one != "Flux")]))  # fmt: skip
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
        others = [copy.deepcopy(pipe)]
        if name not in pipelines.KINDS:  # transformers leaves hooks on their text encoders that nobody can pickle
            others.append(pickle.loads(pickle.dumps(pipe)))
        for other in others:
            assert torch.equal(draw(other), plain) and not tome_core.report(other).patched
            with tome_core.patch(other, **STRONG, only_if_it_pays=False):
                assert torch.equal(draw(other), merged)
        sibling = type(pipe).from_pipe(pipe, **pipe.components)
        assert not torch.equal(draw(sibling), plain) and handle.report().calls == 2 * before
    assert torch.equal(draw(sibling), plain) and torch.equal(draw(pipe), plain)
