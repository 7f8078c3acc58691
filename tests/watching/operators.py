"""Which aten operators some code runs, and which of them MPS (by torch's table) and DirectML lack. DirectML's are read
in the library of torch-directml 0.2.5 (September 2024, the newest), which computes others on the CPU."""

import functools
from collections import Counter
from pathlib import Path

import torch
import torchgen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchgen.gen import parse_native_yaml
from torchgen.model import BackendIndex, DispatchKey, NativeFunction

_FOLDER = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
_DIRECTML = """
_adaptive_avg_pool2d _cdist_forward _copy_from _copy_from_and_resize _efficientzerotensor _index_put_impl_
_local_scalar_dense _log_softmax _prelu_kernel _reshape_alias _softmax _to_sparse _unique2 _unsafe_view abs acos acosh
adaptive_avg_pool2d add addcdiv addcmul addmm alias all amax any arange argmax argmin as_strided as_strided_ asin
asinh atan atan2 atanh avg_pool2d avg_pool3d baddbmm bernoulli bernoulli_ binary_cross_entropy_with_logits bitwise_and
bitwise_not bitwise_or bitwise_xor bmm cat ceil clamp clamp_max clamp_min constant_pad_nd convolution_overrideable
copy_ cos cosh cumsum diag div dot embedding empty empty_strided eq equal erf erfc exp exp2 expm1 exponential_ fill_
flip floor floor_divide floor_divide_ full gather ge gelu gt hardsigmoid hardswish hardswish_ hardtanh hardtanh_ index
index_select isin isinf isnan le leaky_relu linalg_vector_norm linear linspace log log10 log1p log2 logical_and
logical_not logical_or logical_xor lt masked_fill_ masked_scatter_ masked_select max max_pool2d_with_indices maximum
mean min minimum mm mse_loss mul multinomial native_batch_norm native_dropout native_group_norm native_layer_norm ne
neg nll_loss2d_forward nll_loss_forward nonzero norm normal_ ones_like pow prod random_ randperm reciprocal
reflection_pad1d reflection_pad2d relu relu_ remainder repeat replication_pad1d replication_pad2d reshape resize_
round rsqrt rsub scatter scatter_add sgn sigmoid sign silu sin sinc sinh smooth_l1_loss softplus sort split
split_with_sizes sqrt std_mean sub sum tan tanh threshold topk tril triu unfold uniform_ upsample_bicubic2d
upsample_bilinear2d upsample_nearest2d var view where zero_
"""
DIRECTML = frozenset(_DIRECTML.split())


@functools.cache
def _table() -> tuple[dict[str, NativeFunction], BackendIndex]:
    """Operators by name and overload, and MPS's kernels."""
    parsed = parse_native_yaml(*(str(_FOLDER / f"{name}.yaml") for name in ("native_functions", "tags")))
    return {str(row.func.name): row for row in parsed.native_functions}, parsed.backend_indices[DispatchKey.MPS]


def _has(device: str, name: str) -> bool:
    """Has the device a kernel for this operator, ``embedding`` or ``sort.stable``, or is it made of others?"""
    operators, on_mps = _table()
    operator, plain = operators[name], name.partition(".")[0]
    is_there = on_mps.has_kernel(operator) if device == "MPS" else {plain, plain.rstrip("_")} & DIRECTML
    if is_there or operator.has_composite_implicit_autograd_kernel or operator.has_composite_explicit_autograd_kernel:
        return True
    return operator.structured_delegate is not None and _has(device, str(operator.structured_delegate))


class OperatorCounter(TorchDispatchMode):
    """A context that counts operators, by their names without overloads."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.note(func, (args, kwargs, out))
        return out

    def note(self, func, met) -> None:
        """Count an operator that ran. met: its arguments and its result."""
        self.by_name[func.overloadpacket.__name__] += 1


class OperatorRecorder(OperatorCounter):
    """A context that puts every operator's name into ``names``, and those that meet float64 into ``doubles``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.doubles: set[str] = set()

    def note(self, func, met) -> None:
        name = func._schema.name.removeprefix("aten::")
        self.names.add(f"{name}.{func._overloadname}".removesuffix(".default"))
        if any(torch.is_tensor(value) and value.dtype == torch.float64 for value in tree_leaves(met)):
            self.doubles.add(name)


def lacking(names: set[str]) -> dict[str, list[str]]:
    """Device -> the operators that it lacks; empty if no device lacks any."""
    missing = {device: sorted(name for name in names if not _has(device, name)) for device in ("MPS", "DirectML")}
    return {device: names for device, names in missing.items() if names}
