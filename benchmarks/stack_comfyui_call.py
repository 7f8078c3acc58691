"""``python -m benchmarks.stack_comfyui_call JSON FILE.npy``: arms of one comparison, in ComfyUI's own Python.

The case is that of `benchmarks.stacking`, which calls this and writes an arm a line. Each one's latent goes into
the file, the rest is printed as a line of JSON.

The models are ComfyUI's own: a scene model, and a UNet of Stable Diffusion 1.5's shape with random weights. The UNet of
a scene model is of diffusers' making, with other heads and norms than ComfyUI reads off a file, so those are set here.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from benchmarks import host_inside
from benchmarks.stack_arms import OURS_FIRST, WITH_MERGING, WITH_OTHER, Drawn, summarize
from benchmarks.stack_nodes import NODES
from demo import eight_bits
from demo.places import PlacedConv

_PLENTY = 64 * 2**30  # bytes that are said to be free: how ComfyUI cuts a batch must not depend on who else runs


class Drawer:
    """Draws a case with ComfyUI's sampler: the same prompt and start noise for each arm."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._case, self._dice = case, torch.Generator().manual_seed(case["number"])
        self._nodes = importlib.import_module("comfy_nodes.nodes")
        self._samplers = importlib.import_module("comfy.samplers")
        self._sample = importlib.import_module("comfy.sample").sample_custom
        if case["tokens"]:
            self._model, words = scenes(case["model"])
            self._prompts = [words[torch.tensor(tokens)][None] for tokens in case["tokens"]]
        else:
            self._model = host_inside.random_model(case["tiny"])
            self._prompts = list(torch.randn(2, 1, 77, 768, generator=self._dice))
        channels = self._model.model.latent_format.latent_channels
        self._noise = torch.randn(1, channels, case["side"], case["side"], generator=self._dice)
        sampling = self._model.get_model_object("model_sampling")
        self._sigmas = self._samplers.calculate_sigmas(sampling, "normal", case["steps"])[slice(*case["part"])]
        self._calls = 0
        self._model.model.diffusion_model.time_embed.register_forward_pre_hook(self._count)
        self._draw(self._model, self._noise[..., :16, :16], self._sigmas[:2])  # what happens once

    def arm(self, name: str) -> Drawn:
        """One arm; the seconds are those of the whole sampling."""
        node, model = NODES[self._case["beside"]], self._model
        if name in WITH_OTHER and name != OURS_FIRST:
            model = node.put_on(model, **self._case["inputs"])
        if name in WITH_MERGING:
            model = self._nodes.ApplyToMe().apply(model, self._case["strength"])[0]
        merging = self._nodes.host.find_attached(model)
        if name == OURS_FIRST:
            model = node.put_on(model, **self._case["inputs"])
        self._calls, since = 0, time.process_time()
        latent = self._draw(model, self._noise, self._sigmas)
        seconds = time.process_time() - since
        return Drawn(latent, seconds, self._calls, {} if merging is None else summarize(merging.latest.report))

    def _draw(self, model: Any, noise: torch.Tensor, sigmas: torch.Tensor) -> np.ndarray:
        sampler = self._samplers.sampler_object("dpmpp_2m")
        positive, negative = ([[words, {}]] for words in self._prompts)
        torch.manual_seed(self._case["number"])  # as ComfyUI's noise does; HyperTile draws from it
        latent = self._sample(model, noise, self._case["guidance"], sampler, sigmas, positive, negative,
                              torch.zeros_like(noise), disable_pbar=True, seed=self._case["number"])  # fmt: skip
        return latent[0].float().numpy()

    def _count(self, *_: Any) -> None:
        self._calls += 1


def scenes(path: str) -> tuple[Any, torch.Tensor]:
    """ComfyUI's patcher around a scene model of this file, and its prompt embedding ``[V, D]``."""
    with safe_open(path, "pt") as file:
        told = file.metadata()
        weights = eight_bits.unpack({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    unet, scheduler = json.loads(told["unet_config"]), json.loads(told["scheduler"])
    levels, blocks = len(unet["block_out_channels"]), unet["layers_per_block"]
    config = {
        "in_channels": unet["in_channels"], "out_channels": unet["out_channels"],
        "model_channels": unet["block_out_channels"][0], "context_dim": unet["cross_attention_dim"],
        "num_heads": unet["attention_head_dim"][0],  # diffusers means the number of heads by it
        "channel_mult": [width // unet["block_out_channels"][0] for width in unet["block_out_channels"]],
        "num_res_blocks": [blocks] * levels, "transformer_depth": [1] * levels * blocks,
        "transformer_depth_output": [1] * levels * (blocks + 1), "transformer_depth_middle": 1,
    }  # fmt: skip
    heads = dict(zip(unet["block_out_channels"], unet["attention_head_dim"], strict=True))
    settings = {"linear_start": scheduler["beta_start"], "linear_end": scheduler["beta_end"],
                "zsnr": scheduler["rescale_betas_zero_snr"]}  # fmt: skip
    model = host_inside.make(config, "V_PREDICTION", settings)
    for module in model.diffusion_model.modules():
        if isinstance(module, nn.GroupNorm):
            module.num_groups = unet["norm_num_groups"]
        elif type(module).__name__ == "CrossAttention":
            module.heads = heads[module.to_q.weight.shape[1]]
    names = importlib.import_module("comfy.utils").unet_to_diffusers(config)
    if unet.get("places"):
        first = model.diffusion_model.input_blocks[0]
        first[0] = PlacedConv(first[0]).requires_grad_(False)
        names["conv_in.place.weight"] = "input_blocks.0.0.place.weight"
    found = {names[name.removeprefix("unet.")]: one for name, one in weights.items() if name.startswith("unet.")}
    model.diffusion_model.load_state_dict(found)
    return host_inside.patcher(model), weights["emb.weight"]


def main() -> None:
    """Draw each arm that a line names, until there is no more."""
    case, latent = json.loads(sys.argv.pop(1)), Path(sys.argv.pop(1))
    sys.path.insert(0, os.getcwd())
    importlib.import_module("comfy.options").enable_args_parsing()
    torch.set_num_threads(1)
    importlib.import_module("comfy_nodes")
    with torch.inference_mode():
        host_inside.say_free(_PLENTY)
        drawer = Drawer(case)
        for line in sys.stdin:
            drawn = drawer.arm(line.strip())
            np.save(latent, drawn.picture)
            print(json.dumps({"seconds": drawn.seconds, "calls": drawn.calls, "told": drawn.told}), flush=True)


if __name__ == "__main__":
    main()
