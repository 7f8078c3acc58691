"""Records of the speed benchmark that nothing was run for."""

from __future__ import annotations

from benchmarks.speed_plan import UNetCase
from benchmarks.speed_variants import CONTROL


def synthetic(**seconds):
    """A record of one case without a run behind it. seconds: variant -> its times, a round each."""
    case = vars(UNetCase("sd15", "call", 512))
    rounds = range(len(seconds[CONTROL]))
    rows = [
        {"key": f"x #{number}", "case": case, "failed": {},
         "seconds": {name: times[number] for name, times in seconds.items()}} for number in rounds
    ]  # fmt: skip
    return {"settings": {"variants": dict.fromkeys(seconds, "")}, "rows": rows}
