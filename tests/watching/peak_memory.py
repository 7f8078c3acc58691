"""The most memory that a call holds at once, in bytes of tensors, which do not vary."""

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run) -> int:
    """The most memory that a call holds at once, beyond the memory in use before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    held = most = 0
    changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
