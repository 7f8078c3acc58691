"""Every pipeline of diffusers by its own tests, which hold its small parts and how it is called, and every network:

    DIFFUSERS=CHECKOUT python -m pytest -rs tests/beside/sweep.py

with a checkout of the installed version's repository, half an hour of one processor. What such a test loads from the
hub, tokenizers and encoders of prompts, is answered by random ones, since no prompt is read.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import diffusers
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from torch import nn

import tome_core
from tests.models import merge_with_self
from tests.tiny_transformers import distance
from tests.traces import traces
from tome_core.models import find_models
from tome_core.models.transformer import NAMES

CHECKOUT = Path(os.environ["DIFFUSERS"])
SETTINGS = {"side": "kv", "ratio": 0.75, "max_downsample": 8, "only_if_it_pays": False}
NEAR = 1e-3  # other sums, and UNets that amplify them; of the unmerged picture
LATENT, LARGER = {"output_type": "latent"}, {"height": 128, "width": 128}
SMALL = {"hidden_size": 32, "d_model": 32, "intermediate_size": 37, "d_ff": 37, "num_hidden_layers": 2, "num_layers": 2,
         "num_attention_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "d_kv": 8, "head_dim": 8, "depth": 2,
         "vocab_size": 1103, "projection_dim": 32, "embed_dim": 32}  # fmt: skip
NAMED = {"umt5": "UMT5Config", "t5": "T5Config", "gemma": "Gemma2Config", "Bert": "BertConfig"}


# --- what the hub would answer ----------------------------------------------------------------------------------------


def words(kind: type, *_: Any, **more: Any) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer whose words are bytes."""
    known = ["<s>", "<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(BPE({word: place for place, word in enumerate(known)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    core.add_special_tokens(known[:3])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", pad_token="<pad>", eos_token="</s>",
        chat_template="{% for one in messages %}{{ one.role }} {{ one.content }}{% endfor %}",
        model_max_length=more.get("model_max_length", 77 if "CLIP" in kind.__name__ else 512))  # fmt: skip


def config(kind: type, name: str = "", *_: Any, **__: Any) -> Any:
    """Of its class, or, of an automatic one, of the class that the name tells."""
    if kind is transformers.AutoConfig:
        kind = getattr(transformers, next(one for part, one in NAMED.items() if part in str(name)))
    made = kind()
    small = {name: value for name, value in SMALL.items() if hasattr(made, name)}
    if kind is transformers.LlamaConfig:
        small["hidden_size"] = 16
    return kind(**small, **{name: config(type(getattr(made, name))) for name in kind.sub_configs})


