"""What `upstream/` offers other projects: one kernel in three files, and each file does in its host what is said of it.

The hosts' modules are stood in for, but for diffusers', which is the installed one with the patch applied.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import diffusers
import pytest
import torch
from diffusers.hooks import HookRegistry
from torch import nn

from benchmarks import subjects, variants
from tests import models
from tests.comfy_attention import attention_pytorch as attend
from tests.families import largest_difference
from tests.models import BY_NAME, CASES, call_case, inputs
from tests.traces import traces
from tome_core.model.families import find_unet

UPSTREAM = Path(__file__).parents[2] / "upstream"
TRIED_WITH = "0.42.1"  # of diffusers
CELL = 16  # side of the latent, and of the finest grid
KERNEL = [ast.get_source_segment(text, node) for text in [(UPSTREAM / "smallest.py").read_text(encoding="utf-8")]
          for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]  # fmt: skip


def added(patch: str, path: str) -> str:
    """The file that a patch adds."""
    text = (UPSTREAM / patch).read_text(encoding="utf-8")
    part = text.split(f"+++ b/{path}\n")[1].split("\ndiff --git")[0]
    return "\n".join(line[1:] for line in part.splitlines() if line.startswith("+")) + "\n"


SOURCES = {
    "diffusers": added("diffusers/token_merging.patch", "src/diffusers/hooks/token_merging.py"),
    "comfyui": (UPSTREAM / "comfyui/nodes_tomesd.py").read_text(encoding="utf-8"),
    "a1111": added("a1111/token_merging.patch", "modules/token_merging.py"),
}


def put(monkeypatch, name: str, source: str = "", **attributes) -> types.ModuleType:
    """A module of this text and these attributes, in ``sys.modules`` and in the module above it."""
    module = types.ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    exec(source, vars(module))
    above, _, last = name.rpartition(".")
    if above:
        if above not in sys.modules:
            put(monkeypatch, above)
        monkeypatch.setattr(sys.modules[above], last, module, raising=False)
    return module


@pytest.fixture
def hooks(monkeypatch):
    """diffusers' form."""
    return put(monkeypatch, "diffusers.hooks.token_merging_of_the_patch", SOURCES["diffusers"],
               __package__="diffusers.hooks")  # fmt: skip


@pytest.fixture
def node(monkeypatch):
    """ComfyUI's."""
    put(monkeypatch, "comfy.ldm.modules.attention", optimized_attention_masked=attend)
    io = MagicMock(ComfyNode=object, NodeOutput=lambda model: model)  # a node's description is written with the rest
    put(monkeypatch, "comfy_api.latest", ComfyExtension=object, io=io)
    return put(monkeypatch, "nodes_tomesd_of_ours", SOURCES["comfyui"]).TomePatchModel


@pytest.fixture
def webui(monkeypatch):
    """A1111's."""
    put(monkeypatch, "modules.shared", loaded_hypernetworks=[], opts=types.SimpleNamespace(upcast_attn=False))
    put(monkeypatch, "modules.hypernetworks.hypernetwork", apply_hypernetworks=lambda loaded, x: (x, x))
    return put(monkeypatch, "token_merging_of_the_webui", SOURCES["a1111"])


class ComfyModel:
    """A model patcher, as far as the node asks."""

    def __init__(self) -> None:
        self.replaced: dict = {}
        self.unet = types.SimpleNamespace(input_blocks=[0] * 3, middle_block=[0], output_blocks=[0] * 3)

    def clone(self) -> ComfyModel:
        return ComfyModel()

    def get_model_object(self, name: str):
        return {"diffusion_model": self.unet}[name]

    def set_model_attn1_replace(self, patch, name: str, number: int) -> None:
        self.replaced[name, number] = patch


