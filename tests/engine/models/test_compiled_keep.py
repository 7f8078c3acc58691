"""A compiled model keeps its matches over the steps of a picture as one that is not compiled does."""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests import least_unet, tiny_transformers
from tests.compiling import where_compilers_were_tried
from tests.least_unet import FEW, WAYS, draw, same
from tests.samplings import pipeline_of
from tests.tiny_transformers import STRONG
from tome_core import MergeConfig
from tome_core.models import compiled
from tome_core.models.arguments import pack, unpack

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), where_compilers_were_tried]


def _compile(unet, way: str) -> None:
    if way == "whole":
        unet.compile(backend="eager", fullgraph=True)
        return
    for one in unet.modules():
        if type(one).__name__ == "BasicTransformerBlock":
            one.compile(backend="eager", fullgraph=True)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("way", ["whole", "blocks"])
@pytest.mark.parametrize("rules", ["refined", "keys, drawn", "cluster"])
def test_the_same_matches_are_made_renewed_and_kept(rules: str, way: str, copies: int, work):
    """Also over two samplings that cross, and with one match for both halves of guidance."""
    found, done = [], []
    for compiles in (False, True):
        unet = least_unet.build()
        with tome_core.patch(unet, WAYS[rules], host_clock=True) as handle:
            if compiles:
                _compile(unet, way)
            work.clear()
            found.append([one for name in "aba" for one in draw(unet, handle, FEW, name, pictures=1, copies=copies)])
            done.append((list(work), handle.report().as_data()["levels"]))
    assert same(*found) and done[0] == done[1] and done[0][0]


def test_a_pipelines_compiled_unet_keeps_what_it_would_keep(tiny_folder, work):
    pipe = pipeline_of(tiny_folder)

    def picture(seed):
        generator = torch.Generator().manual_seed(seed)
        return pipe("a", num_inference_steps=5, generator=generator, output_type="latent").images

    config = MergeConfig(side="kv", ratio=0.75, keep=250.0, use_rand=False, refine=1)
    with tome_core.patch(pipe, config):
        expected, wanted = [picture(1), picture(2)], list(work)
        work.clear()
        pipe.unet.compile(backend="eager", fullgraph=True)
        assert same([picture(1), picture(2)], expected)
        assert work == wanted and "renew" in work


@pytest.mark.parametrize("by_head", [False, True])
def test_an_attentions_output_lies_as_the_compiler_was_told(by_head: bool):
    """And is nobody else's memory, which a compiler may write over."""
    model, _ = tiny_transformers.make("SD3.5" if by_head else "Wan")
    tome_core.patch(model, **STRONG)
    site = next(one.forward.__self__ for one in model.modules() if hasattr(one, "to_q") and "forward" in vars(one))
    q, k, v = (torch.randn(1, 24, 2, 16) for _ in range(3))
    with torch.no_grad():
        torch.library.opcheck(
            compiled._MADE["attend"], (site.number, site.number, q, k, v, None, by_head, None, False, ""),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def test_what_is_packed_is_unpacked():
    tensor = torch.zeros(1)
    values = [tensor, None, 3, [(1, 2, 3), [tensor], ()], (7,), True]
    form, tensors, numbers = pack(values)
    assert unpack(form, tensors, numbers) == values and len(tensors) == 2
    assert pack([{}]) is None
    form, tensors, numbers = pack([0.5])
    assert unpack(form, tensors, numbers)[0].item() == 0.5
