"""Many processes, one run: how they find one another, and what they have to agree on.

JAX's multi-controller runtime joins them; this file starts it from the environment, so that the same command runs
alone and on a pod:

  PROPE_PROCESSES           how many: 1 (default), a number, or "auto" for what JAX finds (Slurm, Open MPI, TPU pods)
  PROPE_COORDINATOR         host:port of process 0, and
  PROPE_PROCESS             the number of this one: both, or neither where JAX finds them
  PROPE_START_TIMEOUT       seconds to wait for all to come, 1800 by default: nodes of a cluster start minutes apart
  PROPE_HEARTBEAT_TIMEOUT   seconds without a sign of life after which a process is taken for dead, 100 by default
  PROPE_PROCESSES_PER_NODE  on GPUs: "gpu", one process for each (default), or "node", one for all of a node
"""

import contextlib
import ctypes
import logging
import os
import pathlib
import re
import secrets
import signal
import socket
import sys
import zlib
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from prope.errors import LOST, Stopped, UsageError

log = logging.getLogger("prope")

_MESSAGE = 500  # bytes of an error that all processes hear of
_AGAIN = "look at the log of the process that ended first, and start the same command again on all of them"
_index, _count = 0, 1


def start(environ: Mapping[str, str] = os.environ) -> None:
    """Joins the processes that the environment names; before JAX is used for anything else.

    Raises:
      UsageError: a variable cannot be used, or the processes are not as many as expected; or GPUs would stay idle.
    """
    global _index, _count
    wanted = environ.get("PROPE_PROCESSES") or _default_processes(environ)
    if wanted == "1":
        return
    expected = None if wanted == "auto" else _number("PROPE_PROCESSES", wanted, 1)
    _join(environ, expected)
    _index, _count = jax.process_index(), jax.process_count()
    if expected not in (None, _count):
        raise UsageError(f"PROPE_PROCESSES={wanted}: there are {_count} processes; start that many")
    log.info(
        "process %d of %d on %s, with %d of %d devices", _index, _count, socket.gethostname(),
        jax.local_device_count(), jax.device_count(),
    )  # fmt: skip
    _check_gpus(environ)
    if not is_first():
        log.setLevel(logging.WARNING)  # what the first one says is true of all


def count() -> int:
    """How many processes this run has; unlike JAX's own function it touches no device."""
    return _count


def is_first() -> bool:
    """Whether this is the process that writes logs and prints the result."""
    return _index == 0


def broadcast_from_first(value: int) -> int:
    """The value that the first process has; all must call this at the same place."""
    return value if _count == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def any_process(condition: bool) -> bool:
    """Whether a condition holds in any process; all must call this at the same place."""
    return condition if _count == 1 else bool(multihost_utils.process_allgather(np.int32(condition)).any())


@contextlib.contextmanager
def raise_on_all() -> Iterator[None]:
    """Bad input that one process finds within ends all of them, so that none waits for one that has gone."""
    message = ""
    try:
        yield
    except UsageError as error:
        if _count == 1:
            raise
        message = str(error)
    if _count == 1:
        return
    text = np.frombuffer(message.encode()[:_MESSAGE].ljust(_MESSAGE), np.uint8)
    found = multihost_utils.process_allgather(text)
    for process, row in enumerate(np.asarray(found)):
        other = row.tobytes().decode(errors="ignore").strip()
        if other:
            raise UsageError(message or f"process {process}: {other}")


def check_shared(directory: pathlib.Path) -> None:
    """Raises UsageError in all processes where some do not see the directory that the first one sees."""
    if _count == 1:
        return
    token = directory / f".shared-{broadcast_from_first(secrets.randbits(30))}"
    with raise_on_all():
        if is_first():
            token.write_text("Seen by every process of the run?\n")
    sees = multihost_utils.process_allgather(np.int32(token.exists()))
    if is_first():
        token.unlink()
    if blind := [str(process) for process, seen in enumerate(sees) if not seen]:
        raise UsageError(
            f"--workdir={directory}: is not shared: process {', '.join(blind)} of {_count} do not see what process 0 "
            "writes there; choose one that all hosts mount, such as NFS or a bucket through Cloud Storage FUSE"
        )


