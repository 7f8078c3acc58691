"""Where in the picture a convolution is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from demo.places import FEATURES, PlacedConv, features
from tests import tiny_scenes


def test_before_training_it_gives_what_the_convolution_gives():
    conv, x = nn.Conv2d(3, 5, 3, padding=1), torch.randn(2, 3, 8, 8)
    assert torch.equal(PlacedConv(conv)(x), conv(x))


def test_a_part_of_a_picture_has_the_places_of_that_part():
    whole, part = features(16, 16), features(8, 8, (0.25, 0.5, 0.5, 0.5))
    torch.testing.assert_close(part, whole[..., 4:12, 8:])


def test_no_two_places_are_alike():
    places = features(16, 16)[0].flatten(1).T
    apart = torch.cdist(places, places) + 9 * torch.eye(len(places))
    assert places.shape == (256, FEATURES) and apart.min() > 0.1


@pytest.mark.parametrize("part, window", [
    ((32, 32, 8, 16, 16, 16), (0.25, 0.5, 0.5, 0.5)),
    (None, (0.0, 0.0, 1.0, 1.0)),
])
def test_a_model_tells_its_first_convolution_which_part_it_sees(part, window):
    model = tiny_scenes.make()
    model.unet.conv_in.window = (0.1, 0.1, 0.1, 0.1)
    side = 8 if part else 16
    with torch.inference_mode():
        model(torch.zeros(1, 12, side, side), torch.tensor(500), torch.zeros(1, 6, dtype=torch.long),
              part and torch.tensor([part]))
    assert model.unet.conv_in.window == window
