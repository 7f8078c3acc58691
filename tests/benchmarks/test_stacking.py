"""Merging beside what others do to a diffusers UNet's steps; what they do to its parts is `tests/beside`'s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache

import tome_core
from benchmarks import results, stacking
from benchmarks.stack_beside import BESIDE
from benchmarks.stack_nodes import NODES
from benchmarks.stack_pipelines import WANS, RandomPipelines, WanPipelines
from tests import models
from tome_core import MergeConfig, preset
from tome_core.models.unet_blocks import find_blocks

STEPS = [901, 851, 401, 351]


class Pipelines(RandomPipelines):
    """A small UNet, 16 x 16 tokens at its finest level, in diffusers' pipelines."""

    def __init__(self) -> None:
        super().__init__(models.fixed(models.unet(layers_per_block=2, attention_head_dim=2)), 128)

    def draw(self, pipe: Any, number: int = 0, **call: Any) -> torch.Tensor:
        """The finished latent."""
        words = torch.randn(2, 7, models.TEXT, generator=torch.Generator().manual_seed(number))[:, None]
        with torch.no_grad():
            return pipe(prompt_embeds=words[0], negative_prompt_embeds=words[1], timesteps=STEPS, guidance_scale=3.0,
                        height=self.pixels, width=self.pixels, output_type="latent", **call,
                        generator=torch.Generator().manual_seed(number)).images  # fmt: skip


@pytest.fixture(scope="module")
def pipelines() -> Pipelines:
    return Pipelines()


def balanced(**more: Any) -> MergeConfig:
    """The preset on any grid."""
    return replace(preset("balanced"), only_if_it_pays=False, **more)


@contextmanager
def counted(unet: torch.nn.Module) -> Iterator[list[int]]:
    """How often its blocks really ran, by level."""
    places = find_blocks(unet)
    levels = sorted({place.halvings for place in places})
    runs = [0] * len(levels)
    with ExitStack() as stack:
        for place in places:
            def note(*_: Any, level: int = levels.index(place.halvings)) -> None:
                runs[level] += 1

            stack.enter_context(place.block.norm1.register_forward_hook(note))
        yield runs


def named(name: str) -> Any:
    one = BESIDE[name]
    if not one.is_there:
        pytest.skip(f"{one.package} is not installed: pip install -e '.[benchmarks]'")
    return one


def both(pipelines: Pipelines, name: str, ours_first: bool, config: MergeConfig) -> tuple[torch.Tensor, Any, list[int]]:
    """The latent, the report, and how often blocks of each level ran."""
    one = named(name)
    pipe = pipelines.make(one.pipeline, **one.made_with)
    with counted(pipe.unet) as runs:
        if ours_first:
            with tome_core.patch(pipe, config) as handle, one.put_on(pipe):
                return pipelines.draw(pipe, **one.call), handle.report(), runs
        with one.put_on(pipe), tome_core.patch(pipe, config) as handle:
            return pipelines.draw(pipe, **one.call), handle.report(), runs


def alone(pipelines: Pipelines, name: str) -> torch.Tensor:
    one = named(name)
    pipe = pipelines.make(one.pipeline, **one.made_with)
    with one.put_on(pipe):
        return pipelines.draw(pipe, **one.call)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepCache", "PyramidAttentionBroadcast"])
def test_either_order_gives_the_same_bits_and_who_came_first_may_leave_first(pipelines, name):
    first, told, _ = both(pipelines, name, True, balanced())
    second, again, _ = both(pipelines, name, False, balanced())
    pipe, expected = pipelines.make(), alone(pipelines, name)
    assert torch.equal(first, second) and not torch.equal(first, expected)
    assert told.levels == again.levels or name != "DeepCache"
    plain, handle = pipelines.draw(pipe), tome_core.patch(pipe, balanced())
    with named(name).put_on(pipe):
        handle.remove()
        assert torch.equal(pipelines.draw(pipe), expected)
    assert torch.equal(pipelines.draw(pipe), plain)


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "theirs first"])
@pytest.mark.parametrize("config", [balanced(), balanced(end_percent=0.4), balanced(ratio=0.0, early_ratio=None)],
                         ids=["always", "early alone", "never"])  # fmt: skip
