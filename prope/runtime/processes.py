"""Joins the processes of one run, and makes them agree on errors and decisions.

JAX's multi-controller runtime joins them. The environment says which, so that the same command
runs alone and on a pod. PROPE_PROCESSES is one of

  1             this process alone; the default, except under a launcher that started several
  auto          those that JAX finds: Slurm, Open MPI, TPU pods
  I/N@HOST:PORT this is number I of N, 0 to N - 1; process 0 listens at HOST:PORT
"""

import contextlib
import ctypes
import itertools
import json
import logging
import os
import pathlib
import re
import secrets
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import numpy as np
from etils import epath
from jax._src import distributed  # whose key-value store and barriers have no public name
from jax.experimental import multihost_utils

from prope.errors import (
    INTERRUPTED,
    LOST,
    NO_PLATFORM,
    RunFailed,
    Stopped,
    StorageFailed,
    UsageError,
    first_line,
    log,
    to_user_error,
    usage_error,
)
from prope.runtime import watchdog

T = TypeVar("T")

START_SECONDS = 1800  # to wait for all processes: nodes of a cluster start minutes apart
HEARTBEAT_SECONDS = 100  # without a heartbeat after which a process counts as dead
SHUTDOWN_SECONDS = 20  # to wait for the others at the end
_WEEK_MS = 7 * 86_400_000
_LOG_SECONDS = 60  # between lines of a process that waits
_MESSAGE_BYTES = 500  # bytes of an error that is sent to all processes
_ADDRESS = re.compile(r"(?P<process>\d+)/(?P<count>\d+)@(?P<coordinator>.+:\d+)")
# How JAX's runtime begins its errors, and what Gloo and NCCL say of a lost peer.
_PEER_LOST = re.compile(
    r"^(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED):|heartbeat|Connection (closed|reset)"
    r"|Gloo .* failed|remote process exited"
)
_SHARED_ERRORS = (UsageError, RunFailed, StorageFailed)  # which end all processes
_RESTART = (
    "look at the log of the process that ended first, and start the same command again on all"
)
_index = 0
_count = 1
_exit_code = LOST  # exit code of this process when JAX's runtime aborts it
_barrier_ids = itertools.count()


def list_cores() -> list[int]:
    """Lists the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Joins the processes that the environment names, and waits for all at the end.

    An error that ends this process waits for none.

    Raises:
      UsageError: the environment names processes that cannot be joined.
      Stopped: a collective failed because another process is gone.
    """
    with peer_loss_as_stopped():
        start()
        yield
        wait()
        jax.distributed.shutdown()  # does nothing for one alone


def start() -> None:
    """Joins the processes that the environment names, before JAX initialises a device.

    Raises UsageError where PROPE_PROCESSES is invalid or GPUs would stay idle.
    """
    global _index, _count
    wanted = os.environ.get("PROPE_PROCESSES") or _default_processes()
    if wanted == "1":
        return
    log.info(
        "waiting for the others of PROPE_PROCESSES=%s; PROPE_PROCESSES=1 runs this one alone",
        wanted,
    )
    with watchdog.paused():  # they may come minutes apart
        _join(wanted)
    # JAX's runtime has taken the signal for itself.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    _index = jax.process_index()
    _count = jax.process_count()
    log.info(
        "process %d of %d on %s, with %d of %d devices",
        _index,
        _count,
        socket.gethostname(),
        jax.local_device_count(),
        jax.device_count(),
    )
    _check_gpus()
    if not is_first():
        log.setLevel(logging.WARNING)  # all would log the same


def count() -> int:
    """Returns the number of processes; unlike JAX's function it initialises no device."""
    return _count


def is_first() -> bool:
    """Returns whether this process writes logs and prints the result."""
    return _index == 0


def wait() -> None:
    """Waits, up to a week, until all processes call this; a collective fails after 30 s on CPUs."""
    if _count > 1:
        with watchdog.paused():  # what holds another one up, its own ends
            distributed.global_state.client.wait_at_barrier(f"prope-{next(_barrier_ids)}", _WEEK_MS)


