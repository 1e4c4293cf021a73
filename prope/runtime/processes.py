"""Joins the processes of one run, and makes them agree on errors and decisions.

They are joined by JAX's multi-controller runtime, started from the environment, so that the same command runs alone
and on a pod:

  PROPE_PROCESSES           how many: 1 (default), a number, or "auto" for what JAX finds (Slurm, Open MPI, TPU pods)
  PROPE_COORDINATOR         host:port of process 0, and
  PROPE_PROCESS             the number of this one: both, or neither where JAX finds them
  PROPE_START_TIMEOUT       seconds to wait for all to start, 1800 by default: nodes of a cluster start minutes apart
  PROPE_HEARTBEAT_TIMEOUT   seconds without a heartbeat after which a process counts as dead, 100 by default
  PROPE_PROCESSES_PER_NODE  on GPUs: "gpu", one process for each (default), or "node", one for all of a node
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
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import jax
import numpy as np
from etils import epath
from jax._src import distributed  # whose key-value store and barriers have no public name
from jax.experimental import multihost_utils

from prope.errors import (
    INTERRUPTED,
    LOST,
    RunFailed,
    Stopped,
    UsageError,
    as_ending,
    first_line,
    log,
)

T = TypeVar("T")

_MESSAGE_BYTES = 500  # of an error that is sent to all processes
_STATUSES = "^(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED):"  # of JAX's runtime; the rest is what Gloo and NCCL say
_PEER_LOST = re.compile(
    f"{_STATUSES}|heartbeat|Connection (closed|reset)|Gloo .* failed|remote process exited"
)
_RESTART = "look at the log of the process that ended first, and start the same command again on all of them"
_LOG_SECONDS = 60  # between lines of a process that waits
_index, _count = 0, 1
_leaving: int | None = None  # the exit code with which this process is about to leave
_waits = itertools.count()


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Joins the processes that the environment names; unless an error ends this one, waits for all at the end.

    Raises:
      UsageError: the environment names processes that cannot be joined.
      Stopped: a collective failed because another process is gone.
    """
    with peer_loss_as_stopped():
        start()
        yield
        wait()
        jax.distributed.shutdown()  # does nothing for one alone


def start(environ: Mapping[str, str] = os.environ) -> None:
    """Joins the processes that the environment names; call it before JAX initialises a device.

    Raises UsageError where a variable is invalid, the number of processes is another one, or GPUs would stay idle.
    """
    global _index, _count
    wanted = environ.get("PROPE_PROCESSES") or _default_processes(environ)
    if wanted == "1":
        return
    expected = None if wanted == "auto" else _number(environ, "PROPE_PROCESSES", wanted)
    log.info("joining the other processes; PROPE_PROCESSES=1 would run this one alone")
    _join(environ, expected)
    signal.signal(
        signal.SIGTERM, signal.getsignal(signal.SIGTERM)
    )  # JAX's runtime has taken it for itself
    _index, _count = jax.process_index(), jax.process_count()
    if expected not in (None, _count):
        raise UsageError(f"PROPE_PROCESSES={wanted}: there are {_count} processes; start that many")
    host, devices = socket.gethostname(), (jax.local_device_count(), jax.device_count())
    log.info("process %d of %d on %s, with %d of %d devices", _index, _count, host, *devices)
    _check_gpus(environ)
    if not is_first():
        log.setLevel(logging.WARNING)  # all would log the same


def count() -> int:
    """Returns the number of processes; unlike JAX's own function it initialises no device."""
    return _count


def is_first() -> bool:
    """Returns whether this process writes logs and prints the result."""
    return _index == 0


def wait() -> None:
    """Waits, up to a week, until all processes call this; a collective fails after 30 s on CPUs."""
    if _count > 1:
        distributed.global_state.client.wait_at_barrier(f"prope-{next(_waits)}", 7 * 86_400_000)


def broadcast_from_first(value: T) -> T:
    """Returns the first process's value, of JSON's types; all must call this at the same place."""
    return call_on_first(lambda: value)


def call_on_first(function: Callable[[], T]) -> T:
    """Calls a function in the first process as if it were alone; returns its result, of JSON's types, in all.

    The others wait, however long it takes. An error that ends the first one with one line ends them with it.
    """
    global _count
    if _count == 1:
        return function()
    key, store, start = f"prope-{next(_waits)}", distributed.global_state.client, time.monotonic()
    text, logged, count = None, start, _count
    if is_first():
        _count = 1
        try:
            answer = {"value": function()}
        except Exception as error:
            ending = as_ending(error)
            if not isinstance(ending, UsageError | RunFailed):
                raise
            answer = {"error": str(ending), "code": ending.code}
        finally:
            _count = count
        text = json.dumps(answer)
        store.key_value_set(key, text)
    while text is None:  # a second at a time, so that signals are heard
        try:
            text = store.blocking_key_value_get(key, 1000)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise
        if time.monotonic() - logged > _LOG_SECONDS:
            logged = time.monotonic()
            log.warning(
                "waiting for process 0, whose log says what it does, since %d s", logged - start
            )
    answer = json.loads(text)
    if "error" in answer:
        raise (UsageError if answer["code"] == UsageError.code else RunFailed)(answer["error"])
    return answer["value"]


