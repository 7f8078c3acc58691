"""A small SD1.5 whose matches are kept over steps, and what is done for plans while it is called."""

from __future__ import annotations

import pytest
from diffusers import StableDiffusionPipeline

from tests.models import BY_NAME
from tests.tiny_pipeline import write_folder
from tome_core import MergeConfig
from tome_core.running import matching

CASE = BY_NAME["sd15"]
KEPT = MergeConfig(side="kv", ratio=0.75, use_rand=False, keep=100.0, refine=1, metric="keys+values")


@pytest.fixture(name="work")
def done_for_plans(monkeypatch) -> list[str]:
    """What is done for plans, by graphs or without any: "match" or "renew", one entry a block."""
    done = []
    for name, word in (("_match", "match"), ("_renew", "renew")):
        plain = getattr(matching.Matcher, name)

        def noted(self, asked, *args, plain=plain, word=word):
            if not asked.x.is_meta:  # while a compiler traces
                done.append(word)
            return plain(self, asked, *args)

        monkeypatch.setattr(matching.Matcher, name, noted)
    return done


@pytest.fixture(name="model")
def tiny_unet():
    return CASE.build()


def blocks(handle) -> int:
    return handle.report().levels[0].blocks


@pytest.fixture(name="folder", scope="module")
def pipeline_folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pipeline"))


def pipeline_of(folder, kind=StableDiffusionPipeline):
    pipe = kind.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(name="pipe")
def tiny_pipeline(folder):
    return pipeline_of(folder)
