"""Copies, pickles, files and processes of whatever is patched: what is another's merges nothing, until it is patched
itself; what shares a network merges as the network does.

Reload UI, after which an older copy of the engine has left its patch, is in `tests/extension/test_shim.py`.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tome_core
from tests import pipelines, transformer_pipelines
from tests.families import MODELS, Family, every_model, largest_difference
from tests.models import sd15
from tests.thoroughness import some_quick
from tests.tiny_transformers import STRONG
from tests.traces import traces
from tome_core import MergeConfig

EVERYTHING = MergeConfig(ratio=0.5, merge_crossattn=True, merge_mlp=True)
CAN_FORK = "fork" in multiprocessing.get_all_start_methods()


def bits(picture: torch.Tensor) -> bytes:
    """All of a picture."""
    return picture.numpy().tobytes()


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


def test_a_handle_is_not_copied():
    handle = tome_core.patch(sd15(), MergeConfig())
    with pytest.raises(TypeError, match="patch the copy of the model"):
        pickle.dumps(handle)


# --- processes --------------------------------------------------------------------------------------------------------


def drawn_by_forked(draw: Callable[[], torch.Tensor]) -> bytes:
    """The picture's bytes in a process that has inherited all memory."""
    forking = multiprocessing.get_context("fork")
    ours, theirs = forking.Pipe()

    def send() -> None:
        torch.set_num_threads(1)  # a thread pool of the parent's is not there
        theirs.send_bytes(bits(draw()))

    child = forking.Process(target=send)
    child.start()
    theirs.close()
    try:
        return ours.recv_bytes()
    finally:
        child.join()


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
    assert torch.equal(one.call(model), vanilla)


def draw_pickled(name: str, pickled: bytes) -> tuple[bytes, bool]:
    """The picture's bytes, and whether the model is patched."""
    torch.set_num_threads(1)
    model = pickle.loads(pickled)
    return bits(MODELS[name].call(model)), tome_core.report(model).patched


@pytest.mark.slow
def test_a_spawned_process_merges_nothing_with_a_patched_model():
    """The default of a DataLoader's workers on Windows and macOS."""
    plain, pickles = [], {}
    for name in ("sd15", "Flux"):
        model = MODELS[name].build()
        plain.append((bits(MODELS[name].call(model)), False))
        with tome_core.patch(model, EVERYTHING):
            MODELS[name].call(model)
            pickles[name] = pickle.dumps(model)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as others:
        assert list(others.map(draw_pickled, *zip(*pickles.items(), strict=True))) == plain


# --- pipelines --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", some_quick(["Flux", *pipelines.KINDS, *(
    name for name in transformer_pipelines.PRESENT if name != "Flux")]))  # fmt: skip
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
