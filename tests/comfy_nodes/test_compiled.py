"""A compiled UNet merges as without a compiler, other branches of it do not; other compiled models are left alone."""

import pytest
import torch

from comfy_nodes.nodes import ApplyToMe
from comfy_nodes.slot_calls import SLOT
from tests.host_doubles import comfy_attention
from tests.host_doubles.comfy import BaseModel, ModelPatcher, apply, latest, least_checkpoint, sample, transformer
from tests.host_doubles.comfy_models import deep_unet
from tests.watching.traces import traces
from tome_core import MergeConfig, MergeRule

pytestmark = pytest.mark.usefixtures("fresh_compiler")
HALF = {"ratio": 0.5, "use_rand": False}
WHOLE = "diffusion_model"
ASIDE = "stepped aside: the model is compiled; remove that node to merge"


def compiled(patcher, part=WHOLE):
    """A branch after TorchCompileModel: a compiled part replaces that part during the branch's calls."""
    skip = {"guard_filter_fn": lambda guards: ["transformer_options" not in guard.name for guard in guards]}
    # this dictionary in the wrapper's closure says what is compiled
    held = {part: torch.compile(patcher.model.get_submodule(part), backend="eager", options=skip)}

    def swap(run, *args, **kwargs):
        kept = run.class_obj.get_submodule(part)
        run.class_obj.set_submodule(part, held[part])
        out = run(*args, **kwargs)
        run.class_obj.set_submodule(part, kept)
        return out

    other = patcher.clone()
    other.add_wrapper_with_key("apply_model", "torch.compile", swap)
    return other


def test_it_merges_as_without_a_compiler_by_the_function_in_force_and_what_merged_is_counted(monkeypatch):
    monkeypatch.setattr(comfy_attention, "optimized_attention", comfy_attention.attention_split)
    plain = least_checkpoint()
    eager, unmerged = apply(plain, **HALF), sample(plain)
    before = traces(compiled(plain).model)  # torch.compile notes something on the module itself
    expected = sample(eager)
    assert torch.equal(sample(compiled(plain)), unmerged) and not torch.equal(expected, unmerged)
    for branch in (compiled(apply(plain, **HALF)), apply(compiled(plain), **HALF)):
        assert torch.equal(sample(branch), expected)
        assert latest(branch).report.as_data() == latest(eager).report.as_data()
    assert torch.equal(sample(compiled(plain)), unmerged) and torch.equal(sample(plain), unmerged)
    assert traces(plain.model) == before


@pytest.mark.slow
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


@pytest.mark.parametrize(("load", "part"), [(least_checkpoint, "diffusion_model.out"), (transformer, WHOLE)])
def test_a_model_compiled_in_part_and_a_transformer_are_left_alone_in_any_order_and_say_so(load, part):
    """Also if a pack compiled the part in place."""
    plain = load()
    branches = [compiled(apply(plain, **HALF), part), apply(compiled(plain, part), **HALF)]
    for branch in (*branches, apply(plain, **HALF)):
        if branch not in branches:
            plain.model.get_submodule(part).compile(backend="eager")
        assert torch.equal(sample(branch), sample(plain)) and ASIDE in latest(branch).lines[0]


def test_whole_blocks_of_a_compiled_model_stay_as_they_are_and_it_is_said():
    plain = ModelPatcher(BaseModel(deep_unet()))
    rules = (MergeRule(merge_attn=False, merge_blocks=True, ratio=0.75, side="kv", use_rand=False, min_downsample=2),)
    applied = ApplyToMe().apply(plain, settings=MergeConfig(rules=rules))[0]
    assert torch.equal(sample(compiled(applied)), sample(plain))
    report = latest(compiled(applied)).report
    assert not report.block_tokens and "compiled" in str(report)
