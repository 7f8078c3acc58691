"""A compiled UNet merges as it does without a compiler, in any order of the nodes, and beside branches that do not."""

from __future__ import annotations

import pytest
import torch

import tests.comfy_attention as comfy
from comfy_nodes import host
from comfy_nodes.slot import SLOT
from tests.comfy_doubles import Guider, apply, least_checkpoint, with_compile
from tests.compiling import where_compilers_were_tried
from tests.thoroughness import some_quick
from tests.traces import traces

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), where_compilers_were_tried]
HALF = {"ratio": 0.5, "use_rand": False}
QUARTER = {**HALF, "ratio": 0.25}


def compiled(patcher, part="diffusion_model"):
    """As TorchCompileModel does it, without a compiler: guards take no notice of transformer_options."""
    skip = {"guard_filter_fn": lambda guards: ["transformer_options" not in guard.name for guard in guards]}
    inner = patcher.model.get_submodule(part)
    return with_compile(patcher, torch.compile(inner, backend="eager", options=skip), part)


def sample(patcher, size=(8, 8)):
    return Guider(patcher).sample(steps=2, size=size)


def latest(patcher):
    return host.find_attached(patcher).latest


@pytest.mark.parametrize("is_plain_first", some_quick([True, False]))
def test_it_merges_as_without_a_compiler_by_the_function_in_force_and_what_merged_is_counted(
    monkeypatch, is_plain_first
):
    # of the two kinds of functions: with a bias, and without
    name = "attention_sub_quad" if is_plain_first else "attention_split"
    monkeypatch.setattr(comfy, "optimized_attention", getattr(comfy, name))
    plain = least_checkpoint()
    eager, unmerged, before = apply(plain, **HALF), sample(plain), traces(compiled(plain).model)
    expected = sample(eager)
    if is_plain_first:
        assert torch.equal(sample(compiled(plain)), unmerged)
    for branch in (compiled(apply(plain, **HALF)), apply(compiled(plain), **HALF)):
        assert torch.equal(sample(branch), expected) and not torch.equal(expected, unmerged)
        assert latest(branch).report.as_data() == latest(eager).report.as_data()
        assert "left out" in latest(branch).lines[0]
    assert torch.equal(sample(compiled(plain)), unmerged) and torch.equal(sample(plain), unmerged)
    assert traces(plain.model) == before


def test_one_graph_serves_all_settings_and_sizes():
    plain = least_checkpoint()
    branches = [compiled(apply(plain, **one)) for one in (HALF, QUARTER)]
    for number, size in ((0, (8, 8)), (1, (12, 8)), (0, (12, 8))):
        expected = sample(apply(least_checkpoint(), **(HALF, QUARTER)[number]), size)
        assert torch.equal(sample(branches[number], size), expected)


def test_another_nodes_attention_in_the_slot_is_asked_from_a_graph_too():
    def noted(function, *args, **kwargs):
        seen.append(kwargs["transformer_options"]["block"])
        return function(*args, **kwargs)

    plain, seen = least_checkpoint(), []
    plain.model_options["transformer_options"][SLOT] = noted
    expected = sample(apply(plain, **HALF))
    eager = set(seen)
    seen.clear()
    assert torch.equal(sample(compiled(apply(plain, **HALF))), expected) and set(seen) == eager


def test_a_model_of_which_a_part_is_compiled_is_left_alone_and_says_so():
    plain = least_checkpoint()
    applied = compiled(apply(plain, **HALF), "diffusion_model.out")
    assert torch.equal(sample(applied), sample(plain))
    assert "stepped aside: the model is compiled" in latest(applied).lines[0]
