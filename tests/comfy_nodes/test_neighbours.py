"""Beside packs that cannot be installed here, by what they do to a model: frames, stand-ins, whole-model wrappers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.comfy_doubles import Guider, apply, checkpoint, least_checkpoint, noted, with_compile
from tests.doubles import ComfyBlock


class TemporalTransformer3DModel(nn.Module):
    """What AnimateDiff puts between a UNet's modules: blocks whose tokens are frames, not places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([ComfyBlock(width, 4, width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).permute(2, 0, 1)  # [places, frames, C]
        for block in self.transformer_blocks:
            tokens = block(tokens, tokens)
        return tokens.permute(1, 2, 0).reshape(x.shape)


def test_animatediff_merges_in_spatial_blocks_only(server):
    patcher = checkpoint()
    added = TemporalTransformer3DModel(32)
    frames = added.transformer_blocks[0].attn1
    patcher.model.diffusion_model.input_blocks[1].append(added)
    applied = apply(patcher)
    patched = noted(applied, lambda: "forward" in vars(frames))
    assert Guider(applied).sample(steps=1, batch=4).isfinite().all()
    assert patched == [False] and "256 tokens -> 128" in server.texts[-1][1]


def projections_alone(attention: nn.Module, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """What ComfyUI's block does where a node stands in for an attention; the node wants every token."""
    assert x.shape[1] in (16 * 16, 8 * 8)
    return attention.attend(x, context, context)


class ReplacedBlock(ComfyBlock):
    """Perturbed-attention guidance stands in for attn1, IPAdapter for attn2."""

    replaced = ""

    def forward(self, x, context=None, transformer_options=None):
        n = self.norm1(x)
        own = projections_alone(self.attn1, n, n) if self.replaced == "attn1" else self.attn1(n, transformer_options={})
        x = x + own
        n = self.norm2(x)
        if self.replaced == "attn2":
            x = x + projections_alone(self.attn2, n, context)
        else:
            x = x + self.attn2(n, context=context, transformer_options={})
        return x + self.ff(self.norm3(x))


@pytest.mark.parametrize(
    ("replaced", "said", "saved"),
    [("attn1", "attn", "attention left whole"), ("attn2", "crossattn", "75 % of attention left out"),
     ("", "", "75 % of attention left out")],
)  # fmt: skip
def test_an_attention_that_another_node_stands_in_for_is_left_alone_and_said(server, replaced, said, saved):
    patcher = checkpoint()
    for module in patcher.model.modules():
        if type(module) is ComfyBlock:
            module.__class__ = ReplacedBlock
            module.replaced = replaced
    applied = apply(patcher, merge_crossattn=True, merge_mlp=True)
    assert Guider(applied).sample(steps=1).isfinite().all()
    report = server.texts[-1][1]
    assert saved in report.splitlines()[0]
    assert report.count("runs in its place") == bool(replaced)
    assert not replaced or f"calls: {said}: something else runs in its place" in report


@pytest.mark.parametrize("size", [(1, 16), (2, 2), (9, 15)])
@pytest.mark.parametrize("method", ["bipartite", "downsample", "cluster"])
def test_any_size_and_method_merges_or_steps_aside(server, size, method):
    grown = tuple(2 * side for side in size)  # the small UNet halves once
    applied = apply(checkpoint(), method=method, level="up to /8")
    assert Guider(applied).sample(steps=1, batch=3, size=grown).isfinite().all()
    assert server.texts[-1][1].startswith("ToMe: 1 step, ")


@pytest.mark.slow
def test_branches_of_one_compiled_model_merge_or_not_in_any_order():
    """TorchCompileModel swaps the model's UNet for a compiled one while its branch runs."""
    torch._dynamo.reset()
    plain = least_checkpoint()
    applied = apply(plain)
    compiled = torch.compile(plain.model.diffusion_model, backend="eager")

    expected = {"plain": Guider(plain).sample(steps=1), "applied": Guider(applied).sample(steps=1)}
    branches = {"plain": with_compile(plain, compiled), "applied": with_compile(applied, compiled)}
    for name in ("applied", "plain", "applied"):
        assert torch.allclose(Guider(branches[name]).sample(steps=1), expected[name], atol=1e-5), name
    before = with_compile(plain, compiled)
    assert torch.allclose(Guider(apply(before)).sample(steps=1), expected["applied"], atol=1e-5)
