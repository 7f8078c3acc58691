"""Pipelines of diffusers by its own tests, which hold each one's small parts and how it is called.

What they load from the hub, tokenizers and encoders of prompts, is answered by random ones, since no prompt is read.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from torch import nn

Made = tuple[Any, dict[str, Any]]
SMALL = {"hidden_size": 32, "d_model": 32, "intermediate_size": 37, "d_ff": 37, "num_hidden_layers": 2, "num_layers": 2,
         "num_attention_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "d_kv": 8, "head_dim": 8, "depth": 2,
         "vocab_size": 1103, "projection_dim": 32, "embed_dim": 32}  # fmt: skip
NAMED = {"umt5": "UMT5Config", "t5": "T5Config", "gemma": "Gemma2Config", "Bert": "BertConfig"}
PLACES = {"<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|image_pad|>": 151655, "<|video_pad|>": 151656}
ODD = {"LlamaConfig": {"hidden_size": 16}}
CHAT = "{% for one in messages %}{{ one.role }} {{ one.content }}{% endfor %}"


def cases(checkout: Path) -> dict[str, list[type]]:
    """The classes of its tests that make a pipeline, by the pipeline's name; a test that lacks a package is left."""
    name = f"own_parts_{abs(hash(checkout))}"
    for missing in ("parameterized", "requests_mock"):
        sys.modules.setdefault(missing, MagicMock())
    spec = importlib.util.spec_from_file_location(
        name, checkout / "tests/__init__.py", submodule_search_locations=[str(checkout / "tests")])  # fmt: skip
    sys.modules[name] = importlib.util.module_from_spec(spec)
    found: dict[str, dict[Any, type]] = {}
    for path in sorted((checkout / "tests/pipelines").rglob("test_*.py")):
        try:
            with pytest.MonkeyPatch.context() as patches:
                common = "pipelines.test_pipelines_common"  # by its whole name in some tests, and ours are tests, too
                patches.setitem(sys.modules, f"tests.{common}", importlib.import_module(f"{name}.{common}"))
                module = importlib.import_module(
                    ".".join((name, *path.relative_to(checkout / "tests").with_suffix("").parts)))  # fmt: skip
        except (Exception, pytest.skip.Exception):
            continue
        for one in (one for one in vars(module).values() if getattr(one, "__module__", None) == module.__name__):
            kind = getattr(one, "pipeline_class", None)
            if inspect.isclass(kind) and hasattr(one, "get_dummy_components") and hasattr(one, "get_dummy_inputs"):
                own = next(base for base in kind.__mro__ if base.__module__.startswith("diffusers."))
                found.setdefault(own.__name__, {})[one.get_dummy_components] = one  # the last has all mixins
    return {kind: list(ones.values()) for kind, ones in found.items()}


def make(case: type) -> Made:
    """The pipeline, and what it is called with."""
    with torch.random.fork_rng(), offline():
        torch.manual_seed(0)
        one = case()
        pipe = one.pipeline_class(**one.get_dummy_components())
        call = one.get_dummy_inputs(*["cpu"] * ("device" in inspect.signature(one.get_dummy_inputs).parameters))
        if isinstance(call.get("mask_image"), Image.Image):  # dark ones keep all of the picture
            call["mask_image"] = Image.new("RGB", call["mask_image"].size, "white")
        for part in pipe.components.values():
            for value in part.eval().parameters() if isinstance(part, nn.Module) else ():
                if not value.any():  # behind zeros nothing of an attention would show
                    nn.init.uniform_(value, 0, 0.1)
        if hasattr(pipe, "invert") and "image" not in call and "image_latents" not in call:  # a picture comes first
            pipe.invert(**one.get_dummy_inversion_inputs("cpu"))
    module = vars(sys.modules[type(pipe).__module__])
    module.setdefault("ftfy", SimpleNamespace(fix_text=str))  # mends words that nothing here reads
    if "calculate_dimensions" in module:  # of the picture to edit: a million places
        module["calculate_dimensions"] = lambda _, ratio, own=module["calculate_dimensions"]: own(4096, ratio)
    pipe.set_progress_bar_config(disable=True)
    return pipe, call


@torch.no_grad()
def draw(pipe: Any, call: dict[str, Any]) -> torch.Tensor:
    """What it gives, whatever that is, as one tensor."""
    given = copy.deepcopy({name: one for name, one in call.items() if name != "generator"})
    if "generator" in inspect.signature(pipe.__call__).parameters:
        given["generator"] = torch.Generator().manual_seed(1)
    out = pipe(**given)[0]
    return torch.as_tensor(np.asarray(out.float() if torch.is_tensor(out) else out)).float()


# --- what the hub would answer ----------------------------------------------------------------------------------------


class Words(transformers.PreTrainedTokenizerFast):
    """A byte is a word. It reads pictures, too, as a processor does."""

    image_token = "<|image_pad|>"

    def __call__(self, text: Any = None, images: Any = None, **more: Any) -> Any:
        seen = transformers.Qwen2VLImageProcessor(max_pixels=4096)(images, return_tensors="pt") if images else {}
        counts = iter([int(one.prod()) // 4 for one in seen.get("image_grid_thw", ())])
        if seen:
            text = [re.sub(re.escape(self.image_token), lambda one: one[0] * next(counts), one) for one in text]
        read = super().__call__(text, **more)
        read.update(seen)
        return read

    @property
    def tokenizer(self) -> Words:
        return self


def words(kind: type, *_: Any, **more: Any) -> Words:
    known = ["<s>", "<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(BPE({**{word: place for place, word in enumerate(known)}, **PLACES}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    core.add_special_tokens([*known[:3], *PLACES])
    limit = more.get("model_max_length", 77 if "CLIP" in kind.__name__ else 512)
    made = Words(tokenizer_object=core, bos_token="<s>", pad_token="<pad>", eos_token="</s>", chat_template=CHAT,
                 model_max_length=limit)  # fmt: skip
    if issubclass(kind, transformers.PreTrainedTokenizerFast):
        made.__class__ = type(kind.__name__, (Words, kind), {})  # some pipelines ask
    return made


def config(kind: type, name: str = "", *_: Any, **__: Any) -> Any:
    """Of its class, or, of an automatic one, of the class that the name tells."""
    if kind is transformers.AutoConfig:
        kind = getattr(transformers, next(one for part, one in NAMED.items() if part in str(name)))
    made = kind()
    small = {name: value for name, value in SMALL.items() if hasattr(made, name)} | ODD.get(kind.__name__, {})
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
        patches.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        for answer, kinds in answers.items():
            for kind in kinds:
                patches.setattr(kind, "from_pretrained", classmethod(answer))
        yield
