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

import comfy.model_detection
import comfy.sample
import comfy.sd
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras.nodes_easycache import EasyCacheNode
from comfy_extras.nodes_torch_compile import skip_torch_compile_dict
from safetensors import safe_open
from safetensors.torch import load_file

nodes = importlib.import_module("comfy_nodes.nodes")
inputs = importlib.import_module("comfy_nodes.inputs")
host = importlib.import_module("comfy_nodes.host")
PICTURE, FILM = (16, 64, 64), (16, 4, 32, 32)
SIZES = {  # of latents
    "flux": PICTURE, "sd3": PICTURE, "wan": (16, 8, 32, 32), "flux2": (128, 32, 32), "chroma": PICTURE,
    "qwen_image": (16, 1, 64, 64), "hunyuan_video": FILM, "ltxv": (128, 4, 16, 16), "cosmos_predict2": FILM,
    "lumina2": PICTURE, "z_image": (16, 60, 60), "krea2": (16, 1, 64, 64), "hidream": PICTURE,
}  # fmt: skip
STEPS = 3
POOLED = {"flux": 768, "sd3": 2048, "chroma": 768, "hunyuan_video": 768, "hidream": 64}  # wide, a prompt as a whole
UNGUIDED = {"flux", "flux2", "hunyuan_video"}
SLOT = "optimized_attention_override"
# as the trial had them that this is held against
SETTINGS = {"side": "kv", "ratio": 0.9375, "sx": 4, "sy": 4, "metric": "keys+values", "use_rand": False, "refine": 1}
torch.set_num_threads(1)


def load(name, dtype=torch.float32):
    path, found = f"{FOLDER}/{name}.safetensors", comfy.model_detection.detect_unet_config
    weights = {key: value.float() for key, value in load_file(path).items()}
    with safe_open(path, "pt") as file:
        told = (file.metadata() or {}).get("config")
    if told:
        comfy.model_detection.detect_unet_config = lambda *args, **kwargs: json.loads(told)
    try:
        return comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": dtype})
    finally:
        comfy.model_detection.detect_unet_config = found


def prompts(name):
    generator = torch.Generator().manual_seed(1)
    width = 4096 if name in ("sd3", "wan") else 64
    return [[[torch.randn(1, 77, width, generator=generator), beside(name, generator)]] for _ in range(2)]


def beside(name, generator):
    """What a prompt has but its tokens."""
    found = {}
    if name in POOLED:
        found["pooled_output"] = torch.randn(1, POOLED[name], generator=generator)
    if name == "ltxv":
        found["attention_mask"] = torch.ones(1, 77, dtype=torch.long)
    if name == "hidream":
        found["conditioning_llama3"] = torch.randn(1, 3, 20, 64, generator=generator)
    return found


def sample(model, name):
    latent = torch.zeros(1, *SIZES[name])
    noise = comfy.sample.prepare_noise(latent, 7)
    with torch.no_grad():
        return comfy.sample.sample(model, noise, STEPS, 1.0 if name in UNGUIDED else 3.0, "euler", "simple",
                                   *prompts(name), latent, disable_pbar=True, seed=7)  # fmt: skip


def apply(model, **settings):
    config = importlib.import_module("tome_core").MergeConfig(**{**SETTINGS, **settings})
    return nodes.ApplyToMe().apply(model, settings=config)[0]


def digest(x):
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()


def error(found, plain):
    return ((found - plain).pow(2).mean() / plain.pow(2).mean()).sqrt().item()


def report(model):
    latest = host.find_attached(model).latest
    return {"lines": latest.details, **latest.report.as_data()}


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


def compiled(model):
    """As TorchCompileModel does it, without a compiler."""
    other = model.clone()
    set_torch_compile_wrapper(other, "eager", {"guard_filter_fn": skip_torch_compile_dict})
    return other


def known(name):
    """What is asked of all."""
    model = load(name)
    plain = sample(model, name)
    merged = apply(model)
    found = sample(merged, name)
    seen = {"plain": digest(plain), "error": error(found, plain), "report": report(merged),
            "plain after": digest(sample(model, name)),
            "removed": digest(sample(nodes.RemoveToMe().remove(merged)[0], name))}  # fmt: skip
    return seen, model, merged, plain, found


def held(name):
    """In eight bits, and compiled."""
    eight = load(name, torch.float8_e4m3fn)
    seen = {"fp8": error(sample(apply(eight), name), sample(eight, name))}
    model = load(name)
    merged = apply(model)
    branches = [compiled(merged), compiled(model), apply(compiled(model))]  # the first is what is compiled
    seen["compiled"] = [error(sample(one, name), sample(model, name)) for one in branches]
    seen["compiled lines"] = host.find_attached(merged).latest.lines
    return seen


def of(name):
    seen, model, merged, plain, found = known(name)
    seen |= {
        "again": digest(sample(merged, name)) == digest(found),
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


for one in SIZES:
    told = of(one) if one in ("flux", "sd3", "wan") else known(one)[0]
    print(json.dumps({"model": one, **told, **(held(one) if one == "flux" else {})}), flush=True)
