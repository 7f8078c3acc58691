"""Mistakes of ours: each function that runs in a call is made to fail, and the picture has to come all the same."""

import gc
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.watching.calls import code_called
from tome_core import faults

# These are the seam, which decides nothing and calls what was there, and the way back from merged tokens.
SEAM = {"forward", "run", "run_block", "original", "wrapped", "__call__", "is_tracing", "wrapper", "is_ours", "quietly",
        "_warn_once", "text_of", "may_be_of_fewer_tokens"}  # fmt: skip
WAY_BACK = {"LazyTokens.__torch_dispatch__", "LazyTokens.whole", "MergedTokens.unmerge", "MergePlan.unmerge",
            "MergePlan._check", "to_exact", "inverse"}  # fmt: skip
OF_COMFYUI = {"outer_sample", "apply_model", "call", "_attention", "take_off"}


def functions_in(run: Callable) -> list[types.FunctionType]:
    """Our functions that a run calls, but for the seam's, and those that are made inside others."""
    codes = dict.fromkeys(code_called(run, tuple(faults._OURS)))
    gc.unfreeze()  # frozen objects are not among the referrers
    return [holder for code in codes for holder in gc.get_referrers(code)
            if isinstance(holder, types.FunctionType) and code.co_name not in {*SEAM, *OF_COMFYUI}
            and holder.__qualname__ not in WAY_BACK]  # fmt: skip


@contextmanager
def failing(function: types.FunctionType) -> Iterator[None]:
    """Let every call of a function of ours raise an error inside it."""
    code = function.__code__
    function.__code__ = (lambda *args, **kwargs: None.a_mistake_of_ours).__code__.replace(
        co_filename=code.co_filename, co_name=code.co_name, co_freevars=code.co_freevars)
    try:
        yield
    except AttributeError as error:
        pytest.fail(f"{code.co_filename}:{code.co_firstlineno} {code.co_name} costs the picture: {error}")
    finally:
        function.__code__ = code