@contextlib.contextmanager
def raise_on_all(kind: type[UsageError] = UsageError) -> Iterator[None]:
    """Re-raises an error of any process on every process, so that none waits for one that has ended."""
    if _count == 1:
        yield
        return
    message = ""
    try:
        yield
    except kind as error:
        message = str(error)
    wait()
    own = np.frombuffer(message.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES), np.uint8)
    for process, row in enumerate(np.asarray(multihost_utils.process_allgather(own))):
        if text := row.tobytes().decode(errors="ignore").strip():
            raise kind(message or f"process {process}: {text}")


def check_count() -> None:
    """Raises UsageError where JAX runs in other processes than were configured: libtpu joins the hosts of a pod."""
    if jax.process_count() != _count:
        found = f"{jax.process_count()} processes, of which this is number {jax.process_index()}"
        remedy = "set PROPE_PROCESSES=auto and start the same command on all hosts, or use one host"
        raise UsageError(f"PROPE_PROCESSES is {_count}, and JAX runs in {found}: {remedy}")


def check_shared(directory: epath.Path) -> None:
    """Raises UsageError on all processes if one does not see the first one's `directory`."""
    if _count == 1:
        return
    token = directory / f".shared-{broadcast_from_first(secrets.randbits(30))}"
    with raise_on_all():
        if is_first():
            token.write_text("Seen by every process of the run?\n")
    seen = multihost_utils.process_allgather(np.int32(token.exists()))
    if is_first():
        token.unlink()
    if missing := [str(process) for process in np.flatnonzero(seen == 0)]:
        unseen = f"process {', '.join(missing)} of {_count} do not see what process 0 writes there"
        remedy = "choose a bucket's URL, such as gs://BUCKET/run, or a folder that all hosts mount"
        raise UsageError(f"--workdir={directory}: is not shared: {unseen}; {remedy}")


def is_peer_loss(error: Exception) -> bool:
    """Tells whether the error of a collective says that another process is gone."""
    of_collective = isinstance(
        error, jax.errors.JaxRuntimeError | ValueError
    )  # Gloo's may be ValueErrors
    return _count > 1 and of_collective and _PEER_LOST.search(str(error)) is not None


@contextlib.contextmanager
def peer_loss_as_stopped() -> Iterator[None]:
    """Re-raises the error of a collective whose peer is gone as Stopped; others, as of memory, are this process's."""
    try:
        yield
    except Exception as error:
        if not is_peer_loss(error):
            raise
        message = f"another process of this run is gone, or cannot be reached ({first_line(error)}); {_RESTART}"
        raise Stopped(message, LOST) from error


def leave(code: int) -> None:
    """Exits. Among several processes the first leaves last, but does not wait long: the others may never come."""
    global _leaving
    if _count == 1:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (LOST, INTERRUPTED):  # errors that the others have too, and may not have met yet
        _leaving = code
        _leave_last()
    os._exit(code)


def _leave_last() -> None:
    """Lets the first process leave last: JAX's runtime, which it hosts, aborts the others once it is gone."""
    store = distributed.global_state.client
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one has come to another end
        if is_first():
            for process in range(1, _count):
                store.blocking_key_value_get(f"prope-leaves-{process}", 10_000)
        else:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), 2
            )  # the runtime would say that the first one is gone
            store.key_value_set(f"prope-leaves-{_index}", "")


