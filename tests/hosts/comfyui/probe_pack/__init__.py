# ruff: noqa: RUF012 (a node of ComfyUI is a class with such attributes)
"""Nodes that the tests load into ComfyUI beside ours: prompts without a text encoder, and things that go wrong.

What they see is kept here and asked for at /tome_test/state.
"""

import gc
import json
import sys

import comfy.model_detection
import comfy.sd
import folder_paths
import torch
from aiohttp import web
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from safetensors import safe_open
from server import PromptServer

SEEN = {"texts": [], "calls": [], "latents": {}}


def keep_texts():
    server = PromptServer.instance
    send = server.send_progress_text

    def keep(text, node_id, *args, **kwargs):
        teller = sys._getframe(2).f_locals.get("self")  # of a sampling it shows a line; the rest is for whoever asks
        details = getattr(getattr(teller, "latest", None), "details", ())
        SEEN["texts"].append([str(node_id), "  \n".join([text, *details[1:]])])
        return send(text, node_id, *args, **kwargs)

    server.send_progress_text = keep


@PromptServer.instance.routes.get("/tome_test/state")
async def state(request):
    gc.collect()
    return web.json_response({**SEEN, "unets": sum(type(one) is UNetModel for one in gc.get_objects())})


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
    """A prompt of random numbers; pooled: its summary's width, 0 for none. model: which may want more than that."""

    INPUTS = {
        "width": ("INT", {"max": 4096}), "pooled": ("INT", {"max": 4096}), "seed": ("INT", {}), "model": ("STRING", {}),
    }  # fmt: skip
    RETURN_TYPES = ("CONDITIONING",)

    def run(self, width, pooled, seed, model):
        generator = torch.Generator().manual_seed(seed)
        text, more = torch.randn(1, 77, width, generator=generator), {}
        if pooled:
            more["pooled_output"] = torch.randn(1, pooled, generator=generator)
        if model == "ltxv":
            more["attention_mask"] = torch.ones(1, 77, dtype=torch.long)
        return ([[text, more]],)


class TestLatent(Node):
    """An empty latent of a shape like "16,64,64"."""

    INPUTS = {"shape": ("STRING", {})}
    RETURN_TYPES = ("LATENT",)

    def run(self, shape):
        return ({"samples": torch.zeros(1, *map(int, shape.split(",")))},)


class TestProbe(Node):
    """Notes of each call of the UNet its time, and whether it drew random numbers; raises in call number `fail_at`."""

    INPUTS = {"model": ("MODEL",), "fail_at": ("INT", {"default": 0})}

    def run(self, model, fail_at):
        def watch(executor, x, timesteps, *args, **kwargs):
            state = torch.get_rng_state()
            out = executor(x, timesteps, *args, **kwargs)
            SEEN["calls"].append([float(timesteps[0]), not torch.equal(state, torch.get_rng_state())])
            if len(SEEN["calls"]) == fail_at:
                raise RuntimeError("the test wanted this to fail")
            return out

        model = model.clone()
        model.add_wrapper_with_key("diffusion_model", "probe", watch)
        return (model,)


class TestKeep(Node):
    """Keeps the bytes of a latent or of a picture, for the test to compare."""

    INPUTS = {"result": ("LATENT,IMAGE",), "name": ("STRING", {})}
    RETURN_TYPES = ()
    OUTPUT_NODE = True

    def run(self, result, name):
        samples = (result["samples"] if isinstance(result, dict) else result).float().cpu().contiguous()
        SEEN["latents"][name] = {
            "shape": list(samples.shape), "finite": bool(samples.isfinite().all()),
            "bytes": [sample.numpy().tobytes().hex() for sample in samples],
        }  # fmt: skip
        return ()


class TestCompile(Node):
    """TorchCompileModel with any back end; eager needs no compiler."""

    INPUTS = {"model": ("MODEL",), "backend": (["eager", "inductor"],)}

    def run(self, model, backend):
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        model = model.clone()
        skip = {"guard_filter_fn": lambda guards: ["transformer_options" not in guard.name for guard in guards]}
        set_torch_compile_wrapper(model=model, backend=backend, options=skip)
        return (model,)


class TestLoad(Node):
    """A transformer of `make_models.py`, of the configuration that its file has."""

    INPUTS = {"name": ("STRING", {})}

    def run(self, name):
        path, found = folder_paths.get_full_path_or_raise("diffusion_models", name), comfy.model_detection
        with safe_open(path, "pt") as file:
            config = json.loads(file.metadata()["config"])
        detect, found.detect_unet_config = found.detect_unet_config, lambda *args, **kwargs: config
        try:
            return (comfy.sd.load_diffusion_model(path),)
        finally:
            found.detect_unet_config = detect


keep_texts()
NODE_CLASS_MAPPINGS = {name: one for name, one in [*globals().items()] if name.startswith("Test")}
