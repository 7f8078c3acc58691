"""Where plans lie for graphs: buffers that stay, written in place by the graphs that match and read by the others."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ..running.keep import Kept
from ..running.search import Plans
from .forms import Form, copy_all, empty_tensors, put_together, take_apart


class PlanBuffer:
    """Tensors for plans of one form, and whose plans lie in them."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.tensors = empty_tensors(form)
        self._tenant: weakref.ref[Kept] | None = None

    @property
    def tenant(self) -> Kept | None:
        """Whose plans lie here; None where nobody needs them any more."""
        return None if self._tenant is None else self._tenant()

    def plans(self) -> Plans:
        """What lies here, as plans. Anew each time, because a plan keeps what was derived from it."""
        return put_together(self.form, self.tensors)

    def vacate(self) -> None:
        """The plans that lie here get tensors of their own: others will be written over them."""
        tenant, self._tenant = self.tenant, None
        if tenant is not None:
            tenant.plans, tenant.home = put_together(self.form, [one.clone() for one in self.tensors]), None

    def settle(self, kept: Kept) -> None:
        """What lies here now are these plans."""
        kept.plans, kept.home = self.plans(), self
        self._tenant = weakref.ref(kept)


def form_of(kept: Kept) -> Form:
    """The form of its plans."""
    return take_apart(kept.plans)[0] if kept.home is None else kept.home.form


def load(wanted: Iterable[tuple[Kept, PlanBuffer]]) -> None:
    """Bring plans into their buffers. In one picture they lie there already, and nothing is copied."""
    to: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for kept, buffer in wanted:
        if kept.home is not buffer:
            buffer.vacate()
            to += buffer.tensors
            values += take_apart(kept.plans)[1]
            buffer.settle(kept)
    copy_all(to, values)
