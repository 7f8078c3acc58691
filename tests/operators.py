"""Which aten operators some code runs, and which of them Apple's MPS has."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

# Every aten operator that merging and matching may use: each has an MPS kernel in torch 2.4 and newer.
MPS_OPERATORS = {
    "aten._to_copy", "aten._unsafe_view", "aten.add", "aten.add_", "aten.alias", "aten.arange", "aten.bitwise_and",
    "aten.baddbmm", "aten.bitwise_xor", "aten.bmm",
    "aten.cat", "aten.clamp", "aten.clamp_min", "aten.clamp_min_", "aten.clone",
    "aten.copy_", "aten.detach", "aten.div", "aten.div_", "aten.embedding", "aten.empty", "aten.eq", "aten.expand",
    "aten.fill_", "aten.floor_divide", "aten.full", "aten.full_like", "aten.gather", "aten.ge", "aten.index",
    "aten.index_add_", "aten.index_select", "aten.lift_fresh", "aten.linalg_vector_norm", "aten.log",
    "aten.masked_fill", "aten.max", "aten.mean", "aten.mul", "aten.ne", "aten.neg", "aten.new_empty",
    "aten.new_zeros", "aten.ones_like", "aten.pow", "aten.remainder", "aten.reshape", "aten.round",
    "aten.__rshift__", "aten.bitwise_right_shift", "aten.scalar_tensor", "aten.scatter", "aten.scatter_add",
    "aten.searchsorted", "aten.select", "aten.slice", "aten.sort", "aten.split", "aten.sqrt", "aten.sub",
    "aten.sum", "aten.t", "aten.transpose", "aten.permute", "aten.unsqueeze", "aten.squeeze", "aten.view",
    "aten.where", "aten.zeros", "aten.zeros_like", "aten.empty_like", "aten.argsort",
}  # fmt: skip


class OperatorRecorder(TorchDispatchMode):
    """Inside it every operator's name is put into ``names``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Note the operator and run it."""
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))