def call_on_first(function: Callable[[], T]) -> T:
    """Calls a function in the first process as if it were alone; returns its result in all.

    The result is of JSON's types. The others wait, however long it takes. An error that ends the
    first one with one line ends them with it.
    """
    if _count == 1:
        return function()
    key = f"prope-{next(_barrier_ids)}"
    if is_first():
        text = json.dumps(_call_alone(function))
        distributed.global_state.client.key_value_set(key, text)
    else:
        text = _wait_for_value(key)
    answer = json.loads(text)
    if "error" in answer:
        (kind,) = (kind for kind in _SHARED_ERRORS if kind.code == answer["code"])
        raise kind(answer["error"])
    return answer["value"]


def _call_alone(function: Callable[[], T]) -> dict:
    """Returns a function's result or its one-line error; meanwhile `count` returns 1."""
    global _count
    count_of_all = _count
    _count = 1
    try:
        return {"value": function()}
    except Exception as error:
        known = to_user_error(error)
        if not isinstance(known, _SHARED_ERRORS):
            raise
        return {"error": str(known), "code": known.code}
    finally:
        _count = count_of_all


def _wait_for_value(key: str) -> str:
    """Waits until the first process sets a key, and says so every minute."""
    start = time.monotonic()
    logged = start
    while True:
        watchdog.alive("waiting for process 0")  # which has a watchdog of its own
        try:
            # A second at a time, so that signals are heard.
            return distributed.global_state.client.blocking_key_value_get(key, 1000)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise
        now = time.monotonic()
        if now - logged > _LOG_SECONDS:
            logged = now
            log.warning("waiting for process 0, whose log tells why, since %d s", now - start)


@contextlib.contextmanager
def raise_on_all(kind: type[UsageError] = UsageError) -> Iterator[None]:
    """Re-raises an error of any process on every process; else others would wait for it."""
    if _count == 1:
        yield
        return
    message = ""
    try:
        yield
    except kind as error:
        message = str(error)
    wait()
    encoded = message.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES)
    gathered = multihost_utils.process_allgather(np.frombuffer(encoded, np.uint8))
    for process, row in enumerate(np.asarray(gathered)):
        text = row.tobytes().decode(errors="ignore").strip()
        if text:
            raise kind(message or f"process {process}: {text}")


def check_count() -> None:
    """Initialises the devices, whose driver may join the hosts of a pod by itself, as libtpu does.

    Raises UsageError where JAX finds no device, or runs in other processes than PROPE_PROCESSES.
    """
    try:
        count = jax.process_count()
    except (AssertionError, RuntimeError) as error:  # JAX asserts that there is a device
        name = "JAX_PLATFORM_NAME" if "JAX_PLATFORM_NAME" in os.environ else "JAX_PLATFORMS"
        cause = f"JAX finds no such device ({first_line(error)}); look to its driver, or "
        raise usage_error(name, os.environ.get(name), cause + NO_PLATFORM) from error
    if count != _count:
        actual = f"{count} processes, of which this is number {jax.process_index()}"
        remedy = "set PROPE_PROCESSES=auto and start the same command on all hosts, or use one host"
        raise UsageError(f"PROPE_PROCESSES is {_count}, and JAX runs in {actual}: {remedy}")


def check_shared(directory: epath.Path) -> None:
    """Raises UsageError on all processes if one does not see the first one's `directory`."""
    if _count == 1:
        return
    token = directory / f".shared-{call_on_first(lambda: secrets.randbits(30))}"
    with raise_on_all():
        if is_first():
            token.write_text("Seen by every process of the run?\n")
    seen = multihost_utils.process_allgather(np.int32(token.exists()))
    if is_first():
        token.unlink()
    missing = ", ".join(str(process) for process in np.flatnonzero(seen == 0))
    if missing:
        unseen = f"process {missing} of {_count} do not see what process 0 writes there"
        remedy = "choose a bucket's URL, such as gs://BUCKET/run, or a folder that all hosts mount"
        raise UsageError(f"--workdir={directory}: is not shared: {unseen}; {remedy}")


def is_peer_loss(error: Exception) -> bool:
    """Returns whether the error of a collective says that another process is gone."""
    # Gloo's errors may be ValueErrors.
    may_be = _count > 1 and isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    return may_be and _PEER_LOST.search(str(error)) is not None


