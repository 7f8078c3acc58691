"""The smallest form of merging in docs/methods.md attends as repeated means do, and errs less than tomesd."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from benchmarks import subjects, variants
from benchmarks.networks import answer_by, finest_blocks
from tests.families import largest_difference

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8").split("\n## ")[1]
HEADS, LATENT = 2, (8, 8)


@pytest.fixture(scope="module")
def form() -> SimpleNamespace:
    """The functions that the page shows."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", SECTION, re.S | re.M)
    shown: dict = {}
    exec(code, shown)
    return SimpleNamespace(**shown)


def drawn(keys: int) -> list[torch.Tensor]:
    """Queries of all tokens of the latent, and so many keys and values."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, count, 16, generator=generator) for count in (LATENT[0] * LATENT[1], keys, keys)]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def repeated(x: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Slow and obvious: every token is replaced by the mean of its group."""
    return torch.stack([torch.stack([one[numbers == number].mean(0) for number in numbers])
                        for one, numbers in zip(x, group, strict=True)])  # fmt: skip


@pytest.mark.parametrize("downsample", [1, 2])
def test_it_attends_as_repeated_means_do(form: SimpleNamespace, downsample: int):
    q, k, v = drawn(LATENT[0] * LATENT[1] // downsample**2)
    rows, columns = (side // downsample for side in LATENT)
    group, sizes = form.group_tokens(k, v, rows, columns, 0.75)
    assert torch.equal(sizes, torch.stack([one.bincount(minlength=k.shape[1] // 4) for one in group]).float())
    assert sizes.min() >= 1
    found = form.attend(q, k, v, HEADS, LATENT, 0.75)
    assert largest_difference(found, plain(q, repeated(k, group), repeated(v, group))) < 1e-5
    assert largest_difference(found, plain(q, k, v)) > 1e-2


def test_it_leaves_keys_alone_that_are_no_grid_and_at_ratio_0_those_that_are_one(form: SimpleNamespace):
    for keys in (77, 60):
        assert torch.equal(form.attend(*drawn(keys), HEADS, LATENT, 0.75), plain(*drawn(keys)))
    assert largest_difference(form.attend(*drawn(64), HEADS, LATENT, 0.0), plain(*drawn(64))) < 1e-6


@torch.no_grad()
def test_it_errs_a_quarter_as_much_as_tomesd_at_equal_attention_work(form: SimpleNamespace):
    """On the demo's model, at its finest level; tomesd merges queries too, so its share counts twice."""
    pytest.importorskip("tomesd")
    subject = subjects.SceneSubject(subjects.SCENE_MODELS[0], torch.device("cpu"))
    noised = subject.add_noise(0, 2, 437)
    full = subject.predict(noised)

    def attend(attention, ratio: float, x: torch.Tensor, **_) -> torch.Tensor:
        projected = attention.to_q(x), attention.to_k(x), attention.to_v(x)
        return attention.to_out[0](form.attend(*projected, attention.heads, noised.x.shape[-2:], ratio))

    def error_under(put_on) -> float:
        with put_on:
            return (subject.predict(noised) - full).square().mean().item()

    attentions = [place.block.attn1 for place in finest_blocks(subject.network)]
    ours, at_0 = (answer_by({one: partial(attend, one, kept) for one in attentions}) for kept in (0.75, 0.0))
    error = error_under(ours)
    assert error_under(at_0) < 1e-3 * error
    assert error < 0.25 * error_under(variants.tomesd(0.5)(subject.network, 0))
