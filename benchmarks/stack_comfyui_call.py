"""``python -m benchmarks.stack_comfyui_call JSON FILE.npy``: arms of one comparison, in ComfyUI's own Python.

The case is that of `benchmarks.stack_comfyui`, which calls this and writes an arm a line. Each one's latent goes into
the file, the rest is printed as a line of JSON.
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

from benchmarks import stack_comfyui_models as models
from benchmarks.stack_arms import OURS_FIRST, WITH_MERGING, WITH_OTHER, Drawn, told
from benchmarks.stack_nodes import NODES

_PLENTY = 64 * 2**30  # bytes that are said to be free: how ComfyUI cuts a batch must not depend on who else runs


class Drawer:
    """Draws a case with ComfyUI's sampler: the same prompt and start noise for each arm."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._case, self._dice = case, torch.Generator().manual_seed(case["number"])
        self._nodes = importlib.import_module("comfy_nodes.nodes")
        self._samplers = importlib.import_module("comfy.samplers")
        self._sample = importlib.import_module("comfy.sample").sample_custom
        if case["tokens"]:
            self._model, words = models.scenes(case["model"])
            self._prompts = [words[torch.tensor(tokens)][None] for tokens in case["tokens"]]
        else:
            self._model = models.random(case["tiny"])
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
        merging = self._nodes.host.attached(model)
        if name == OURS_FIRST:
            model = node.put_on(model, **self._case["inputs"])
        self._calls, since = 0, time.process_time()
        latent = self._draw(model, self._noise, self._sigmas)
        seconds = time.process_time() - since
        return Drawn(latent, seconds, self._calls, {} if merging is None else told(merging.report()))

    def _draw(self, model: Any, noise: torch.Tensor, sigmas: torch.Tensor) -> np.ndarray:
        sampler = self._samplers.sampler_object("dpmpp_2m")
        positive, negative = ([[words, {}]] for words in self._prompts)
        torch.manual_seed(self._case["number"])  # as ComfyUI's noise does; HyperTile draws from it
        latent = self._sample(model, noise, self._case["guidance"], sampler, sigmas, positive, negative,
                              torch.zeros_like(noise), disable_pbar=True, seed=self._case["number"])  # fmt: skip
        return latent[0].float().numpy()

    def _count(self, *_: Any) -> None:
        self._calls += 1


def main() -> None:
    """Draw each arm that a line names, until there is no more."""
    case, latent = json.loads(sys.argv.pop(1)), Path(sys.argv.pop(1))
    sys.path.insert(0, os.getcwd())
    importlib.import_module("comfy.options").enable_args_parsing()
    torch.set_num_threads(1)
    importlib.import_module("comfy_nodes")
    with torch.inference_mode():
        management = importlib.import_module("comfy.model_management")
        management.get_free_memory = lambda dev=None, torch_free_too=False: (
            (_PLENTY, _PLENTY) if torch_free_too else _PLENTY)  # fmt: skip
        drawer = Drawer(case)
        for line in sys.stdin:
            drawn = drawer.arm(line.strip())
            np.save(latent, drawn.picture)
            print(json.dumps({"seconds": drawn.seconds, "calls": drawn.calls, "told": drawn.told}), flush=True)


if __name__ == "__main__":
    main()
