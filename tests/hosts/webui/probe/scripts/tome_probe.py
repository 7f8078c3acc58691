"""In a test's webui: looks whether anything is left on the model, and stops or fails a job whose prompt says so."""

import hashlib

import modules.scripts as scripts
from modules import script_callbacks, shared

seen = {"upscaled": []}


class Probe(scripts.Script):
    def title(self):
        return "probe"

    def show(self, is_img2img):
        return scripts.AlwaysVisible

    def process_before_every_sampling(self, p, *args, x=None, **facts):
        if p.is_hr_pass and x is not None:
            seen["upscaled"].append(hashlib.md5(x.cpu().numpy().tobytes()).hexdigest())


def on_step(params):
    prompt = params.denoiser.p.prompt
    if params.denoiser.step == 1 and "fail" in prompt:
        params.denoiser.step = None  # what a callback raises is swallowed; with this, the denoiser cannot go on
    if params.denoiser.step == 1 and "interrupt" in prompt:
        shared.state.interrupt()


def patched():
    model = shared.sd_model
    objects = getattr(model, "forge_objects", None)
    if not hasattr(model, "model") and objects is None:
        return 0  # Forge has no model before the first picture
    unet = (objects.unet.model if objects is not None else model.model).diffusion_model
    return sum("_tome_core_patch" in vars(one) or "forward" in vars(one) for one in unet.modules())


def on_app(demo, app):
    def state():
        answer = {"patched": patched(), "upscaled": list(seen["upscaled"])}
        seen["upscaled"].clear()
        return answer

    app.add_api_route("/tome_test/state", state, methods=["GET"])


script_callbacks.on_cfg_denoiser(on_step)
script_callbacks.on_app_started(on_app)