def _join(environ: Mapping[str, str], expected: int | None) -> None:
    address, number = environ.get("PROPE_COORDINATOR"), environ.get("PROPE_PROCESS")
    timeout = _number(environ, "PROPE_START_TIMEOUT", "1800")
    heartbeat = _number(environ, "PROPE_HEARTBEAT_TIMEOUT", "100")
    per_node = environ.get("PROPE_PROCESSES_PER_NODE", "gpu")
    if per_node not in ("gpu", "node"):
        message = f"PROPE_PROCESSES_PER_NODE={per_node}: must be gpu, one process for each, or node, one for all"
        raise UsageError(message)
    if (address is None) != (number is None):
        raise UsageError(
            "PROPE_COORDINATOR and PROPE_PROCESS go together: set both, or neither where JAX finds them"
        )
    arguments: dict = {}
    if address is not None:
        if not re.fullmatch(r".+:\d+", address):
            raise UsageError(f"PROPE_COORDINATOR={address}: must be host:port of process 0")
        if expected is None:
            raise UsageError(
                "PROPE_PROCESSES=auto: with PROPE_COORDINATOR it must be the number of processes"
            )
        process = _number(environ, "PROPE_PROCESS", minimum=0)
        if process >= expected:
            raise UsageError(
                f"PROPE_PROCESS={number}: must be less than PROPE_PROCESSES={expected}"
            )
        arguments = {
            "coordinator_address": address,
            "num_processes": expected,
            "process_id": process,
        }
    # None: JAX's rule, one for each process that Slurm or Open MPI started.
    arguments["local_device_ids"] = (
        list(range(_visible_gpus(environ))) or None if per_node == "node" else None
    )
    _set_abort_message(
        f"after {timeout} s not all processes have come; {expected or 'as many as the cluster has'} were expected, the "
        f"first at {address or 'the address that the cluster gives'}. Are all of them running, and may they connect to "
        "this port (firewall)? PROPE_START_TIMEOUT sets how long to wait; start the same command again on all of them",
        joining=True,
    )
    timeouts = {"initialization_timeout": timeout, "heartbeat_timeout_seconds": heartbeat}
    try:
        jax.distributed.initialize(**arguments, **timeouts, shutdown_timeout_seconds=60)
    except ValueError as error:
        wanted = environ.get("PROPE_PROCESSES", "auto")
        none = f"JAX finds no cluster here ({error}); set PROPE_COORDINATOR and PROPE_PROCESS"
        raise UsageError(f"PROPE_PROCESSES={wanted}: {none}") from None
    silent = f"no sign of life for {heartbeat} s, unless the lines above name another cause"
    _set_abort_message(
        f"another process of this run is gone, or cannot be reached: {silent}; {_RESTART}"
    )


def _default_processes(environ: Mapping[str, str]) -> str:
    """Returns 'auto' where a launcher started several processes: by default each would train alone."""
    several = environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" or "," in environ.get(
        "TPU_WORKER_HOSTNAMES", ""
    )
    return "auto" if several else "1"


def _number(environ: Mapping[str, str], name: str, default: str = "", minimum: int = 1) -> int:
    value = environ.get(name, default)
    if not re.fullmatch(r"\d+", value) or int(value) < minimum:
        raise UsageError(f"{name}={value}: must be a whole number from {minimum}")
    return int(value)


def _set_abort_message(line: str, joining: bool = False) -> None:
    """Sets the line and exit code for when JAX's runtime ends the process because a peer is lost: it calls abort().

    It does so in a thread of its own, or while joining. Another abort keeps its exit code, 134.
    """

    def on_abort(_number: int) -> None:
        if _leaving is not None:
            os._exit(
                _leaving
            )  # the first one has left before it answered that it knows that this one leaves
        if joining or threading.get_native_id() not in [
            thread.native_id for thread in threading.enumerate()
        ]:
            os.write(2, f"\nstopped: {line}\n".encode())
            os._exit(LOST)
        libc.signal(signal.SIGABRT, None)  # the default
        os.abort()

    global _on_abort
    libc = ctypes.CDLL(None)
    _on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)  # kept: C has no reference to it
    libc.signal(signal.SIGABRT, _on_abort)


def _visible_gpus(environ: Mapping[str, str]) -> int:
    if environ.get("CUDA_VISIBLE_DEVICES"):
        return len(environ["CUDA_VISIBLE_DEVICES"].split(","))
    return sum(
        re.fullmatch(r"nvidia\d+", path.name) is not None
        for path in pathlib.Path("/dev").glob("nvidia*")
    )


def _check_gpus(environ: Mapping[str, str]) -> None:
    """Raises UsageError if no process uses some of this node's GPUs."""
    if jax.local_devices()[0].platform != "gpu":
        return
    host = np.uint32(zlib.crc32(socket.gethostname().encode()))
    local = int(np.sum(multihost_utils.process_allgather(host) == host)) if _count > 1 else 1
    visible, used = _visible_gpus(environ), local * jax.local_device_count()
    if used < visible:
        idle = f"{visible} GPUs are visible on {socket.gethostname()} and its {local} processes use {used}"
        remedy = (
            "start one process for each, or one for the node with PROPE_PROCESSES_PER_NODE=node"
        )
        raise UsageError(f"{idle}: {remedy}; or hide the others with CUDA_VISIBLE_DEVICES")
