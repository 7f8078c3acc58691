"""Graphs in ComfyUI's API format, and the results of their runs."""

import itertools
from typing import Any

import torch

TEXTS = {  # a prompt's widths: its tokens' and its summary's, 0 for none
    "sd1": (768, 0), "sdxl": (2048, 1280), "flux": (64, 768), "sd3": (4096, 2048), "wan": (4096, 0),
    "qwen_image": (64, 0), "z_image": (64, 0),
}  # fmt: skip
TRANSFORMERS = {  # shapes of their latents
    "flux": "16,64,64", "sd3": "16,64,64", "wan": "16,8,32,32", "qwen_image": "16,1,64,64", "z_image": "16,60,60",
}  # fmt: skip
SEEDS = itertools.count(1000)


class Graph:
    """Collects nodes; `add` gives the node's first output; `graph` is what is posted. Each has its own seed, because
    ComfyUI samples nothing again that is in its cache. Transformers have no guidance and a latent of their own size."""

    def __init__(self, model: str = "sd1", batch: int = 1, steps: int = 2) -> None:
        self.graph: dict[str, dict] = {}
        self.steps, self.seed = steps, next(SEEDS)
        width, pooled = TEXTS[model]
        if model in TRANSFORMERS:
            self.cfg = 1.0
            self.model = self.add("TestLoad", name=f"{model}.safetensors")
            self.latent = self.add("TestLatent", shape=TRANSFORMERS[model])
        else:
            self.cfg = 7.0
            self.model = self.add("UNETLoader", unet_name=f"{model}.safetensors", weight_dtype="default")
            self.latent = self.add("EmptyLatentImage", width=128, height=128, batch_size=batch)
        self.positive, self.negative = (self.add("TestText", width=width, pooled=pooled, seed=seed) for seed in (1, 2))

    def add(self, kind: str, **inputs: Any) -> list:
        """A node of this class; inputs are values, or what `add` gave."""
        number = str(len(self.graph) + 1)
        self.graph[number] = {"class_type": kind, "inputs": inputs}
        return [number, 0]

    def apply(self, model: list | None = None, **values: Any) -> list:
        """ApplyToMe with these settings from a ToMeSettings; `start` and `end` are ApplyToMe's."""
        times = {name: values.pop(name) for name in ("start", "end") if name in values}
        return self.strength(model, settings=self.add("ToMeSettings", **values), **times)

    def strength(self, model: list | None = None, **values: Any) -> list:
        return self.add("ApplyToMe", model=model or self.model, **values)

    def removed(self, model: list) -> list:
        return self.add("RemoveToMe", model=model)

    def sample(self, name: str, model: list | None = None, **changes: Any) -> list:
        """A KSampler whose result is kept under a name."""
        inputs = {"model": model or self.model, "positive": self.positive, "negative": self.negative,
                  "latent_image": self.latent, "seed": self.seed, "steps": self.steps, "cfg": self.cfg,
                  "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}  # fmt: skip
        latent = self.add("KSampler", **{**inputs, **changes})
        self.add("TestKeep", result=latent, name=name)
        return latent

    def sample_all(self, models: dict[str, list], **changes: Any) -> None:
        """A KSampler for each of the models, whose result is kept under the model's name."""
        for name, model in models.items():
            self.sample(name, model, **changes)


def bytes_of(seen: dict, name: str) -> list[str]:
    """A latent, image by image, in hexadecimal."""
    return seen["latents"][name]["bytes"]


def distance(seen: dict, name: str, plain: str) -> float:
    """The difference of a latent from another one, as a share of the other."""
    picture, expected = (torch.frombuffer(bytearray.fromhex(bytes_of(seen, key)[0]), dtype=torch.float32)
                    for key in (name, plain))  # fmt: skip
    return ((picture - expected).norm() / expected.norm()).item()


def report_of(seen: dict, node: list) -> str:
    """The last text of a node, with all the details."""
    return [text for number, text in seen["texts"] if number == node[0]][-1]