@contextlib.contextmanager
def peer_loss_as_stopped() -> Iterator[None]:
    """What a collective raises when another process is gone, as one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _count == 1:
            raise
        reason = str(error).strip().splitlines()[0]
        raise Stopped(
            f"another process of this run is gone, or cannot be reached ({reason}); {_AGAIN}", LOST
        ) from error


def end() -> None:
    """Waits for the other processes: all have done their part, and none shall take another for lost."""
    if _count > 1:
        jax.distributed.shutdown()


def leave(code: int) -> None:
    """Ends this process; among several without waiting for the others, which may never come."""
    if _count == 1:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(environ: Mapping[str, str], expected: int | None) -> None:
    address, number = environ.get("PROPE_COORDINATOR"), environ.get("PROPE_PROCESS")
    seconds = _number("PROPE_START_TIMEOUT", environ.get("PROPE_START_TIMEOUT", "1800"), 1)
    beat = _number("PROPE_HEARTBEAT_TIMEOUT", environ.get("PROPE_HEARTBEAT_TIMEOUT", "100"), 1)
    if (address is None) != (number is None):
        raise UsageError("PROPE_COORDINATOR and PROPE_PROCESS go together: set both, or neither where JAX finds them")
    if address is not None and not re.fullmatch(r".+:\d+", address):
        raise UsageError(f"PROPE_COORDINATOR={address}: must be host:port of process 0")
    if address is not None and expected is None:
        raise UsageError("PROPE_PROCESSES=auto: with PROPE_COORDINATOR it must be the number of processes")
    known = {"coordinator_address": address, "num_processes": expected} if address is not None else {}
    if number is not None:
        known["process_id"] = _number("PROPE_PROCESS", number, 0)
        if known["process_id"] >= expected:
            raise UsageError(f"PROPE_PROCESS={number}: must be less than PROPE_PROCESSES={expected}")
    known["local_device_ids"] = _local_gpus(environ)
    waiting = (
        f"after {seconds} s not all processes have come; {expected or 'as many as the cluster has'} were expected, the "
        f"first at {address or 'the address that the cluster gives'}. Are all of them running, and may they connect to "
        "this port (firewall)? PROPE_START_TIMEOUT sets how long to wait; start the same command again on all of them"
    )
    _set_abort_message(waiting)
    try:
        jax.distributed.initialize(
            initialization_timeout=seconds, heartbeat_timeout_seconds=beat, shutdown_timeout_seconds=60, **known
        )
    except ValueError as error:
        raise UsageError(
            f"PROPE_PROCESSES={environ.get('PROPE_PROCESSES', 'auto')}: JAX finds no cluster here ({error}); set "
            "PROPE_COORDINATOR and PROPE_PROCESS"
        ) from None
    _set_abort_message(f"another process of this run is gone: no sign of life for {beat} s; {_AGAIN}")


def _default_processes(environ: Mapping[str, str]) -> str:
    """'auto' where a launcher started several processes and nothing was said: each would train alone."""
    several = environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" or "," in environ.get("TPU_WORKER_HOSTNAMES", "")
    return "auto" if several else "1"


def _number(name: str, value: str, least: int) -> int:
    if not re.fullmatch(r"\d+", value) or int(value) < least:
        raise UsageError(f"{name}={value}: must be a whole number from {least}")
    return int(value)


def _set_abort_message(line: str) -> None:
    """What to say, and the exit code, when JAX's runtime ends the process: it calls abort(), in a thread of its own."""

    def say(_number: int) -> None:
        os.write(2, f"\nstopped: {line}\n".encode())
        os._exit(LOST)

    global _say
    _say = ctypes.CFUNCTYPE(None, ctypes.c_int)(say)  # kept: C has no reference to it
    ctypes.CDLL(None).signal(signal.SIGABRT, _say)


def _local_gpus(environ: Mapping[str, str]) -> list[int] | None:
    """The GPUs of this process, by number; None for JAX's rule: of one that Slurm or Open MPI started, one."""
    how = environ.get("PROPE_PROCESSES_PER_NODE", "gpu")
    if how not in ("gpu", "node"):
        raise UsageError(f"PROPE_PROCESSES_PER_NODE={how}: must be gpu, one process for each, or node, one for all")
    return list(range(_visible_gpus(environ))) or None if how == "node" else None


def _visible_gpus(environ: Mapping[str, str]) -> int:
    if environ.get("CUDA_VISIBLE_DEVICES"):
        return len(environ["CUDA_VISIBLE_DEVICES"].split(","))
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in pathlib.Path("/dev").glob("nvidia*"))


def _check_gpus(environ: Mapping[str, str]) -> None:
    """Raises UsageError where this node has GPUs that no process uses."""
    if jax.local_devices()[0].platform != "gpu":
        return
    hosts = np.uint32(zlib.crc32(socket.gethostname().encode()))
    here = int(np.sum(multihost_utils.process_allgather(hosts) == hosts)) if _count > 1 else 1
    visible, used = _visible_gpus(environ), here * jax.local_device_count()
    if used < visible:
        raise UsageError(
            f"{visible} GPUs are visible on {socket.gethostname()} and its {here} processes use {used}: start one "
            "process for each, or one for the node with PROPE_PROCESSES_PER_NODE=node; or hide the others with "
            "CUDA_VISIBLE_DEVICES"
        )