def test_the_report_counts_blocks_that_ran_while_deep_cache_skips_others(pipelines, config, ours_first):
    _, told, runs = both(pipelines, "DeepCache", ours_first, config)
    assert 0 < runs[0] < len(STEPS) * told.levels[0].blocks
    for level, ran in zip(told.levels, runs, strict=True):
        assert not level.covered or level.calls_merged + sum(level.reasons.values()) in (0, ran)


def test_broadcast_attention_merges_where_it_is_computed_in_either_order(pipelines):
    name = "PyramidAttentionBroadcast"
    found = [both(pipelines, name, first, balanced()) for first in (True, False)]
    assert torch.equal(found[0][0], found[1][0]) and not torch.equal(found[0][0], alone(pipelines, name))
    for _, told, runs in found:
        for level, ran in zip(told.levels, runs, strict=True):
            assert 0 < level.calls_merged < ran, "some steps take another's output"
            assert level.calls_merged + sum(level.reasons.values()) == ran


def test_perturbed_layers_merge_where_they_attend(pipelines):
    """Guidance's perturbed copy attends to nothing, the others are asked for in the same call."""
    one = BESIDE["PAG at the finest"]._replace(made_with={"pag_applied_layers": ["up_blocks.1"]})
    pipe = pipelines.make(one.pipeline, **one.made_with)
    with tome_core.patch(pipe, balanced()) as handle, counted(pipe.unet) as runs:
        pipelines.draw(pipe, **one.call)
        told = handle.report()
    assert [(level.calls_merged, level.reasons) for level in told.levels] == [(ran, {}) for ran in runs]


def test_first_block_cache_takes_no_unet():
    """What the table of benchmarks.stacking says of it; should a newer diffusers take one, measure it there."""
    unet = models.unet()
    assert not hasattr(unet, "enable_cache")
    with pytest.raises(IndexError):
        apply_first_block_cache(unet, FirstBlockCacheConfig(threshold=0.1))


def test_pipelines_of_the_table_are_diffusers_own():
    assert all(hasattr(diffusers, one.pipeline) for one in BESIDE.values())


def test_a_node_is_measured_where_a_checkout_is_named_and_else_refused_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setenv("COMFYUI_DIR", "/anywhere")
    options = stacking.parser().parse_args(["--pictures", "1", "--rounds", "1"])
    assert {name for _, name, _ in stacking.plan_cases(options).values()} >= NODES.keys()
    monkeypatch.delenv("COMFYUI_DIR")
    assert not {name for _, name, _ in stacking.plan_cases(options).values()} & NODES.keys()
    assert stacking.main(["--beside", "EasyCache"]) == 2
    assert "EasyCache is not there; it needs COMFYUI_DIR" in capsys.readouterr().err


def test_first_block_cache_is_measured_on_wan_alone(tmp_path):
    output = tmp_path / "wan.json"
    arguments = ["--beside", "FirstBlockCache", "--timed", "FirstBlockCache", "--rounds", "2", "--tiny"]
    assert stacking.main([*arguments, "--output", str(output)]) == 0
    rows = results.load(output)["rows"]
    assert {row["model"] for row in rows} == set(WANS) and all(row["off_is_exact"] for row in rows)
    assert all(row["rms"]["alone"] > 0 for row in rows), "it skips a step"


@pytest.mark.parametrize("number", [0, 1])
def test_films_of_wan_are_two_neighbouring_steps_that_merge(number):
    films = WanPipelines("wan", tiny=True)
    pipe = films.make()
    plain = films.draw(pipe, number)
    with tome_core.patch(pipe, balanced()) as handle:
        merged = films.draw(pipe, number)
    ((tokens, _, keys),) = handle.report().levels[0].tokens
    assert handle.report().calls == 2 and (keys / tokens > 0.1) == bool(number), "late steps keep more keys"
    assert (merged != plain).any() and (films.draw(pipe, number) == plain).all()