@contextlib.contextmanager
def peer_loss_as_stopped() -> Iterator[None]:
    """Re-raises the error of a collective whose peer is gone as Stopped."""
    try:
        yield
    except Exception as error:
        if not is_peer_loss(error):
            raise
        gone = "another process of this run is gone, or cannot be reached"
        raise Stopped(f"{gone} ({first_line(error)}); {_RESTART}", LOST) from error


def leave(code: int) -> None:
    """Exits; with an error that the others may have too, once they know it, or after a while.

    Else JAX's runtime, which the first process hosts, would abort them before.
    """
    global _exit_code
    if _count == 1:
        sys.exit(code)
    with contextlib.suppress(Exception):  # stdout may be closed, or its disk full
        sys.stdout.flush()
        sys.stderr.flush()
    if code not in (LOST, INTERRUPTED):
        _exit_code = code
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.distributed.shutdown()
    os._exit(code)


def _join(wanted: str) -> None:
    """Joins the processes that the value of PROPE_PROCESSES names."""
    arguments = {}
    expected = "as many as the cluster has were expected"
    if wanted != "auto":
        address = _ADDRESS.fullmatch(wanted)
        if address is None or int(address["process"]) >= int(address["count"]):
            problem = "must be 1, auto, or I/N@HOST:PORT with I from 0 to N - 1"
            raise usage_error("PROPE_PROCESSES", wanted, problem, "as in 0/2@10.0.0.1:8476")
        arguments = {
            "coordinator_address": address["coordinator"],
            "num_processes": int(address["count"]),
            "process_id": int(address["process"]),
        }
        expected = f"{address['count']} were expected, the first at {address['coordinator']}"
    _set_abort_message(
        f"after {START_SECONDS} s not all processes have come; {expected}. Are all of them "
        "running, and may they connect to this port (firewall)? Start the same command again on "
        "all of them"
    )
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (KeyError, ValueError) as error:
        problem = f"JAX finds no cluster here ({error})"
        remedy = "give PROPE_PROCESSES=1, or I/N@HOST:PORT as in 0/2@10.0.0.1:8476"
        raise usage_error("PROPE_PROCESSES", wanted, problem, remedy) from None
    _set_abort_message(
        "another process of this run is gone, or cannot be reached: no sign of life for "
        f"{HEARTBEAT_SECONDS} s, unless the lines above name another cause; {_RESTART}"
    )


def _default_processes() -> str:
    """Returns 'auto' where a launcher started several processes: each would train alone."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or "1"
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    if tasks == "1" and "," not in hosts:
        return "1"
    cause = "SLURM_STEP_NUM_TASKS=%s, TPU_WORKER_HOSTNAMES=%s: started with other processes"
    log.info(cause, tasks, hosts)
    return "auto"


def _set_abort_message(line: str) -> None:
    """Sets the line with which this process exits, rather than by SIGABRT, when it is aborted.

    JAX's runtime aborts a process, in a thread of C++, when a peer is lost or does not come. It
    takes no Python callback, and a handler of Python's `signal` would run in the main thread, which
    waits. While a process leaves, it keeps its exit code.
    """

    def on_abort(_number):
        if _exit_code == LOST:
            os.write(2, f"\nstopped: {line}\n".encode())
        os._exit(_exit_code)

    global _on_abort  # C holds no reference to it
    _on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)


def _visible_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return len(visible.split(","))
    return len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def _check_gpus() -> None:
    """Raises UsageError if no process uses some of this node's GPUs."""
    if jax.local_devices()[0].platform != "gpu":
        return
    node = socket.gethostname()
    local_processes = 1
    if _count > 1:
        node_hash = np.uint32(zlib.crc32(node.encode()))
        node_hashes = multihost_utils.process_allgather(node_hash)
        local_processes = int(np.sum(node_hashes == node_hash))
    visible = _visible_gpus()
    used = local_processes * jax.local_device_count()
    if used < visible:
        idle = f"{visible} GPUs are visible on {node}"
        idle += f" and its {local_processes} processes use {used}"
        all_ids = ",".join(map(str, range(visible)))
        remedy = "start one process for each, or one for the node with "
        remedy += f"JAX_LOCAL_DEVICE_IDS={all_ids}"
        raise UsageError(f"{idle}: {remedy}; or hide the others with CUDA_VISIBLE_DEVICES")
