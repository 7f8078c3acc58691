"""The calls of our functions at a webui's step, before the model runs."""

import extension
import tome_core
from tests.host_doubles.webuis import FREE
from tests.watching.calls import functions_called

MOST_CALLS = 100


def test_a_step_calls_few_functions_before_the_model_runs(webui, monkeypatch):
    counts, original = [], webui.call

    def call(name, *args):
        if name != "cfg_denoiser":
            return original(name, *args)
        counts.append(functions_called(lambda: original(name, *args), tome_core, extension))
        return None

    monkeypatch.setattr(webui, "call", call)
    webui.job(FREE)
    totals = [called.total() for called in counts[1:]]  # the first step looks for rules and times
    assert len(totals) == 3 and all(totals) and sum(totals) <= MOST_CALLS * len(totals), totals
