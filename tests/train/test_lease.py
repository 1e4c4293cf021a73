"""One training at a time writes a run; records that no checkpoint explains are kept."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable

import pytest
from etils import epath
from support.commands import CONFIG, finish
from support.text import read_lines, write_lines

from prope import train
from prope.config import default_config
from prope.errors import RunFailed, Stopped, StorageFailed, UsageError, to_user_error
from prope.runtime import files
from prope.workdir import lease as lease_lib
from prope.workdir.lease import Lease, LeaseLost
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


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    """Ends the threads of the leases of a test."""
    begun = []
    acquire = Lease.acquire

    def record(lease, *arguments):
        begun.append(lease)
        return acquire(lease, *arguments)

    monkeypatch.setattr(Lease, "acquire", record)
    yield
    for lease in begun:
        lease._has_ended.set()


@pytest.fixture(params=["local", "url"])
def place(request, tmp_path, monkeypatch):
    monkeypatch.setattr(lease_lib, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(lease_lib, "EXPIRE_SECONDS", 2.0)
    return epath.Path(tmp_path if request.param == "local" else request.getfixturevalue("bucket"))


def nothing() -> None:
    pass


def holder_elsewhere(**fields) -> dict:
    return {"host": "another", "boot": "1", "pid": 1, "started": "1", "id": "0"} | fields


def test_one_of_two_trainings_is_refused(place):
    first = Lease(place)
    first.acquire(nothing)
    holder = f"at work there, process {os.getpid()} on .*; end it"
    with pytest.raises(Stopped, match=holder) as refusal:
        Lease(place).acquire(nothing)
    assert refusal.value.code == 76, "a launcher starts it again"
    first.check()
    first.saved = 7
    first.release()
    second = Lease(place)
    second.acquire(nothing)
    assert second.saved == 7, "it learns what the one before has saved"
    second.release()


def test_a_training_that_slept_has_lost_the_run_and_writes_nothing(place):
    lost = []
    first = Lease(place)
    first.acquire(lambda: lost.append(True))
    first._lock.acquire()  # as if its machine were suspended
    second = Lease(place)
    second.acquire(nothing)
    first._lock.release()
    assert not first.is_held()
    with pytest.raises(LeaseLost, match="another training has taken this run over"):
        first.check()
    end = time.monotonic() + 10
    while not lost:
        assert time.monotonic() < end
        time.sleep(0.02)
    first.release()
    assert second.is_held(), "the lost lease is left alone"
    second.release()
    with pytest.raises(LeaseLost):
        first.check()


@pytest.mark.parametrize("ending", ["reaped", "zombie", "other process", "restarted machine"])
def test_a_killed_training_does_not_delay_the_next(place, ending, monkeypatch):
    monkeypatch.setattr(lease_lib, "EXPIRE_SECONDS", 1000.0)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    holder = lease_lib._machine() | {"pid": child.pid, "started": lease_lib._start_of(child.pid)}
    assert not lease_lib._is_gone(holder)
    if ending == "other process":
        holder["started"] = "1"
    if ending == "restarted machine":
        holder["boot"] = "another"
        monkeypatch.setattr(lease_lib, "EXPIRE_SECONDS", 1.0)
    child.kill()
    if ending == "reaped":
        child.wait()
    while lease_lib._start_of(child.pid):
        time.sleep(0.01)
    (place / "lease.json").write_text(json.dumps({"holder": holder, "saved": 3}))
    lease = Lease(place)
    lease.acquire(nothing)
    assert lease.saved == 3
    lease.release()
    child.wait()


def test_a_training_on_a_machine_that_is_gone_is_succeeded_after_a_while(place):
    (place / "lease.json").write_text(json.dumps({"holder": holder_elsewhere()}))
    start = time.monotonic()
    lease = Lease(place)
    lease.acquire(nothing)
    assert time.monotonic() - start > 2.0
    lease.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'"holder"'])
def test_what_is_no_lease_holds_nothing(place, content):
    (place / "lease.json").write_bytes(content)
    lease = Lease(place)
    lease.acquire(nothing)
    (place / "lease.json").unlink()
    lease.check()
    assert lease.is_held(), "where somebody has removed the file, nobody else has taken the run"
    lease.release()


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

    def _write(self, content, if_equal):
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
    monkeypatch.setattr(lease_lib, "kvstore", lambda _: folder)
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
    tmp_path, folder, clock, at, to, renews, succeeds
):
    folder.put(holder_elsewhere(), time=0.0)
    reads = []

    def jump(operation):
        reads.append(operation)
        if len(reads) > 1 and clock[0] >= at and renews and folder.generation == 1:
            folder.put(holder_elsewhere(), time=clock[0])
        if clock[0] >= at:
            clock[0] = max(clock[0], to)

    folder.before = jump
    lease = Lease(epath.Path(tmp_path))
    if succeeds:
        lease.acquire(nothing)
        assert clock[0] > to + lease_lib.EXPIRE_SECONDS
        lease.release()
        return
    with pytest.raises(Stopped, match="another training is at work there"):
        lease.acquire(nothing)


def test_one_that_has_lost_the_run_between_two_reads_does_not_steal_it_back(tmp_path, folder):
    lease = Lease(epath.Path(tmp_path))
    lease.acquire(nothing)
    reads = []

    def take_over(operation):
        reads.append(operation)
        if len(reads) == 2:
            folder.put(holder_elsewhere())

    folder.before = take_over
    with pytest.raises(LeaseLost):
        lease.check()
    assert json.loads(folder.value)["holder"] == holder_elsewhere()
    lease.release()


def test_a_container_of_the_same_machine_is_another_machine(monkeypatch):
    holder = lease_lib._this_process()
    ended = holder | {"started": "1"}
    assert lease_lib._is_gone(ended) and not lease_lib._is_gone(holder)
    assert not lease_lib._is_gone(ended | {"pids": "pid:[1]"}), (
        "its process has another number here"
    )


FAILURES = [
    "INTERNAL: unexpected [http_response_code='500']",
    "PERMISSION_DENIED: no [http_response_code='403']",
    "UNAUTHENTICATED: no [http_response_code='401']",
    "INVALID_ARGUMENT: bad [http_response_code='400']",
    "UNKNOWN: failed [os_error_code='5']",
]


@pytest.mark.parametrize("what", ["acquire", "check"])
@pytest.mark.parametrize("failing", ["read", "write"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_storage_that_fails_is_tried_again_and_then_to_blame(
    tmp_path, folder, clock, what, failing, failure
):
    times = [3]

    def fail(operation):
        if operation == failing and times[0]:
            times[0] -= 1
            raise ValueError(failure)

    lease = Lease(epath.Path(tmp_path))
    if what == "check":
        lease.acquire(nothing)
    operate = {"acquire": lambda: lease.acquire(nothing), "check": lease.check}[what]
    folder.before = fail
    operate()
    assert times == [0] and lease.is_held()
    if what == "acquire":
        lease.release()
    times[0] = 1000
    with pytest.raises(StorageFailed, match="lease.json: .*then run the same command again"):
        operate()


def test_a_full_disk_is_told_at_once(tmp_path, folder, clock):
    lease = Lease(epath.Path(tmp_path))
    lease.acquire(nothing)

    def fail(operation):
        if operation == "write":
            raise ValueError("RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']")

    folder.before = fail
    with pytest.raises(ValueError, match="No space left") as failure:
        lease.check()
    assert to_user_error(failure.value).code == 1 and clock == [0.0]


def test_a_write_whose_answer_is_lost_is_our_own(tmp_path, folder, clock):
    lost = []

    def lose(operation):
        if operation == "answer" and not lost:
            lost.append(True)
            raise ValueError("UNAVAILABLE: the answer is lost")

    folder.before = lose
    lease = Lease(epath.Path(tmp_path))
    lease.acquire(nothing)
    assert lost and lease.is_held()
    lease.release()


# --- Records and checkpoints --------------------------------------------------------------------

# config.json, checkpoints/, the step that the lease knows as saved; records; whether it starts.
STATES = [
    ("new", False, False, 0, "", True),
    ("killed before its first checkpoint", True, True, 0, "metrics", True),
    ("checkpoints/ is removed", True, False, 0, "metrics", False),
    ("the folders below it are removed", True, True, 5, "metrics", False),
    ("only evaluations are left", True, False, 0, "eval", False),
    ("records of another run", False, True, 0, "metrics", False),
    ("nothing to lose", True, False, 5, "", True),
    ("the newest is left", True, "5", 9, "metrics", True),
    ("all were set aside", True, "5.damaged", 5, "metrics", False),
]


@pytest.mark.parametrize(
    ("has_config", "folder", "saved", "records", "starts"),
    [state[1:] for state in STATES],
    ids=[state[0] for state in STATES],
)
def test_records_that_no_checkpoint_explains_are_kept(
    tmp_path, has_config, folder, saved, records, starts
):
    if has_config:
        write_config(epath.Path(tmp_path), default_config())
    if folder:
        (tmp_path / "checkpoints").mkdir()
    if isinstance(folder, str):
        (tmp_path / "checkpoints" / folder).mkdir()
    if records:
        write_lines(tmp_path / f"{records}.jsonl", [{"step": 4}, {"step": 9}])
    (tmp_path / "lease.json").write_text(json.dumps({"holder": None, "saved": saved}))
    refused = "has records up to step 9, and no checkpoint; bring .*; to train anew, move it away"
    if starts:
        with open_workdir(epath.Path(tmp_path), default_config()):
            pass
    else:
        with (
            pytest.raises(UsageError, match=refused),
            open_workdir(epath.Path(tmp_path), default_config()),
        ):
            pass
        assert len(read_lines(tmp_path / f"{records}.jsonl")) == 2


# config.json, whether lease.json is there, the step that it knows as saved; whether it starts.
URL_STATES = [
    ("killed before its first checkpoint", True, 0, True),
    ("checkpoints/ is removed", True, 1, False),
    ("of a version without a lease", False, 0, False),
]


@pytest.mark.parametrize(
    ("has_lease", "saved", "starts"),
    [state[1:] for state in URL_STATES],
    ids=[state[0] for state in URL_STATES],
)
def test_records_in_a_bucket_that_no_checkpoint_explains_are_kept(bucket, has_lease, saved, starts):
    place = epath.Path(bucket)
    write_config(place, default_config())
    (place / "metrics.jsonl").write_text('{"step": 9}\n')
    if has_lease:
        (place / "lease.json").write_text(json.dumps({"holder": None, "saved": saved}))
    refused = pytest.raises(UsageError, match="has records up to step 9, and no checkpoint")
    for _ in range(2):  # a start that is refused changes nothing for the next
        outcome = contextlib.nullcontext() if starts else refused
        with outcome, open_workdir(place, default_config()) as lease:
            assert lease.saved == 0


@pytest.mark.parametrize("ending", [None, Stopped("SIGTERM"), RunFailed("not finite")], ids=repr)
def test_the_newest_checkpoint_is_told_to_the_next_training(tmp_path, ending):
    (tmp_path / "lease.json").write_text(json.dumps({"holder": None, "saved": 5}))
    with (
        contextlib.suppress(Stopped, RunFailed),
        open_workdir(epath.Path(tmp_path), default_config()),
    ):
        assert json.loads((tmp_path / "lease.json").read_text())["holder"]
        (tmp_path / "checkpoints" / "3").mkdir(parents=True)
        if ending:
            raise ending
    saved = 0 if isinstance(ending, RunFailed) else 3
    assert json.loads((tmp_path / "lease.json").read_text())["saved"] == saved


def test_the_first_save_is_known_at_once_and_others_by_the_next(monkeypatch):
    monkeypatch.setattr(train, "data_state", lambda *_: {})
    session = types.SimpleNamespace(
        raise_on_all=contextlib.nullcontext, interrupts=types.SimpleNamespace(saved=nothing)
    )
    run = types.SimpleNamespace(
        config=default_config(),
        init_hash="",
        windows=None,
        session=session,
        writer=types.SimpleNamespace(pause=contextlib.nullcontext),
        check_disk=nothing,
        checkpoints=types.SimpleNamespace(save=lambda *_: None),
        lease=types.SimpleNamespace(check=nothing, saved=0),
        saved=0,
    )
    known = []
    for step in (10, 20, 30):
        train.Training.save(run, step, None, None)
        known.append(run.lease.saved)
    assert known == [10, 10, 20]


def test_a_run_that_was_begun_while_this_start_waited_is_left_alone(tmp_path, monkeypatch):
    workdir = epath.Path(tmp_path / "run")
    acquire = Lease.acquire

    def wait(self, on_loss):
        other = default_config()
        other.seed = 9
        write_config(workdir, other)
        acquire(self, on_loss)

    monkeypatch.setattr(Lease, "acquire", wait)
    with (
        pytest.raises(UsageError, match=r"holds a run of another config \(.*seed"),
        open_workdir(workdir, default_config()),
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
    with pytest.raises(UsageError, match="no device"), open_workdir(workdir, default_config()):
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
    assert "another training is at work there" in outcomes[1].stderr.splitlines()[-1]
    steps = [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, 21))
    assert outcomes[0].result["loss"] == read_lines(tmp_path / "metrics.jsonl")[-1]["loss"]


@pytest.mark.slow
def test_a_suspended_training_that_wakes_changes_nothing(start_command, tmp_path):
    arguments = [CONFIG, f"--workdir={tmp_path}", LOG]
    first = start_command("prope.train", *arguments, patch=QUICK + SLOW_STEPS)
    first.wait_for("step 3/20")
    first.signal(signal.SIGSTOP)
    second = finish(start_command("prope.train", *arguments, patch=QUICK))
    assert second.code == 0, second.stderr
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    first.signal(signal.SIGCONT)
    outcome = finish(first)
    assert outcome.code == 1
    assert outcome.stderr.splitlines()[-1].startswith("stopped: --workdir=")
    assert "another training has taken this run over" in outcome.stderr.splitlines()[-1]
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")} == before
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["10", "20"]
