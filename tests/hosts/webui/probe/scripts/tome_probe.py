"""In a test's webui: checks that nothing is left on the model, and fails a job if its prompt says so."""

from modules import script_callbacks, shared

routes = []


def on_step(params):
    prompt, is_hires = params.denoiser.p.prompt, params.denoiser.p.is_hr_pass
    if params.denoiser.step == 1 and "fail" in prompt and is_hires == ("fail hires" in prompt):
        params.denoiser.step = None  # the webui catches errors of callbacks; with this, the denoiser cannot go on
    wraps = vars(unet()).get("_tome_core_patch") if unet() is not None else None
    if wraps is not None and wraps.patch is not None:
        routes[:] = sorted({route for level in wraps.patch.report().levels for route in level.sized_by})


def unet():
    model = shared.sd_model
    objects = getattr(model, "forge_objects", None)
    if not hasattr(model, "model") and objects is None:
        return None  # Forge has no model before the first picture
    return (objects.unet.model if objects is not None else model.model).diffusion_model


def patched():
    """The number of modules with an attribute of ours. Other extensions leave methods behind as well."""
    modules = unet().modules() if unet() is not None else ()
    return sum(any("tome_core" in type(getattr(part, "__self__", part)).__module__ for part in parts_of(module))
               for module in modules)  # fmt: skip


def parts_of(module):
    return [*vars(module).values(), *module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def on_app(demo, app):
    def state():
        answer = {"patched": patched(), "routes": [*routes]}
        routes.clear()
        return answer

    app.add_api_route("/tome_test/state", state, methods=["GET"])


script_callbacks.on_cfg_denoiser(on_step)
script_callbacks.on_app_started(on_app)