@contextmanager
def offline() -> Iterator[None]:
    """`from_pretrained` of transformers' classes makes a small random object."""
    answers: dict[Callable[..., Any], tuple[Any, ...]] = {
        words: (transformers.PreTrainedTokenizerBase, transformers.AutoTokenizer, transformers.ProcessorMixin,
                transformers.AutoProcessor),
        config: (transformers.PreTrainedConfig, transformers.AutoConfig),
        lambda kind, *_, **__: kind(config(kind.config_class)).eval(): (transformers.PreTrainedModel,),
        lambda kind, *_, **__: kind(size={"height": 32, "width": 32}): (
            transformers.image_processing_base.ImageProcessingMixin,),
        lambda kind, *_, **__: kind(): (transformers.FeatureExtractionMixin,),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patches:
        for answer, kinds in answers.items():
            for kind in kinds:
                patches.setattr(kind, "from_pretrained", classmethod(answer))
        yield


# --- pipelines and networks -------------------------------------------------------------------------------------------


def cases() -> list[Any]:
    """The classes of its tests that make a pipeline; a test that lacks a package is left out."""
    for missing in ("parameterized", "requests_mock"):
        sys.modules.setdefault(missing, MagicMock())
    spec = importlib.util.spec_from_file_location(
        "its_tests", CHECKOUT / "tests/__init__.py", submodule_search_locations=[str(CHECKOUT / "tests")])  # fmt: skip
    sys.modules["its_tests"] = importlib.util.module_from_spec(spec)
    found: dict[Any, type] = {}
    for path in sorted((CHECKOUT / "tests/pipelines").rglob("test_*.py")):
        try:
            common = importlib.import_module("its_tests.pipelines.test_pipelines_common")
            with pytest.MonkeyPatch.context() as patches:  # by its whole name in some tests, and ours are `tests`, too
                patches.setitem(sys.modules, "tests.pipelines.test_pipelines_common", common)
                name = ".".join(path.relative_to(CHECKOUT / "tests").with_suffix("").parts)
                module = importlib.import_module(f"its_tests.{name}")
        except (Exception, pytest.skip.Exception):
            continue
        for one in (one for one in vars(module).values() if getattr(one, "__module__", None) == module.__name__):
            if inspect.isclass(getattr(one, "pipeline_class", None)) and hasattr(one, "get_dummy_inputs"):
                found[getattr(one, "get_dummy_components", None)] = one  # the last has all mixins
    return [pytest.param(one, id=f"{one.pipeline_class.__name__}-{one.__name__}") for one in found.values()]


def make(case: type) -> tuple[Any, dict[str, Any]]:
    """The pipeline, and what it is called with."""
    with torch.random.fork_rng(), offline():
        torch.manual_seed(0)
        one = case()
        pipe = one.pipeline_class(**one.get_dummy_components())
        call = one.get_dummy_inputs(*["cpu"] * ("device" in inspect.signature(one.get_dummy_inputs).parameters))
        for part in pipe.components.values():
            for value in part.eval().parameters() if isinstance(part, nn.Module) else ():
                if not value.any():  # behind zeros nothing of an attention would show
                    nn.init.uniform_(value, 0, 0.1)
    pipe.set_progress_bar_config(disable=True)
    return pipe, call


@torch.no_grad()
def draw(pipe: Any, call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What it gives, whatever that is, as one tensor, and the random generator's state."""
    torch.manual_seed(0)
    given = copy.deepcopy({name: one for name, one in call.items() if name != "generator"})
    if "generator" in inspect.signature(pipe.__call__).parameters:
        given["generator"] = torch.Generator().manual_seed(1)
    out = pipe(**given)[0]
    made = torch.as_tensor(np.asarray(out.float() if torch.is_tensor(out) else out)).float()
    return made, torch.get_rng_state()


def is_refused(target: object, *networks: str) -> bool:
    """If it is, by the name of one of its networks, none of which is known."""
    try:
        tome_core.patch(target).remove()
    except tome_core.UnsupportedModelError as error:
        assert any(name in str(error) for name in networks) and not {*networks} & {*NAMES}, error
        return True
    return False


@pytest.mark.parametrize("case", cases())
def test_a_pipeline_merges_and_comes_off_or_is_refused_by_its_networks_name(case: type):
    try:
        pipe, call = make(case)
    except Exception as error:
        pytest.skip(f"not made: {error!r:.150}")
    if is_refused(pipe, *(type(one).__name__ for one in pipe.components.values() if isinstance(one, nn.Module))):
        return
    for more in (LATENT | LARGER, LATENT, LARGER, {}):
        try:
            plain, state = draw(pipe, call | more)
        except Exception as error:  # it has no latents, or what else it is called with is of another size
            why = f"not drawn: {error!r:.150}"
        else:
            call |= more
            break
    else:
        pytest.skip(why)
    models = find_models(pipe)
    before = [traces(model) for model in models]
    with pytest.MonkeyPatch.context() as patches, tome_core.patch(pipe, **SETTINGS):
        merge_with_self(patches)
        equal, after = draw(pipe, call)
    assert distance(equal, plain) < NEAR and torch.equal(after, state)
    with tome_core.patch(pipe, **SETTINGS) as handle:
        merged, after = draw(pipe, call)
    report = handle.report()
    assert merged.shape == plain.shape and merged.isfinite().all() and torch.equal(after, state)
    assert report.merged_anything or any(level.reasons for level in report.levels), "nobody says why nothing merges"
    assert report.merged_anything != torch.equal(merged, plain), "the report does not say what the picture does"
    assert torch.equal(draw(pipe, call)[0], plain) and [traces(model) for model in models] == before


def networks(kind: type = diffusers.ModelMixin) -> Iterator[type]:
    """diffusers' own that may be known; modules that lack a package are passed over."""
    if kind is diffusers.ModelMixin:
        for module in pkgutil.walk_packages(diffusers.models.__path__, "diffusers.models."):
            try:
                importlib.import_module(module.name)
            except (ImportError, RuntimeError):
                continue
    for derived in kind.__subclasses__():
        if derived.__module__.startswith("diffusers.") and re.search("UNet|Transformer|DiT", derived.__name__):
            yield derived
        yield from networks(derived)


@pytest.mark.parametrize("kind", {kind.__name__: kind for kind in networks()}.values())
def test_a_network_is_taken_or_refused_by_its_name(kind: type):
    with torch.device("meta"):  # as large as it is, without memory
        try:
            model = kind()
        except Exception as error:
            pytest.skip(f"not made: {error!r:.150}")
    is_refused(model, kind.__name__)
