"""The run that another begins from by --init_from: its parameters, and its encoding."""

import dataclasses
import functools

from etils import epath

from prope.encodings import FIELDS
from prope.errors import log, usage_error
from prope.runtime.files import absolute, read_bytes, retry_reads, write_atomic
from prope.runtime.processes import call_on_first
from prope.spec.run import Spec, may_change
from prope.workdir.checkpoints import list_steps
from prope.workdir.run import Run, open_run

INIT_FROM = "init_from"  # file of a run: the place whose parameters it was begun from


def open_source(spec: Spec, workdir: epath.Path, init_from: str | None) -> Run | None:
    """Opens the run that this one begins from, where it has yet to begin.

    Logs where its encoding or data differ; raises UsageError where its model is another one.
    """
    if call_on_first(lambda: bool(list_steps(workdir))):
        return None
    init_from = recorded_init_from(workdir, init_from)
    if init_from is None:
        return None
    run = open_run(init_from)
    ours = spec.flat()
    theirs = run.spec.flat()
    compared = [name for name in ours if name.startswith(("model.", "data."))]
    changed = [name for name in compared if ours[name] != theirs[name]]
    encoding = {f"model.{field}" for field in FIELDS}
    kept = [name for name in changed if not (may_change(name) or name.startswith("data."))]
    refused = [name for name in kept if name not in encoding]
    if refused:
        differing = "; ".join(f"{name}: {theirs[name]}, not {ours[name]}" for name in refused)
        raise usage_error("--init_from", init_from, f"is another model ({differing})")
    if theirs["data.bos_every_window"] and not ours["data.bos_every_window"]:
        problem = f"the model of {init_from} needs <bos> in every window, as it was trained"
        raise usage_error("config.data.bos_every_window", False, problem, "set it to True")
    differing = [f"{name}: {theirs[name]} -> {ours[name]}" for name in changed]
    log.info("other than in %s: %s", init_from, "; ".join(differing) or "nothing")
    return run


def record_source(workdir: epath.Path, source: Run) -> None:
    """Notes in a run's directory which run it begins from."""
    write_atomic(workdir / INIT_FROM, str(absolute(source.workdir)))


def recorded_init_from(workdir: epath.Path, init_from: str | None) -> str | None:
    """Returns --init_from, or without it the place that this run was begun from, if any.

    Raises UsageError where they differ.
    """
    path = workdir / INIT_FROM
    read = functools.partial(read_bytes, path)
    recorded = call_on_first(lambda: retry_reads(path, read, b"").decode()) or None
    if None in (recorded, init_from):
        return init_from or recorded
    if str(absolute(init_from)) != recorded:
        problem = f"this run was begun from {recorded}"
        remedy = "leave the flag out, or choose another --workdir"
        raise usage_error("--init_from", init_from, problem, remedy)
    return init_from


def spec_before(spec: Spec, source: Run) -> Spec:
    """Returns a run's spec with the encoding of the run that it begins from, if it is another."""
    encoding = {field: getattr(source.spec.model, field) for field in FIELDS}
    if all(getattr(spec.model, field) == value for field, value in encoding.items()):
        return spec
    # The chosen kernel may not be for the layers before.
    encoding |= {"attention": "auto", "global_attention": None}
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, **encoding))
