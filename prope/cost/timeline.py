"""Traces steps with jax.profiler: how long kernels ran, by class, beside the roofline."""

import pathlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator

import jax

from prope.cost.classes import classify, count_classes
from prope.cost.flops import Chip
from prope.cost.hlo import Computation, runs

_STEPS = 3  # that are traced
_SCALE = 1e-6 / _STEPS  # from nanoseconds to the milliseconds of one
_CONTAINERS = ("while", "conditional", "call")  # their time is that of the kernels in them


def profile(run: Callable, module: Computation, chip: Chip | None) -> dict:
    """Traces steps on this process's first device, or on the CPU; returns a step's milliseconds.

    They are "busy", while any kernel runs, "idle", while none does between the first and the last,
    and of every class "measured", beside what `count_classes` says if the chip is known. Kernels
    that run side by side all count: classes may sum to more than "busy".

    Args:
      run: takes a step.
      module: of the step, from `prope.cost.hlo.parse`.
      chip: whose roofline it is.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([run() for _ in range(_STEPS)])
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    classes = count_classes(module, chip) if chip else {}
    busy = idle = end = 0.0
    for start, stop, name in sorted(_kernels(planes, module)):
        classes.setdefault(name, Counter())["measured_milliseconds"] += stop - start
        idle += max(0.0, start - end if end else 0.0)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return {"busy_milliseconds": busy, "idle_milliseconds": idle, "classes": classes}


def _kernels(planes: list, module: Computation) -> Iterator[tuple[float, float, str]]:
    """Yields start, end and class of what ran, in milliseconds over the number of steps.

    On a device what is not in the module is of the class "other".
    """
    names = {x.name: None if x.opcode in _CONTAINERS else classify(x) for x, _ in runs(module)}
    devices = [plane for plane in planes if re.match("/device:[GT]PU:", plane.name)]
    unknown = "other" if devices else None
    for plane in devices[:1] or planes:
        prefix = "Stream" if "GPU" in plane.name else "XLA Ops" if devices else ""
        for line in (line for line in plane.lines if line.name.startswith(prefix)):
            for event in line.events:
                text = str(dict(event.stats).get("hlo_op", event.name))  # a TPU's is "%NAME = .."
                name = names.get(re.match(r"%?([\w.\-]*)", text)[1], unknown)
                if name:
                    yield _SCALE * event.start_ns, _SCALE * event.end_ns, name
