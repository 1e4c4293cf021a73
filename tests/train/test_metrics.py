"""Records that cannot be written never end a run, and are written when they can be."""

import errno
import math
import os
import threading
import time
from concurrent import futures

import numpy as np
import pytest
from etils import epath
from support.runs import make_run
from support.text import read_lines
from tensorboardX.proto.event_pb2 import Event

from prope import sharding
from prope.data.mixture import open_windows
from prope.errors import warn_if_unwritten
from prope.inference import losses
from prope.runtime import files
from prope.runtime.files import append_jsonl
from prope.spec.run import Spec
from prope.workdir import metrics
from prope.workdir.metrics import RecordFiles


@pytest.fixture(params=["local", "url"])
def place(request, tmp_path):
    return epath.Path(tmp_path if request.param == "local" else request.getfixturevalue("bucket"))


def scalars(folder) -> dict[tuple[str, int], float]:
    """The numbers in all event files of a folder, by tag and step."""
    found = {}
    for path in sorted(folder.iterdir()):
        if "tfevents" not in path.name:
            continue
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            for value in event.summary.value:
                found[value.tag, event.step] = value.simple_value
    return found


def test_records_and_events_are_written(place):
    with RecordFiles(place, 0, None) as records:
        for step in (1, 2):
            records.write("metrics.jsonl", "train", {"step": step, "loss": float(step), "x": "y"})
    assert [record["loss"] for record in read_lines(place / "metrics.jsonl")] == [1.0, 2.0]
    assert scalars(place) == {("train/loss", 1): 1.0, ("train/loss", 2): 2.0}


def test_steps_that_are_logged_and_skipped_steps_which_all_are(tmp_path):
    spec = Spec(num_steps=10, log_every=3, on_nonfinite="skip")
    with metrics.MetricWriter(spec, epath.Path(tmp_path), 0, 10, 1e6, None) as writer:
        for step in range(1, 11):
            loss = math.nan if step in (3, 5, 6) else step
            values = {"loss": np.float32(loss), "grad_norm": np.float32(1)}
            writer.step(step, values | {"batch_hash": np.uint32(step)})
        with writer.pause():
            pass
    logged = [(r["step"], r["loss"]) for r in read_lines(tmp_path / "metrics.jsonl")]
    assert logged == [(1, 1), (9, 9), (10, 10)]
    skipped = [(r["step"], r["in_a_row"]) for r in read_lines(tmp_path / "skips.jsonl")]
    assert skipped == [(3, 1), (5, 1), (6, 2)]


ERRORS = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    TimeoutError("the bucket does not answer"),
    ValueError("UNAVAILABLE: the bucket refuses"),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("what", ["records", "events"])
def test_a_failure_to_write_is_told_once_and_made_up_for(place, error, what, monkeypatch, caplog):
    fails = [True]
    append = metrics.append_jsonl
    flush = metrics.EventFiles.flush

    def broken(*arguments):
        if fails[0]:
            raise error
        return (append if what == "records" else flush)(*arguments)

    owner, name = (metrics, "append_jsonl") if what == "records" else (metrics.EventFiles, "flush")
    monkeypatch.setattr(owner, name, broken)
    with RecordFiles(place, 0, None) as records:
        for step in (1, 2, 3):
            records.write("metrics.jsonl", "train", {"step": step, "loss": 0.5})
            records.flush(10.0)
        fails[0] = False
        records.write("eval.jsonl", "eval", {"step": 3, "loss": 0.25})
    assert caplog.text.count("records cannot be written") == 1
    assert [record["step"] for record in read_lines(place / "metrics.jsonl")] == [1, 2, 3]
    assert [record["step"] for record in read_lines(place / "eval.jsonl")] == [3]
    assert len(scalars(place)) == 4


def test_a_resumed_run_drops_the_records_of_the_steps_that_it_repeats(place):
    """And no others; an evaluation that was given up at its last step is made up for."""
    names = ("metrics.jsonl", "eval.jsonl", "skips.jsonl")
    with RecordFiles(place, 0, None) as records:
        for step in (1, 2, 3):
            for name in names:
                records.write(name, "", {"step": step, "of": "first"})
    with RecordFiles(place, 2, None) as records:
        records.write("eval.jsonl", "eval", {"step": 2, "of": "second"})
    first = [{"step": 1, "of": "first"}, {"step": 2, "of": "first"}]
    for name in names:
        more = [{"step": 2, "of": "second"}] if name == "eval.jsonl" else []
        assert read_lines(place / name) == first + more


def test_records_that_are_lost_in_the_end_are_counted(place, monkeypatch, caplog):
    def broken(*_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(metrics, "append_jsonl", broken)
    with RecordFiles(place, 0, None) as records:
        records.write("metrics.jsonl", "train", {"step": 1})
        records.write("metrics.jsonl", "train", {"step": 2})
    assert "2 records could not be written and are lost" in caplog.text


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_file_that_training_can_do_without_ends_no_run(tmp_path, error, caplog):
    with warn_if_unwritten(tmp_path / "eval/9"):
        raise error
    assert len(caplog.records) == 1 and "eval/9: not written: " in caplog.text
    with pytest.raises(KeyError), warn_if_unwritten(tmp_path):
        raise KeyError("a mistake of the program")


def test_sums_that_cannot_be_written_end_an_evaluation_and_no_training(
    tmp_path, monkeypatch, caplog
):
    spec, params = make_run(tmp_path / "run")
    spec = spec.replace({"data.dataset": "synthetic/copy"})
    windows = open_windows(spec.data, spec.model.vocab_size, "validation")
    evaluation = losses.LossEvaluation(spec, windows, losses.select(windows, 1))
    mesh = sharding.make_mesh()

    def evaluate(step):
        folder = epath.Path(tmp_path / "run/eval") / str(step)
        return evaluation.evaluate(params, mesh, folder, writing=warn_if_unwritten)

    for number, error in enumerate(ERRORS, 1):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(losses.paired, "write_atomic", fail)
        assert evaluate(number)["windows"] == 1
        assert caplog.text.count(": not written: ") == number
        assert f"eval/{number}: not written: " in caplog.text
    with pytest.raises(type(error)):
        evaluation.evaluate(params, mesh, tmp_path / "eval")
    monkeypatch.setattr(losses.paired, "write_atomic", lambda *_: {}["a mistake of the program"])
    with pytest.raises(KeyError):
        evaluate(9)


def test_a_mistake_of_the_program_is_not_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "append_jsonl", lambda *_: {}["x"])
    with pytest.raises(KeyError), RecordFiles(epath.Path(tmp_path), 0, None) as records:
        records.write("metrics.jsonl", "train", {"step": 1})


