"""Run by ComfyUI's own Python in its own folder: `sample_transformers.py FOLDER REPOSITORY` samples with small random
transformers, as they are and through the nodes, and prints what came of it as JSON, a line for each model."""

# ruff: noqa: E402
import hashlib
import importlib
import json
import os
import sys

FOLDER, REPOSITORY = map(os.path.abspath, sys.argv[1:])
sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
sys.path[:0] = [os.getcwd(), REPOSITORY]  # ComfyUI's and ours

import comfy.options

comfy.options.enable_args_parsing()

import comfy.lora
import comfy.sample
import comfy.sd
import torch
from comfy_extras.nodes_easycache import EasyCacheNode
from safetensors.torch import load_file

nodes = importlib.import_module("comfy_nodes.nodes")
inputs = importlib.import_module("comfy_nodes.inputs")
host = importlib.import_module("comfy_nodes.host")
SIZES, STEPS = {"flux": (64, 64), "sd3": (64, 64), "wan": (8, 32, 32)}, 3  # of latents, a film's frames first
SLOT = "optimized_attention_override"
# as the trial had them that this is held against
SETTINGS = {"side": "kv", "ratio": 0.9375, "sx": 4, "sy": 4, "metric": "keys+values", "use_rand": False, "refine": 1}
torch.set_num_threads(1)


def load(name):
    weights = {key: value.float() for key, value in load_file(f"{FOLDER}/{name}.safetensors").items()}
    return comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": torch.float32})


def prompts(name):
    generator = torch.Generator().manual_seed(1)
    width, pooled = (64, 768) if name == "flux" else (4096, 2048)
    return [
        [[torch.randn(1, 77, width, generator=generator),
          {} if name == "wan" else {"pooled_output": torch.randn(1, pooled, generator=generator)}]]
        for _ in range(2)
    ]  # fmt: skip


def sample(model, name, cfg=None):
    latent = torch.zeros(1, 16, *SIZES[name])
    noise = comfy.sample.prepare_noise(latent, 7)
    with torch.no_grad():
        return comfy.sample.sample(model, noise, STEPS, cfg or (1.0 if name == "flux" else 3.0), "euler", "simple",
                                   *prompts(name), latent, disable_pbar=True, seed=7)  # fmt: skip


def apply(model, **settings):
    config = importlib.import_module("tome_core").MergeConfig(**{**SETTINGS, **settings})
    return nodes.ApplyToMe().apply(model, settings=config)[0]


def digest(x):
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()


def error(found, plain):
    return ((found - plain).pow(2).mean() / plain.pow(2).mean()).sqrt().item()


def report(model):
    merging = host.attached(model)
    return {"lines": merging.lines(), **merging.report().as_data()}


def with_slot(model, function):
    """A clone with another node's attention in the slot."""
    other = model.clone()
    other.model_options["transformer_options"] = {**other.model_options["transformer_options"], SLOT: function}
    return other


class Noted:
    """Attention in the slot: ComfyUI's own, noting whether merged keys came by; it may drop masks, or do more."""

    def __init__(self, drops=False, doubles=False):
        self.drops, self.doubles, self.shorter, self.calls = drops, doubles, 0, 0

    def __call__(self, function, q, k, v, heads, mask=None, **kwargs):
        self.calls += 1
        self.shorter += k.shape[-2] < q.shape[-2] and mask is not None
        out = function(q, k, v, heads, mask=None if self.drops else mask, **kwargs)
        return out * 2 if self.doubles else out


def with_lora(model, seed=3):
    """Some attention's weights changed by a patch of the ModelPatcher, as a LoRA is."""
    other = model.clone()
    key = next(key for key in model.model.state_dict() if "qkv.weight" in key or "self_attn.q.weight" in key)
    shape = model.model.state_dict()[key].shape
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    other.add_patches({key: ("diff", (noise,))}, 1.0)
    return other


def of(name):
    model = load(name)
    plain = sample(model, name)
    merged = apply(model)
    found = sample(merged, name)
    seen = {
        "plain": digest(plain), "error": error(found, plain), "report": report(merged),
        "plain after": digest(sample(model, name)), "again": digest(sample(merged, name)) == digest(found),
        "removed": digest(sample(nodes.RemoveToMe().remove(merged)[0], name)),
        "off": digest(sample(nodes.ApplyToMe().apply(model, strength=0)[0], name)),
        "uncorrected": error(sample(apply(model, correction=False), name), plain),
        "unsized": error(sample(apply(model, proportional=False, refine=0, correction=False), name), plain),
    }  # fmt: skip
    kept = apply(model, keep=400.0)
    seen["kept"] = error(sample(kept, name), plain)
    strong = nodes.ApplyToMe().apply(model, strength=0.5)[0]
    seen["strength"] = error(sample(strong, name), plain)
    seen["strength report"] = report(strong)
    for word, slot in (("adds", Noted()), ("drops", Noted(drops=True)), ("more", Noted(doubles=True))):
        alone = sample(with_slot(model, slot), name)
        both = apply(with_slot(model, slot))
        seen[word] = {"error": error(sample(both, name), alone), "merged": report(both)["work_saved"],
                      "shorter": slot.shorter, "calls": slot.calls}  # fmt: skip
    lora = with_lora(model)
    changed = sample(lora, name)
    seen["lora"] = {"moved": error(changed, plain), "error": error(sample(apply(lora), name), changed)}
    cached = EasyCacheNode.execute(model, 0.2, 0.15, 0.95, False)[0]
    skipped = sample(cached, name)
    seen["easycache"] = {"error": error(sample(apply(cached), name), skipped), "removed": digest(sample(
        nodes.RemoveToMe().remove(apply(cached))[0], name)) == digest(skipped)}  # fmt: skip
    return seen


for one in ("flux", "sd3", "wan"):
    print(json.dumps({"model": one, **of(one)}), flush=True)
