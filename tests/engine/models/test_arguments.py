"""Arguments of a model's call on their way through a compiled graph."""

from __future__ import annotations

import torch

from tome_core.models.compiled import pack, unpack


def test_what_is_packed_is_unpacked():
    tensor = torch.zeros(1)
    values = [tensor, None, 3, [(1, 2, 3), [tensor], ()], (7,), True]
    form, tensors, numbers = pack(values)
    assert unpack(form, tensors, numbers) == values and len(tensors) == 2
    assert pack([{}]) is None and pack(["word"]) is None


def test_a_fraction_is_a_tensor_so_that_a_graph_takes_any():
    form, tensors, numbers = pack([0.5, 2])
    assert (form, tensors, numbers) == ("ti", [torch.tensor(0.5)], [2])
