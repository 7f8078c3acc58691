"""A hires pass, which begins late, leaves the work that its mark promises."""

from __future__ import annotations

import pytest

from tests import webui_doubles
from tests.thoroughness import some_quick
from tests.webui_doubles import FLAVOURS, CFGDenoiserTimesteps, Webui
from tome_core import form
from tome_core.settings.schedule import STABLE_DIFFUSION

HALF = tuple(500.0 - 50 * step for step in range(10))


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("by_timestep", some_quick([False, True]))
def test_a_hires_pass_of_the_webui(monkeypatch, flavour, by_timestep):
    monkeypatch.setattr(webui_doubles, "TIMESTEPS", HALF)
    monkeypatch.setattr(webui_doubles, "SIGMAS", tuple(STABLE_DIFFUSION.sigma_of(one) for one in HALF))
    webui = Webui(monkeypatch, flavour).start()
    denoiser = {"denoiser": CFGDenoiserTimesteps} if by_timestep else {}
    settings = {**form.fill("balanced"), "enabled": True, "only_if_it_pays": False}
    done = webui.job(settings, enable_hr=True, **denoiser)
    told = done.extra_generation_params["ToMe report"]["passes"]["hires pass"]["levels"][0]["merged"]
    early, late = sorted(told, key=lambda one: one["keys"])
    assert late["calls"] / (early["calls"] + late["calls"]) == pytest.approx(0.4) and not webui.errors
    webui.call("script_unloaded")
