"""One training at a time writes a run; records that no checkpoint explains are kept."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable

import numpy as np
import pytest
from etils import epath
from support.commands import CONFIG, finish, refusal
from support.runs import save_checkpoints
from support.text import read_lines, write_lines

from prope.errors import RunFailed, Stopped, StorageFailed, UsageError, to_user_error
from prope.runtime import files
from prope.spec.run import Spec
from prope.workdir import lease as lease_lib
from prope.workdir.lease import Lease
from prope.workdir.run import open_workdir, read_config, write_config

LOG = "--config.log_every=1"
QUICK = """
from prope.workdir import lease
lease.RENEW_SECONDS = 0.2
lease.EXPIRE_SECONDS = 3.0
"""
SLOW_STEPS = """
import time
from prope.runtime.profiler import Profiler
run = Profiler.run
Profiler.run = lambda *arguments: (time.sleep(0.5), run(*arguments))[1]
"""


@pytest.fixture
def take():
    """Takes leases; ends their threads after the test."""
    taken = []

    def take(place, on_loss=lambda: None) -> Lease:
        lease = Lease(place)
        lease.acquire(on_loss)
        taken.append(lease)
        return lease

    yield take
    for lease in taken:
        lease.stop()


@pytest.fixture(params=["local", "url"])
def place(request, tmp_path, monkeypatch):
    monkeypatch.setattr(lease_lib, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(lease_lib, "EXPIRE_SECONDS", 2.0)
    return epath.Path(tmp_path if request.param == "local" else request.getfixturevalue("bucket"))


ELSEWHERE = {"machine": "another", "pid": 1, "id": "0"}


def test_one_of_two_trainings_is_refused_and_the_next_is_not(place, take):
    first = take(place)
    with pytest.raises(Stopped, match=str(os.getpid())) as refusal:
        take(place)
    assert refusal.value.code == 76, "a launcher starts it again"
    first.check()
    first.release()
    take(place).release()


def test_a_training_that_slept_has_lost_the_run_and_writes_nothing(place, take, monkeypatch):
    lost = threading.Event()
    monkeypatch.setattr(lease_lib, "RENEW_SECONDS", 6.0)
    first = take(place, lost.set)
    monkeypatch.setattr(lease_lib, "RENEW_SECONDS", 0.1)
    second = take(place)
    assert not first.is_held()
    with pytest.raises(RunFailed, match="another training took it over"):
        first.check()
    assert lost.wait(20)
    first.release()
    assert second.is_held(), "the lost lease is left alone"
    second.release()
    with pytest.raises(RunFailed):
        first.check()


@pytest.mark.parametrize("machine", ["this", "another"])
def test_a_dead_training_is_succeeded_on_its_machine_at_once_elsewhere_after_a_while(
    place, take, machine
):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    holder = {"pid": child.pid, "id": "0", "machine": machine}
    if machine == "this":
        lease = take(place)
        lease.release()
        lease = take(place)
        # By TensorStore: gcsfs would read as many bytes as the file had before.
        written = files.kvstore(place).read("lease.json").result().value
        holder["machine"] = json.loads(written)["holder"]["machine"]
        lease.release()
    child.kill()
    child.wait()
    (place / "lease.json").write_text(json.dumps({"holder": holder}))
    start = time.monotonic()
    take(place)
    assert (time.monotonic() - start > 2.0) == (machine == "another")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'"holder"'])
def test_what_is_no_lease_holds_nothing(place, take, content):
    (place / "lease.json").write_bytes(content)
    lease = take(place)
    assert lease.is_held()
    lease.stop()
    (place / "lease.json").unlink()
    with pytest.raises(RunFailed, match=r"lease\.json: was removed"):
        lease.check()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("none", path)])
def test_a_lease_is_written_to_a_file_only(tmp_path, make):
    make(tmp_path / "lease.json")
    line = refusal(lambda: Lease(epath.Path(tmp_path)).acquire(lambda: None))
    assert line.startswith(f"{tmp_path}/lease.json: is ") and "is not written" in line
    assert not (tmp_path / "none").exists()


def test_a_container_of_the_same_host_is_another_machine(monkeypatch):
    """Its processes have other numbers."""
    here = lease_lib._machine()
    assert lease_lib._machine() == here
    namespaces = {"/proc/self/ns/pid": "pid:[1]"}
    monkeypatch.setattr(os, "readlink", namespaces.__getitem__)
    assert lease_lib._machine() == lease_lib._machine() != here


# --- A folder and a clock of the test's own ---------------------------------------------------


class Folder:
    """A key-value store of one file; `before` is called with "read", "write" and "answer"."""

    def __init__(self):
        self.value = b""
        self.generation = 0
        self.before: Callable[[str], None] = lambda operation: None

    def put(self, holder: dict | None, **fields) -> None:
        self.value = json.dumps({"holder": holder} | fields).encode()
        self.generation += 1

    def read(self, _name):
        return types.SimpleNamespace(result=self._read)

    def write(self, _name, content, if_equal):
        write = functools.partial(self._write, content, if_equal)
        return types.SimpleNamespace(result=write)

    def _read(self):
        self.before("read")
        stamp = types.SimpleNamespace(generation=str(self.generation))
        return types.SimpleNamespace(value=self.value, stamp=stamp)

    def _write(self, content, if_equal, timeout):
        self.before("write")
        if if_equal != str(self.generation):
            return types.SimpleNamespace(generation="")
        self.value = content
        self.generation += 1
        self.before("answer")
        return types.SimpleNamespace(generation=str(self.generation))


@pytest.fixture
def folder(monkeypatch) -> Folder:
    folder = Folder()
    monkeypatch.setattr(files, "kvstore", lambda _: folder)
    return folder


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    fake = types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=lambda: 0.0)
    monkeypatch.setattr(lease_lib, "time", fake)
    monkeypatch.setattr(files, "time", fake)
    return now


# When the clock jumps, to when, and whether the holder renews meanwhile; whether it is succeeded.
WAITS = [
    ("another was faster", 40.2, 40.2, True, False),
    ("this one was suspended", 3.0, 100.0, True, False),
    ("the first read was slow", 0.0, 50.0, True, False),
    ("the holder is dead", 0.0, 50.0, False, True),
    ("the holder renews late", 30.0, 39.0, True, False),
]


@pytest.mark.parametrize(
    ("at", "to", "renews", "succeeds"),
    [wait[1:] for wait in WAITS],
    ids=[wait[0] for wait in WAITS],
)
def test_a_holder_that_gives_a_sign_of_life_is_never_succeeded(
    tmp_path, folder, clock, take, at, to, renews, succeeds
):
    folder.put(ELSEWHERE, time=0.0)
    reads = []

    def jump(operation):
        reads.append(operation)
        if len(reads) > 1 and clock[0] >= at and renews and folder.generation == 1:
            folder.put(ELSEWHERE, time=clock[0])
        if clock[0] >= at:
            clock[0] = max(clock[0], to)

    folder.before = jump
    if succeeds:
        take(epath.Path(tmp_path))
        assert clock[0] > to + lease_lib.EXPIRE_SECONDS
        return
    with pytest.raises(Stopped):
        take(epath.Path(tmp_path))


def test_one_that_has_lost_the_run_between_two_reads_does_not_steal_it_back(tmp_path, folder, take):
    lease = take(epath.Path(tmp_path))
    reads = []

    def take_over(operation):
        reads.append(operation)
        if len(reads) == 2:
            folder.put(ELSEWHERE)

    folder.before = take_over
    with pytest.raises(RunFailed):
        lease.check()
    assert json.loads(folder.value)["holder"] == ELSEWHERE
    lease.release()


@pytest.mark.parametrize("what", ["acquire", "check"])
@pytest.mark.parametrize("failing", ["read", "write"])
def test_a_storage_that_fails_is_tried_again_and_then_to_blame(
    tmp_path, folder, clock, take, what, failing
):
    times = [3]

    def fail(operation):
        if operation == failing and times[0]:
            times[0] -= 1
            raise ValueError("INTERNAL: unexpected [http_response_code='500']")

    place = epath.Path(tmp_path)
    operate = take(place).check if what == "check" else lambda: take(place).release()
    folder.before = fail
    operate()
    assert times == [0]
    times[0] = 1000
    with pytest.raises(StorageFailed, match="lease.json: .*then run the same command again"):
        operate()


def test_a_full_disk_is_told_at_once(tmp_path, folder, clock, take):
    lease = take(epath.Path(tmp_path))

    def fail(operation):
        if operation == "write":
            raise ValueError("RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']")

    folder.before = fail
    with pytest.raises(ValueError, match="No space left") as failure:
        lease.check()
    assert to_user_error(failure.value).code == 1 and clock == [0.0]


@pytest.mark.parametrize("what", ["acquire", "check"])
def test_a_training_that_is_suspended_amid_a_write_stops_the_next(
    tmp_path, take, monkeypatch, what
):
    """TensorStore's lock is the system's: it stays while the process lives."""
    monkeypatch.setattr(lease_lib, "LOCK_SECONDS", 0.5)
    monkeypatch.setattr(lease_lib, "RENEW_SECONDS", 1000.0)
    place = epath.Path(tmp_path)
    operate = take(place).check if what == "check" else lambda: take(place)
    if what == "acquire":
        (place / "lease.json").write_text(json.dumps({"holder": {**ELSEWHERE, "id": "7"}}))
        monkeypatch.setattr(lease_lib, "EXPIRE_SECONDS", 0.0)
    lock = tmp_path / "lease.json.__lock"
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)"
    hold += "; print('held', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", hold, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"held\n"
    try:
        with pytest.raises(Stopped, match=r"suspended process holds its lock.* \d+ on .*; end"):
            operate()
    finally:
        child.communicate()


def test_a_write_whose_answer_is_lost_is_our_own(tmp_path, folder, clock, take):
    lost = []

    def lose(operation):
        if operation == "answer" and not lost:
            lost.append(True)
            raise ValueError("UNAVAILABLE: the answer is lost")

    folder.before = lose
    lease = take(epath.Path(tmp_path))
    assert lost and lease.is_held()
    lease.release()


# --- Records and checkpoints --------------------------------------------------------------------

# config.json, checkpoints/, the file of records and their last step; whether it starts. A run waits
# for its first checkpoint, here after 10 steps.
STATES = [
    ("new", False, False, None, True),
    ("killed before its first checkpoint", True, True, ("metrics", 10), True),
    ("checkpoints/ is removed", True, False, ("metrics", 4), False),
    ("the folders below it are removed", True, True, ("metrics", 11), False),
    ("only evaluations are left", True, False, ("eval", 4), False),
    ("records of another run", False, True, ("metrics", 4), False),
    ("nothing to lose", True, False, None, True),
    ("the newest is left", True, "5", ("metrics", 11), True),
    ("all were set aside", True, "5.damaged", ("metrics", 11), False),
]


def small_spec():
    return Spec(checkpoint_every=10)


@pytest.mark.parametrize(
    ("has_config", "folder", "records", "starts"),
    [state[1:] for state in STATES],
    ids=[state[0] for state in STATES],
)
def test_records_that_no_checkpoint_explains_are_kept(
    tmp_path, has_config, folder, records, starts
):
    if has_config:
        write_config(epath.Path(tmp_path), small_spec())
    if folder:
        (tmp_path / "checkpoints").mkdir()
    if isinstance(folder, str):
        (tmp_path / "checkpoints" / folder).mkdir()
    if records:
        name, last = records
        write_lines(tmp_path / f"{name}.jsonl", [{"step": 1}, {"step": last}])
    outcome = contextlib.nullcontext()
    if not starts:
        outcome = pytest.raises(UsageError, match=f"{tmp_path}: .*step {last}.*; .*move it away")
    for _ in range(2):  # a start that is refused changes nothing for the next
        with outcome, open_workdir(epath.Path(tmp_path), small_spec()):
            pass
    if records:
        assert len(read_lines(tmp_path / f"{name}.jsonl")) == 2


@pytest.mark.parametrize("ends_by", [None, Stopped("SIGTERM")])
def test_a_lease_tells_the_next_training_of_the_newest_checkpoint(place, ends_by):
    """So that records up to the first checkpoint are kept where checkpoints/ was emptied since."""
    write_config(place, small_spec())
    with contextlib.suppress(Stopped), open_workdir(place, small_spec()) as lease:
        (place / "metrics.jsonl").write_text(json.dumps({"step": 10}))
        save_checkpoints(place, small_spec(), {10: {"a": np.zeros(2)}})
        if ends_by:
            raise ends_by
    assert lease.saved == 10
    (place / "checkpoints").rmtree()
    (place / "checkpoints").mkdir()
    for _ in range(2):
        with (
            pytest.raises(UsageError, match="has records up to step 10, and no checkpoint"),
            open_workdir(place, small_spec()),
        ):
            pass


@pytest.mark.parametrize(("last", "starts"), [(10, True), (11, False)])
def test_records_in_a_bucket_that_no_checkpoint_explains_are_kept(bucket, last, starts):
    place = epath.Path(bucket)
    write_config(place, small_spec())
    (place / "metrics.jsonl").write_text(json.dumps({"step": last}))
    outcome = contextlib.nullcontext() if starts else pytest.raises(UsageError, match=bucket)
    for _ in range(2):
        with outcome, open_workdir(place, small_spec()):
            pass


def test_a_run_that_was_begun_while_this_start_waited_is_left_alone(tmp_path, monkeypatch):
    workdir = epath.Path(tmp_path / "run")
    acquire = Lease.acquire

    def wait(self, on_loss):
        write_config(workdir, Spec(seed=9))
        acquire(self, on_loss)

    monkeypatch.setattr(Lease, "acquire", wait)
    with (
        pytest.raises(UsageError, match=r"holds a run of another config \(.*seed"),
        open_workdir(workdir, Spec()),
    ):
        pass
    assert read_config(workdir).seed == 9


def test_a_folder_that_is_removed_again_does_not_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_lib, "RENEW_SECONDS", 0.01)
    workdir = epath.Path(tmp_path / "run")
    rmtree = type(workdir).rmtree

    def slow_rmtree(path, **options):
        rmtree(path, **options)
        time.sleep(0.2)

    monkeypatch.setattr(type(workdir), "rmtree", slow_rmtree)
    with pytest.raises(UsageError, match="no device"), open_workdir(workdir, Spec()):
        raise UsageError("no device")
    assert not workdir.exists()


# --- Trainings ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_trainings_at_once_are_one(start_command, tmp_path):
    arguments = [CONFIG, f"--workdir={tmp_path}", LOG]
    patch = QUICK + SLOW_STEPS
    both = [start_command("prope.train", *arguments, patch=patch) for _ in range(2)]
    outcomes = sorted(map(finish, both), key=lambda outcome: outcome.code)
    assert [outcome.code for outcome in outcomes] == [0, 76], outcomes
    assert "another training is at work" in outcomes[1].stderr.splitlines()[-1]
    steps = [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, 21))
    assert outcomes[0].result["loss"] == read_lines(tmp_path / "metrics.jsonl")[-1]["loss"]