def repeated(attention: nn.Module, x: torch.Tensor, group: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Slow and obvious: every token's key and value is replaced by the mean of its group's."""
    k, v = attention.to_k(x), attention.to_v(x)
    for sample in range(len(x)):
        for number in group[sample].unique():
            members = group[sample] == number
            assert members.sum() == sizes[sample, number]
            k[sample, members], v[sample, members] = k[sample, members].mean(0), v[sample, members].mean(0)
    return attention.to_out[0](attend(attention.to_q(x), k, v, attention.heads))


@pytest.mark.parametrize("host", SOURCES)
def test_each_file_carries_the_kernel_letter_for_letter(host: str):
    assert len(KERNEL) == 3
    for function in KERNEL:
        assert function in SOURCES[host]


@torch.no_grad()
def test_all_three_attend_as_repeated_means_do(hooks, node, webui):
    """The same weights and tokens, at a ratio of three quarters: A1111's means queries too, so a half is as much."""
    unet = models.sd15()
    attention = next(one for name, one in unet.named_modules() if name.endswith("attn1"))
    x = torch.randn(2, CELL**2, attention.to_q.in_features, generator=torch.Generator().manual_seed(0))
    k, v = attention.to_k(x), attention.to_v(x)
    group, sizes = hooks._group_tokens(k, v, CELL, CELL, 0.75)
    assert sizes.shape == (2, CELL**2 // 4) and sizes.min() >= 1
    wanted, plain = repeated(attention, x, group, sizes), attention(x)

    comfy = node.execute(ComfyModel(), 0.75)
    options = {"original_shape": [2, 4, CELL, CELL], "n_heads": attention.heads, "attn_precision": None}
    by_comfy = attention.to_out[0](comfy.replaced["input", 1](attention.to_q(x), k, v, options))

    ldm = find_unet(next(case for case in CASES if case.name.startswith("ldm")).build())
    theirs = next(one.attn1 for one in ldm.modules() if type(one).__name__ == "BasicTransformerBlock")
    theirs.heads = attention.heads
    for name in ("to_q", "to_k", "to_v", "to_out"):
        setattr(theirs, name, getattr(attention, name) if name != "to_out" else attention.to_out[0])
    webui.apply(types.SimpleNamespace(model=types.SimpleNamespace(diffusion_model=ldm)), 0.5)
    ldm.token_merging.latent = (CELL, CELL)
    by_webui = theirs(x)

    hooks.apply_token_merging(unet, hooks.TokenMergingConfig(ratio=0.75))
    unet(*inputs(4, 2, CELL, CELL)[:1], 500, encoder_hidden_states=inputs(4, 2, CELL, CELL)[1])  # notes the size
    by_diffusers = attention(x)

    assert largest_difference(wanted, plain) > 1e-2
    for found in (by_comfy, by_webui, by_diffusers):
        assert largest_difference(found, wanted) < 1e-5


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_diffusers_form_merges_and_comes_off(hooks, name: str):
    case = BY_NAME[name]
    unet = case.build()
    plain, found = call_case(case, unet), traces(unet)
    hooks.apply_token_merging(unet, hooks.TokenMergingConfig(ratio=0.75))
    assert largest_difference(call_case(case, unet), plain) > 1e-4
    hooks.remove_token_merging(unet)
    assert torch.equal(call_case(case, unet), plain)
    for one in unet.modules():  # the registry itself stays, as after every hook of theirs
        if "_diffusers_hook" in vars(one):
            del one._diffusers_hook
            vars(one).pop("forward", None)
    assert traces(unet) == found
    assert HookRegistry.check_if_exists_or_initialize(unet).hooks == {}


@pytest.mark.parametrize("name", ["ldm", "sgm"])
def test_a1111s_form_merges_and_comes_off(webui, name: str):
    case = next(case for case in CASES if case.name.startswith(name))
    model = case.build()
    unet = find_unet(model)
    plain, found = call_case(case, model), traces(unet)
    holder = types.SimpleNamespace(model=types.SimpleNamespace(diffusion_model=unet))
    webui.apply(holder, 0.5)
    assert largest_difference(call_case(case, model), plain) > 1e-4
    webui.remove(holder)
    assert torch.equal(call_case(case, model), plain) and traces(unet) == found


@torch.no_grad()
def test_comfyuis_form_is_off_at_ratio_0_and_leaves_what_it_does_not_know(node):
    assert node.execute(ComfyModel(), 0.0).replaced == {}
    merged = node.execute(ComfyModel(), 0.75).replaced
    assert {place for place, _ in merged} == {"input", "middle", "output"}
    options = {"original_shape": [1, 4, CELL, CELL], "n_heads": 4, "attn_precision": None}
    for queries, keys in ((CELL**2, 77), (60, 60)):  # a prompt's keys; tokens of no grid
        q, k, v = (torch.randn(1, count, 32) for count in (queries, keys, keys))
        assert torch.equal(merged["input", 1](q, k, v, options), attend(q, k, v, 4))


@torch.no_grad()
@pytest.mark.parametrize("ratio, theirs", [(0.75, 0.5), (0.9375, 0.75)])
def test_it_errs_half_as_much_as_tomesd_at_equal_attention_work(hooks, ratio: float, theirs: float):
    """On the demo's model, whose pictures are squares; tomesd merges queries too, so its share counts twice."""
    pytest.importorskip("tomesd")
    subject = subjects.SceneSubject(subjects.SCENE_MODELS[0], torch.device("cpu"))
    noised = subject.add_noise(0, 2, 437)
    full = subject.predict(noised)

    def error_under(variant) -> tuple[float, torch.Tensor]:
        with variant(subject.network, 0):
            found = subject.predict(noised)
        return (found - full).square().mean().item(), found

    tomesd, _ = error_under(variants.tomesd(theirs))
    error, found = error_under(variants.smallest(ratio))
    assert 0 < error < 0.6 * tomesd
    hooks.apply_token_merging(subject.network, hooks.TokenMergingConfig(ratio=ratio, max_downsample=1))
    assert largest_difference(subject.predict(noised), found) < 1e-4


@pytest.mark.slow
def test_the_patch_applies_to_diffusers_and_its_own_test_passes(tmp_path):
    if diffusers.__version__ != TRIED_WITH:
        pytest.skip(f"the patch is for diffusers {TRIED_WITH}; {diffusers.__version__} is installed")
    package, tree = Path(diffusers.__file__).parent, tmp_path / "src" / "diffusers"
    tree.mkdir(parents=True)
    for one in package.iterdir():  # what is not touched may be the installed file
        if one.name in ("hooks", "utils"):
            shutil.copytree(one, tree / one.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif one.name == "__init__.py":
            shutil.copy(one, tree)
        else:
            (tree / one.name).symlink_to(one)
    command = ["git", "apply", str(UPSTREAM / "diffusers/token_merging.patch")]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)})
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/hooks"], cwd=tmp_path, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": str(tmp_path / "src")})  # fmt: skip
    assert done.returncode == 0 and "7 passed" in done.stdout, done.stdout + done.stderr