def test_a_line_of_which_the_disk_takes_a_part_is_taken_back(tmp_path, monkeypatch):
    path = epath.Path(tmp_path) / "metrics.jsonl"
    append_jsonl(path, {"step": 1})
    open_file = open

    class Full:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self._file.close()

        def write(self, data):
            return self._file.write(data[:5])

    with monkeypatch.context() as patch:
        patch.setattr(files, "open", lambda *a, **k: Full(open_file(*a, **k)), raising=False)
        with pytest.raises(OSError, match="No space left"):
            append_jsonl(path, {"step": 2})
    assert read_lines(path) == [{"step": 1}]


def test_a_large_event_file_of_a_bucket_is_followed_by_another(bucket, monkeypatch):
    monkeypatch.setattr(metrics, "_SMALL_BYTES", 300)
    uploaded = []
    upload = metrics.upload

    def count(folder, target):
        uploaded.append(sum(path.stat().length for path in folder.iterdir()))
        upload(folder, target)

    monkeypatch.setattr(metrics, "upload", count)
    place = epath.Path(bucket)
    with RecordFiles(place, 0, None) as records:
        for step in range(1, 31):
            records.write("metrics.jsonl", "train", {"step": step, "loss": float(step)})
            records.flush(10.0)
    assert scalars(place) == {("train/loss", step): float(step) for step in range(1, 31)}
    assert len([path for path in place.iterdir() if "tfevents" in path.name]) > 3
    assert max(uploaded) < 500, "no file is uploaded whole again and again"


def test_the_larger_the_files_the_more_seldom_they_are_written(bucket, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    written = []
    append = metrics.append_jsonl
    monkeypatch.setattr(
        metrics, "append_jsonl", lambda path, *new: (written.append(clock[0]), append(path, *new))
    )
    with RecordFiles(epath.Path(bucket), 0, None) as records:
        for size in (0, 10 * 2**20):
            records._num_bytes = size
            for _ in range(20):
                clock[0] += 31
                records.write("metrics.jsonl", "train", {"step": 1})
                records._upload and records._upload.result()
    assert len([at for at in written if at <= 20 * 31]) >= 19
    assert len([at for at in written if at > 20 * 31]) <= 4


# --- The time of a step ---------------------------------------------------------------------------


class OnDevice:
    """A number that a device has not computed yet; whoever asks for it waits."""

    def __init__(self):
        self.ready = threading.Event()

    def block_until_ready(self):
        self.ready.wait()
        return self

    def __float__(self):
        return float(self.block_until_ready() is not None)

    def __int__(self):
        return int(float(self))


SECONDS = [0.4, 0.05, 0.25, 0.05]  # of the steps


@pytest.mark.parametrize("dispatch", ["returns at once", "waits for the step"])
@pytest.mark.parametrize("slow_batch", [None, 1, 3])
def test_a_steps_time_and_wait_are_its_own(tmp_path, dispatch, slow_batch):
    """Whatever dispatch does, and where a batch is waited for while no step is computed."""
    spec = Spec(log_every=1, num_steps=len(SECONDS))
    with metrics.MetricWriter(spec, epath.Path(tmp_path), 0, 1, 1e9, None) as first:
        number = np.float32(1)  # its imports take long
        first.step(1, {"loss": number, "grad_norm": number, "batch_hash": number})
        with first.pause():
            pass
    with (
        futures.ThreadPoolExecutor(1) as device,
        metrics.MetricWriter(spec, epath.Path(tmp_path), 0, len(SECONDS), 1e9, None) as writer,
    ):
        ends = [time.perf_counter()]
        for step, seconds in enumerate(SECONDS, 1):
            with writer.waiting_for_data():
                time.sleep(0.3 if step == slow_batch else 0)
            value = OnDevice()

            def compute(value=value, seconds=seconds):
                time.sleep(seconds)
                ends.append(time.perf_counter())
                value.ready.set()

            computed = device.submit(compute)
            if dispatch == "waits for the step" or slow_batch == step + 1:
                computed.result()
            writer.step(step, {"loss": value, "grad_norm": value, "batch_hash": value})
        with writer.pause():
            time.sleep(0.3)
    records = read_lines(tmp_path / "metrics.jsonl")
    found = [record["step_seconds"] for record in records]
    # Half of the 0.3 seconds that a wrong count would add or leave out.
    assert found == pytest.approx(np.diff(ends).tolist(), abs=0.15)
    tokens = spec.batch_size * spec.data.seq_len
    speeds = [record["tokens_per_second"] for record in records]
    assert speeds == pytest.approx([tokens / seconds for seconds in found])
    waits = [record["data_wait_ms"] > 250 for record in records]
    assert waits == [step == slow_batch for step in range(1, 5)]
