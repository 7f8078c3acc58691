"""Merging as diffusers' hook on its transformers: what a patch does, one picture's calls a sampling, nothing left."""

from __future__ import annotations

import pytest
import torch

import tome_core
from tests import tiny_transformers
from tests.tiny_transformers import STRONG, attributes, call
from tome_core.diffusers_hooks import TokenMergingConfig, apply_token_merging, remove_token_merging
from tome_core.sequence import handle as handles

hooks = pytest.importorskip("diffusers.hooks", reason="this diffusers has no hooks")
KEEPS = {**STRONG, "keep": 1000.0}
RISING = ("Z-Image", "Lumina 2")  # their time, 0 to 1, rises while a picture is made


@pytest.mark.parametrize("name, settings", [(tiny_transformers.PRESENT[0], STRONG), *(
    (name, KEEPS) for name in tiny_transformers.PRESENT)])  # fmt: skip
def test_a_transformer_merges_as_after_patch_and_is_left_as_it_was(name, settings):
    model, arguments = tiny_transformers.make(name)
    plain, found = call(model, arguments), attributes(model)
    with tome_core.patch(model, **settings):
        merged = call(model, arguments)
    assert not torch.equal(merged, plain)
    apply_token_merging(model, TokenMergingConfig(settings=settings))
    assert torch.equal(call(model, arguments), merged)
    remove_token_merging(model)
    assert torch.equal(call(model, arguments), plain) and attributes(model) == found


@pytest.mark.parametrize("name", [one for one in ("Flux", "SD3.5", "Wan", *RISING) if one in tiny_transformers.PRESENT])
def test_the_calls_of_one_picture_share_a_match_and_a_time_that_goes_back_begins_another(name, monkeypatch):
    done, plain_match = [], handles.match
    monkeypatch.setattr(handles, "match", lambda *args: done.append(args) or plain_match(*args))
    model, arguments = tiny_transformers.make(name)
    argument = "t" if name == "Z-Image" else "timestep"
    apply_token_merging(model, TokenMergingConfig(settings=KEEPS))

    def matched(share: float) -> int:
        """Matches of a call when this share of the picture is made."""
        done.clear()
        time = torch.full_like(arguments[argument], 1)
        time = time * (share if name in RISING else 1 - share) * (1000 if arguments[argument].max() > 1 else 1)
        call(model, {**arguments, argument: time})
        return len(done)

    first = matched(0.1)
    assert first > 0 and matched(0.2) == 0 and matched(0.3) == 0
    assert matched(0.1) == first
    remove_token_merging(model)
