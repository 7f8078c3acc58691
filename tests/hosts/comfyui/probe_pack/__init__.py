# ruff: noqa: RUF012 (a node of ComfyUI is a class with such attributes)
"""Nodes that the tests load into ComfyUI beside ours: prompts without a text encoder, and things that go wrong.

What they see is kept here and asked for at /tome_test/state.
"""

import gc
import json
import sys
import time

import comfy.controlnet
import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import folder_paths
import torch
from aiohttp import web
from comfy import gligen
from comfy.cldm.cldm import ControlNet
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from safetensors import safe_open
from server import PromptServer

SEEN = {"texts": [], "calls": [], "latents": {}, "swaps": [], "slot": []}


def patched(unet):
    """How many methods of the UNet's modules somebody stands in for."""
    return sum(name in vars(module) for module in unet.modules() for name in ("forward", "_forward"))


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
    unets = [one for one in gc.get_objects() if type(one) is UNetModel]
    return web.json_response({**SEEN, "unets": len(unets), "patched": sum(map(patched, unets))})


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
        if model == "hidream":
            more["conditioning_llama3"] = torch.randn(1, 3, 20, 64, generator=generator)
        return ([[text, more]],)


class TestLatent(Node):
    """An empty latent of a shape like "16,64,64"."""

    INPUTS = {"shape": ("STRING", {})}
    RETURN_TYPES = ("LATENT",)

    def run(self, shape):
        return ({"samples": torch.zeros(1, *map(int, shape.split(",")))},)


class TestProbe(Node):
    """Notes each call of the UNet under `name`; raises in call number `fail_at`; sleeps at each call."""

    INPUTS = {
        "model": ("MODEL",), "name": ("STRING", {}), "fail_at": ("INT", {"default": 0}),
        "sleep": ("FLOAT", {"default": 0.0}),
    }  # fmt: skip

    def run(self, model, name, fail_at, sleep):
        def watch(executor, x, timesteps, *args, **kwargs):
            state = torch.get_rng_state()
            out = executor(x, timesteps, *args, **kwargs)
            moved = not torch.equal(state, torch.get_rng_state())
            unet = executor.class_obj
            SEEN["calls"].append([name, float(timesteps[0]), patched(unet), list(x.shape), moved])
            if fail_at and sum(call[0] == name for call in SEEN["calls"]) == fail_at:
                raise RuntimeError("the test wanted this to fail")
            time.sleep(sleep)
            return out

        model = model.clone()
        model.add_wrapper_with_key("diffusion_model", "probe" + name, watch)
        return (model,)


class TestKeep(Node):
    """Keeps a latent's bytes, for the test to compare."""

    INPUTS = {"latent": ("LATENT",), "name": ("STRING", {})}
    RETURN_TYPES = ()
    OUTPUT_NODE = True

    def run(self, latent, name):
        samples = latent["samples"].float().cpu().contiguous()
        SEEN["latents"][name] = {
            "shape": list(samples.shape), "finite": bool(samples.isfinite().all()),
            "bytes": [sample.numpy().tobytes().hex() for sample in samples],
        }  # fmt: skip
        return ()


class TestKeepImage(TestKeep):
    """And a picture's."""

    INPUTS = {"image": ("IMAGE",), "name": ("STRING", {})}

    def run(self, image, name):
        return super().run({"samples": image}, name)


