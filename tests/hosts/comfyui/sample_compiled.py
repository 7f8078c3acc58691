"""Run by ComfyUI's own Python in its own folder: `sample_compiled.py MODEL REPOSITORY BACKEND ATTENTION` samples with a
small random UNet under torch.compile, and prints as JSON how far each branch is from those without a compiler.

ATTENTION: pytorch, split or quad. Nothing is downloaded, and no server is needed.
"""

# ruff: noqa: E402
import importlib
import json
import os
import sys

MODEL, REPOSITORY = map(os.path.abspath, sys.argv[1:3])
BACKEND, ATTENTION = sys.argv[3:5]
sys.argv = [sys.argv[0], "--cpu", f"--use-{ATTENTION}-cross-attention"]
sys.path[:0] = [os.getcwd(), REPOSITORY]  # ComfyUI's and ours

import comfy.options

comfy.options.enable_args_parsing()

import comfy.sample
import comfy.sd
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras.nodes_torch_compile import skip_torch_compile_dict
from safetensors.torch import load_file

nodes = importlib.import_module("comfy_nodes.nodes")
host = importlib.import_module("comfy_nodes.host")
MergeConfig = importlib.import_module("tome_core").MergeConfig
torch.set_num_threads(1)


def sample(model):
    generator = torch.Generator().manual_seed(1)
    prompts = [[[torch.randn(1, 77, 768, generator=generator), {}]] for _ in range(2)]
    latent = torch.zeros(1, 4, 16, 16)
    noise = comfy.sample.prepare_noise(latent, 7)
    with torch.inference_mode():
        return comfy.sample.sample(model, noise, 2, 3.0, "euler", "simple", *prompts, latent, disable_pbar=True, seed=7)


def apply(model, ratio):
    return nodes.ApplyToMe().apply(model, settings=MergeConfig(ratio=ratio))[0]


def compiled(model):
    """As TorchCompileModel does it, with any back end."""
    other = model.clone()
    set_torch_compile_wrapper(other, BACKEND, {"guard_filter_fn": skip_torch_compile_dict})
    return other


def work(model):
    return host.find_attached(model).latest.report.as_data()["work_saved"]


weights = {key: value.float() for key, value in load_file(MODEL).items()}
plain = comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": torch.float32})
eager = {0.5: apply(plain, 0.5), 0.75: apply(plain, 0.75)}
wanted = {0: sample(plain), **{ratio: sample(one) for ratio, one in eager.items()}}
after = compiled(eager[0.5])
seen = {"merging moves it by": (wanted[0.5] - wanted[0]).abs().max().item()}
for name, branch, ratio in (
    ("after", after, 0.5), ("before", apply(compiled(plain), 0.5), 0.5), ("off", compiled(plain), 0),
    ("more", compiled(eager[0.75]), 0.75), ("again", after, 0.5), ("removed", plain, 0),
):  # fmt: skip
    seen[name] = (sample(branch) - wanted[ratio]).abs().max().item()
    if ratio:
        seen[f"{name}, counted"] = work(branch) - work(eager[ratio])
        seen[f"{name}, line"] = host.find_attached(branch).latest.lines[0]
print(json.dumps(seen))
