# ruff: noqa: RUF012 (a node of ComfyUI is a class with such attributes)
"""Nodes for ComfyUI in tests: prompts without a text encoder, errors, and results that are read at /tome_test/state."""

import json
import sys

import comfy.ldm.modules.attention
import comfy.model_detection
import comfy.model_management
import comfy.sd
import folder_paths
import torch
from aiohttp import web
from safetensors import safe_open
from server import PromptServer

SEEN = {"texts": [], "latents": {}}


def keep_texts():
    server = PromptServer.instance
    send = server.send_progress_text

    def keep(text, node_id, *args, **kwargs):
        teller = sys._getframe(2).f_locals.get("self")  # the node shows one line; its details have the rest
        details = getattr(getattr(teller, "latest", None), "details", ())
        SEEN["texts"].append([str(node_id), "  \n".join([text, *details[1:]])])
        return send(text, node_id, *args, **kwargs)

    server.send_progress_text = keep


@PromptServer.instance.routes.get("/tome_test/state")
async def state(request):
    return web.json_response(SEEN)


@PromptServer.instance.routes.get("/tome_test/clear")
async def clear(request):
    for kept in SEEN.values():
        kept.clear()
    return web.json_response({})


class Node:
    CATEGORY = "test"
    FUNCTION = "run"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": cls.INPUTS}


class TestText(Node):
    """A prompt of random numbers; pooled: its summary's width, 0 for none."""

    INPUTS = {"width": ("INT", {"max": 4096}), "pooled": ("INT", {"max": 4096}), "seed": ("INT", {})}
    RETURN_TYPES = ("CONDITIONING",)

    def run(self, width, pooled, seed):
        generator = torch.Generator().manual_seed(seed)
        text = torch.randn(1, 77, width, generator=generator)
        summary = {"pooled_output": torch.randn(1, pooled, generator=generator)} if pooled else {}
        return ([[text, summary]],)


class TestLatent(Node):
    """An empty latent of a shape like "16,64,64"."""

    INPUTS = {"shape": ("STRING", {})}
    RETURN_TYPES = ("LATENT",)

    def run(self, shape):
        return ({"samples": torch.zeros(1, *map(int, shape.split(",")))},)


class TestFail(Node):
    """A node whose model raises an error in its second call."""

    INPUTS = {"model": ("MODEL",)}

    def run(self, model):
        def fail(executor, *args, **kwargs):
            if calls.pop():
                return executor(*args, **kwargs)
            raise RuntimeError("the test wanted this to fail")

        model, calls = model.clone(), [False, True]
        model.add_wrapper_with_key("diffusion_model", "fails", fail)
        return (model,)


class TestKeep(Node):
    """A node that keeps the bytes of a latent or of a picture, for the test to compare."""

    INPUTS = {"result": ("LATENT,IMAGE",), "name": ("STRING", {})}
    RETURN_TYPES = ()
    OUTPUT_NODE = True

    def run(self, result, name):
        samples = (result["samples"] if isinstance(result, dict) else result).float().cpu().contiguous()
        SEEN["latents"][name] = {"shape": list(samples.shape), "finite": bool(samples.isfinite().all()),
                                 "bytes": [sample.numpy().tobytes().hex() for sample in samples]}  # fmt: skip
        return ()


class TestCompile(Node):
    """TorchCompileModel with the back end "eager", which needs no compiler."""

    INPUTS = {"model": ("MODEL",)}

    def run(self, model):
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        model = model.clone()
        skip = {"guard_filter_fn": lambda guards: ["transformer_options" not in guard.name for guard in guards]}
        set_torch_compile_wrapper(model=model, backend="eager", options=skip)
        return (model,)


class TestBlocks(Node):
    """Settings of ApplyToMe by which whole blocks merge, at any size."""

    INPUTS = {}
    RETURN_TYPES = ("TOME_SETTINGS",)

    def run(self):
        core = next(module for name, module in sys.modules.items() if name.endswith("tome_core"))
        blocks = core.MergeRule(merge_attn=False, merge_blocks=True, ratio=0.75, side="kv", min_downsample=4)
        return (core.MergeConfig(rules=(blocks,)),)


class TestCancel(Node):
    """A node in whose model the user cancels while a block runs on so many tokens."""

    INPUTS = {"model": ("MODEL",), "tokens": ("INT", {})}

    def run(self, model, tokens):
        kind, original = comfy.ldm.modules.attention.FeedForward, comfy.ldm.modules.attention.FeedForward.forward

        def forward(self, x):
            if x.shape[1] == tokens:
                raise comfy.model_management.InterruptProcessingException()
            return original(self, x)

        def cancel(executor, *args, **kwargs):
            kind.forward = forward
            try:
                return executor(*args, **kwargs)
            finally:
                kind.forward = original

        forward.__module__ = kind.__module__  # as ComfyUI's own: a block with code of others gets all tokens
        model = model.clone()
        model.add_wrapper_with_key("diffusion_model", "cancels", cancel)
        return (model,)


class TestLoad(Node):
    """A loader of a transformer of `make_models.py`, with the configuration in its file."""

    INPUTS = {"name": ("STRING", {})}

    def run(self, name):
        path, detection = folder_paths.get_full_path_or_raise("diffusion_models", name), comfy.model_detection
        with safe_open(path, "pt") as file:
            config = json.loads(file.metadata()["config"])
        detect, detection.detect_unet_config = detection.detect_unet_config, lambda *args, **kwargs: config
        try:
            return (comfy.sd.load_diffusion_model(path),)
        finally:
            detection.detect_unet_config = detect


keep_texts()
NODE_CLASS_MAPPINGS = {name: value for name, value in [*globals().items()] if name.startswith("Test")}