class TestEncode(Node):
    """A latent to inpaint, without a VAE: random, with a mask over its half."""

    INPUTS = {"image": ("IMAGE",)}
    RETURN_TYPES = ("LATENT",)

    def run(self, image):
        size = (image.shape[0], 4, image.shape[1] // 8, image.shape[2] // 8)
        mask = torch.zeros(size[0], 1, image.shape[1], image.shape[2])
        mask[..., : image.shape[2] // 2] = 1
        return ({"samples": torch.randn(size, generator=torch.Generator().manual_seed(3)), "noise_mask": mask},)


class TestCompile(Node):
    """TorchCompileModel with any back end; eager needs no compiler."""

    INPUTS = {"model": ("MODEL",), "backend": (["eager", "inductor"],)}

    def run(self, model, backend):
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        model = model.clone()
        skip = {"guard_filter_fn": lambda guards: ["transformer_options" not in guard.name for guard in guards]}
        set_torch_compile_wrapper(model=model, backend=backend, options=skip)
        return (model,)


class TestSlot(Node):
    """Another node's attention: it adds masks, drops them, or does more. Notes of each call whether keys were fewer."""

    INPUTS = {"model": ("MODEL",), "does": (["add", "drop", "more"],)}

    def run(self, model, does):
        def attend(function, q, k, v, heads, mask=None, **kwargs):
            SEEN["slot"].append(k.shape[-2] < q.shape[-2] and mask is not None)
            out = function(q, k, v, heads, mask=None if does == "drop" else mask, **kwargs)
            return out * 2 if does == "more" else out

        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = attend
        return (model,)


class TestLora(Node):
    """A weight patch on every projection to queries, as a LoRA makes it."""

    INPUTS = {"model": ("MODEL",)}
    ENDS = ("to_q.weight", "qkv.weight", "self_attn.q.weight")

    def run(self, model):
        model = model.clone()
        keys = [key for key in model.model.state_dict() if key.endswith(self.ENDS)]
        weights = {key: (torch.ones_like(model.model.state_dict()[key], device="cpu").float() * 0.01,) for key in keys}
        assert len(model.add_patches(weights, 1.0)) == len(keys) > 0
        return (model,)


def with_swapper(model, key, begin, end=lambda patcher: None):
    """A clone whose samplings ``begin(patcher)`` before the first step, and ``end(patcher)``."""
    guiders = []

    def outer(executor, *args, **kwargs):
        guiders.append(executor.class_obj)
        try:
            return executor(*args, **kwargs)
        finally:
            end(guiders.pop().model_patcher)

    def steps(executor, *args, **kwargs):
        begin(guiders[-1].model_patcher)
        return executor(*args, **kwargs)

    model = model.clone()
    model.add_wrapper_with_key("outer_sample", key, outer)
    model.add_wrapper_with_key("sampler_sample", key, steps)
    return (model,)


class TestInPart(Node):
    """From the first step of a sampling this share of the model is where models wait, as if memory were short."""

    INPUTS = {"model": ("MODEL",), "share": ("FLOAT", {"max": 1.0})}

    def run(self, model, share):
        def begin(patcher):
            freed = patcher.partially_unload(patcher.offload_device, share * patcher.model_size())
            waiting = sum(bool(getattr(one, "weight_function", ())) for one in patcher.model.modules())
            SEEN["swaps"].append([freed / patcher.model_size(), waiting])

        return with_swapper(model, "in part", begin)


class Away:
    """Weights of a model's blocks, or of its layers, that have no numbers but while their block or layer runs."""

    def __init__(self, unet, of):
        blocks = (one for child in unet.children() if isinstance(child, torch.nn.ModuleList) for one in child)
        layers = (one for one in unet.modules() if isinstance(one, (torch.nn.Linear, torch.nn.Conv2d)))
        self.parts = list({"blocks": blocks, "layers": layers}[of])

    def begin(self, patcher):
        self.hooks, self.kept, self.runs = [], {}, 0
        for part in self.parts:
            self.send(part)
            self.hooks.append(part.register_forward_pre_hook(lambda part, args: self.fetch(part)))
            self.hooks.append(part.register_forward_hook(lambda part, args, out: self.send(part), always_call=True))

    def send(self, part):
        self.kept[part] = weights_of_all = [(module, dict(module._parameters)) for module in part.modules()]
        for module, weights in weights_of_all:
            for name, weight in weights.items():
                if weight is not None:
                    gone = torch.empty_like(weight, device="meta")
                    module._parameters[name] = torch.nn.Parameter(gone, requires_grad=False)

    def fetch(self, part):
        self.runs += 1
        for module, weights in self.kept.pop(part):
            module._parameters.update(weights)

    def end(self, patcher):
        for hook in self.hooks:
            hook.remove()
        SEEN["swaps"].append([len(self.parts), self.runs, len(self.kept)])
        for part in list(self.kept):
            self.fetch(part)


class TestSwap(Node):
    """A swapper of blocks, or of layers, from the first step of a sampling to its end."""

    INPUTS = {"model": ("MODEL",), "of": (["blocks", "layers"],)}

    def run(self, model, of):
        away = Away(model.model.diffusion_model, of)
        return with_swapper(model, "swap", away.begin, away.end)


class TestLoad(Node):
    """A transformer of `make_models.py`, of the configuration that its file has."""

    INPUTS = {"name": ("STRING", {}), "dtype": ("STRING", {})}

    def run(self, name, dtype):
        path, found = folder_paths.get_full_path_or_raise("diffusion_models", name), comfy.model_detection
        with safe_open(path, "pt") as file:
            config = json.loads(file.metadata()["config"])
        detect, found.detect_unet_config = found.detect_unet_config, lambda *args, **kwargs: config
        options = {} if dtype == "default" else {"dtype": getattr(torch, dtype)}
        try:
            return (comfy.sd.load_diffusion_model(path, options),)
        finally:
            found.detect_unet_config = detect


class TestControl(Node):
    """A ControlNet of random weights for the model `sd1`, on a prompt."""

    INPUTS = {"conditioning": ("CONDITIONING",), "image": ("IMAGE",)}
    RETURN_TYPES = ("CONDITIONING",)

    def run(self, conditioning, image):
        torch.manual_seed(0)
        net = ControlNet(
            image_size=32, in_channels=4, model_channels=320, hint_channels=3, num_res_blocks=[1, 1],
            channel_mult=[1, 1], transformer_depth=[1, 1], transformer_depth_middle=1, use_spatial_transformer=True,
            num_heads=8, num_head_channels=-1, context_dim=768, legacy=False, use_linear_in_transformer=False,
            dtype=torch.float32, operations=comfy.ops.manual_cast,
        )  # fmt: skip
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        device = comfy.model_management.get_torch_device()
        control = comfy.controlnet.ControlNet(
            net, compression_ratio=8, load_device=device, manual_cast_dtype=torch.float32
        )
        control.set_cond_hint(image.movedim(-1, 1), 1.0, (0.0, 1.0))
        return ([[text, {**more, "control": control, "control_apply_to_uncond": True}] for text, more in conditioning],)


class TestGligen(Node):
    """GLIGEN of random weights for the model `sd1`: one box, on a prompt."""

    INPUTS = {"conditioning": ("CONDITIONING",)}
    RETURN_TYPES = ("CONDITIONING",)

    def run(self, conditioning):
        torch.manual_seed(0)
        fusers = [gligen.GatedSelfAttentionDense(320, 768, 8, 40) for _ in range(7)]
        position = gligen.PositionNet(768, 768)
        model = gligen.Gligen(fusers, position, 768)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        device = comfy.model_management.get_torch_device()
        patcher = comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=torch.device("cpu"))
        boxes = ("position", patcher, [(torch.randn(1, 768), 4, 4, 2, 2)])
        return ([[text, {**more, "gligen": boxes}] for text, more in conditioning],)


class TestVAE(Node):
    """A VAE without weights: boxes of colours, eight pixels wide."""

    INPUTS = {}
    RETURN_TYPES = ("VAE",)

    def run(self):
        return (self,)

    def encode(self, pixels):
        boxes = torch.nn.functional.avg_pool2d(pixels[..., :3].movedim(-1, 1), 8)
        return torch.cat([boxes, boxes.mean(1, keepdim=True)], 1)

    def decode(self, latent):
        colours = torch.sigmoid(latent[:, :3].float())
        return torch.nn.functional.interpolate(colours, scale_factor=8).movedim(1, -1)


class TestPicture(Node):
    INPUTS = {"width": ("INT", {}), "height": ("INT", {})}
    RETURN_TYPES = ("IMAGE",)

    def run(self, width, height):
        return (torch.rand(2, height, width, 3, generator=torch.Generator().manual_seed(4)),)


class TestIPAdapter(Node):
    """IPAdapter's weights for the model `sd1`, and what it should and should not show, all random."""

    INPUTS = {}
    RETURN_TYPES = ("IPADAPTER", "EMBEDS", "EMBEDS")

    def run(self):
        generator = torch.Generator().manual_seed(6)

        def draw(*shape):
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        norm = {"norm.weight": torch.ones(768), "norm.bias": torch.zeros(768)}
        layers = {f"{2 * n + 1}.to_{side}_ip.weight": draw(320, 768) for n in range(16) for side in "kv"}
        projection = {"proj.weight": draw(4 * 768, 64), "proj.bias": torch.zeros(4 * 768), **norm}
        return {"image_proj": projection, "ip_adapter": layers}, draw(1, 64), draw(1, 64)


keep_texts()
NODE_CLASS_MAPPINGS = {name: one for name, one in [*globals().items()] if name.startswith("Test")}
