"""What the kernels of a piece of work take, by the profiler."""

from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def kernel_times(work: Callable[[], object], repeats: int) -> dict[str, tuple[float, float]]:
    """Name -> microseconds and launches of one time of the work, the longest first, over so many
    repeats.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    times, launches = Counter[str](), Counter[str]()
    for event in profiled.events() or ():
        name = event.name.split("<")[0].split("(")[0].removeprefix("void ")
        times[name] += event.device_time_total / repeats
        launches[name] += 1
    return {name: (time, launches[name] / repeats) for name, time in times.most_common()}
