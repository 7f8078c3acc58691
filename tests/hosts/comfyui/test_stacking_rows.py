"""What `benchmarks.stacking` measures in a real ComfyUI: its models are the demo's, and each node gives a whole row."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
import torch

from benchmarks import stack_arms, stacking
from benchmarks.stack_nodes import NODES
from benchmarks.subjects import SCENE_MODELS
from demo import model
from tests.hosts.comfyui.running import ROOT, environment, host_python

PREDICTS = """
import importlib, os, sys
path, given, found = (sys.argv.pop() for _ in range(3))
sys.path.insert(0, os.getcwd())
importlib.import_module("comfy.options").enable_args_parsing()
import numpy, torch
from benchmarks import stack_comfyui_call
patcher, words = stack_comfyui_call.scenes(path)
x = torch.from_numpy(numpy.load(given))
with torch.inference_mode():
    out = patcher.model.diffusion_model(x, torch.tensor([300.0]), words[None, :6])
numpy.save(found, out.numpy())
"""


def test_a_scene_model_predicts_in_comfyui_what_it_does_in_diffusers(checkout, tmp_path):
    path, given, found = SCENE_MODELS[0], tmp_path / "x.npy", tmp_path / "out.npy"
    scenes = model.load(path)
    x = torch.randn(1, scenes.unet.config.in_channels, 16, 16, generator=torch.Generator().manual_seed(0))
    np.save(given, x.numpy())
    command = [host_python(), "-c", PREDICTS, "--cpu", str(found), str(given), str(path.resolve())]
    surroundings = {**environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=checkout, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with torch.no_grad():
        expected = scenes(x, torch.tensor(300), torch.arange(6)[None])
    assert torch.allclose(torch.from_numpy(np.load(found)), expected, atol=1e-4), "of about 1"


@pytest.mark.parametrize("name", NODES)
def test_a_row_of_a_tiny_model(checkout, name):
    """Of a size that HyperTile cuts, and with the widths that FreeU looks for."""
    with stacking.drawing(stacking.random_case(512, True, name, 0, "balanced")) as draw:
        row = stack_arms.measure(draw)
    assert row["off_is_exact"] and row["rms"]["alone"] > 0
    assert all(row["calls"][arm] for arm in stack_arms.ARMS)
    told = row["told"]["merged"]
    assert told["merged"] and told["unet_calls"] == row["calls"]["merged"]
