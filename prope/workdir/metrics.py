"""Writes metrics to metrics.jsonl, eval.jsonl, skips.jsonl, TensorBoard and the terminal.

`logs.py` has the other places of `config.log_to`.
"""

import contextlib
import importlib
import json
import math
import pathlib
import tempfile
import threading
import time
from concurrent import futures

import jax
from etils import epath
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from prope.errors import RunFailed, first_line, log, to_user_error
from prope.optimizer import learning_rate
from prope.runtime import processes
from prope.runtime.files import append_jsonl, is_url, upload, write_atomic
from prope.runtime.progress import has_bars
from prope.spec.run import Spec
from prope.workdir.lease import Lease
from prope.workdir.logs import CsvFiles, numbers, open_listeners
from prope.workdir.records import find_validation, read_jsonl

_FILES = ("metrics.jsonl", "eval.jsonl", "skips.jsonl")
_URL_SECONDS = 30.0  # between writes to a URL of files up to 1 MiB; pauses write, too
_PAUSE_SECONDS = 10.0  # that an evaluation or a save waits at most for records to be written
_SMALL_BYTES = 2**20  # up to which a file is written anew every time
_MAX_SKIPS = 10  # steps in a row that are not finite, with config.on_nonfinite=skip
_EVALUATION = ("perplexity", "bits_per_byte", "unigram_bits_per_byte")  # printed beside the loss


class RecordFiles(contextlib.ExitStack):
    """Appends records to the files of a run; only the first process does, others ignore them.

    What cannot be written never ends a run: it is kept and tried again, with a warning. At a URL a
    thread writes. Every file is then written anew, the more seldom the larger they are.
    """

    def __init__(
        self, workdir: epath.Path, start: int, lease: Lease | None, spec: Spec | None = None
    ):
        """Drops the records of the steps after `start`, which a resumed run repeats.

        They also go where `spec.log_to` says; without a spec, to TensorBoard.
        """
        super().__init__()
        spec = spec or Spec()
        self._workdir = workdir
        self._lease = lease
        self._writes = processes.is_first()
        # File, tag for TensorBoard, record, and the time when it was made.
        self._unwritten: list[tuple[str, str, dict, float]] = []
        self._lock = threading.Lock()  # of `_unwritten`
        self._events: EventFiles | None = None
        self._csv = CsvFiles(workdir) if "csv" in spec.log_to else None
        self._num_failures = 0
        self._num_bytes = 0  # of the files
        self._written_at = time.monotonic()
        self._upload: futures.Future | None = None
        if not self._writes:
            return
        for name in _FILES:
            kept = [record for record in read_jsonl(workdir / name) if record["step"] <= start]
            content = "".join(json.dumps(record) + "\n" for record in kept)
            self._num_bytes += len(content)
            write_atomic(workdir / name, content)
            if self._csv:
                self._csv.add(name, kept)
        if "tensorboard" in spec.log_to:
            self._events = self.enter_context(EventFiles(workdir, start + 1))
        self._listeners = open_listeners(spec, workdir, self)
        self.callback(self._finish)  # after the thread has ended
        self._pool = self.enter_context(futures.ThreadPoolExecutor(1))

    def write(self, name: str, tag: str, record: dict) -> None:
        """Adds a record to the file `name`, and with `tag` to where else records go."""
        if not self._writes:
            return
        for listener in self._listeners:
            listener({"tag": tag} | record)
        with self._lock:
            self._unwritten.append((name, tag, record, time.time()))
        pause = _URL_SECONDS * max(1.0, self._num_bytes / _SMALL_BYTES)
        if not is_url(self._workdir) or time.monotonic() - self._written_at > pause:
            self.flush()

    def flush(self, wait_seconds: float = 0.0) -> None:
        """Writes the records since the last call; at a URL in a thread, for which it may wait."""
        if not self._writes:
            return
        self._written_at = time.monotonic()
        if not is_url(self._workdir):
            self._write_all()
            return
        if self._upload is None or self._upload.done():
            self._upload = self._pool.submit(self._write_all)
        futures.wait([self._upload], wait_seconds)

    def _finish(self) -> None:
        self._write_all()
        if self._unwritten:
            left = len(self._unwritten)
            log.warning("%s: %d records could not be written and are lost", self._workdir, left)

    def _write_all(self) -> None:
        """Writes what there is, and warns once where that fails."""
        with self._lock:
            unwritten = self._unwritten
            self._unwritten = []
        try:
            if self._lease and not self._lease.is_held():
                return
            for name in _FILES:
                entries = [entry for entry in unwritten if entry[0] == name]
                if not entries:
                    continue
                records = [record for _, _, record, _ in entries]
                append_jsonl(self._workdir / name, *records)
                self._num_bytes += len(json.dumps(records))
                unwritten = [entry for entry in unwritten if entry[0] != name]
                for _, tag, record, made in entries if self._events else ():
                    self._events.add(tag, record, made)
                if self._csv:
                    self._csv.add(name, records)
            if self._events:
                self._events.flush()
        except Exception as error:
            if to_user_error(error) is None:
                raise
            self._num_failures += 1
            if self._num_failures == 1:
                line = "%s: records cannot be written (%s); training goes on, and tries it again"
                log.warning(line, self._workdir, first_line(error))
        with self._lock:
            self._unwritten[:0] = unwritten


class EventFiles(contextlib.AbstractContextManager):
    """Writes numbers for TensorBoard, in files that are complete after some size.

    At a URL they are written on the local disk first. tensorboardX's own SummaryWriter writes in a
    thread that a full disk ends, and then waits for it for ever.
    """

    def __init__(self, workdir: epath.Path, first_step: int):
        """Opens files that replace earlier ones from `first_step` on."""
        self._target = workdir
        self._scratch = tempfile.TemporaryDirectory() if is_url(workdir) else None
        self._folder = pathlib.Path(self._scratch.name if self._scratch else workdir)
        self._first_step = first_step
        self._unwritten: list[tuple[float, int, str, float]] = []  # time, step, tag, value
        self._file = None
        self._number = 0
        # Here, not in a thread: TFDS's lazy imports replace Python's own for all threads meanwhile.
        importlib.import_module("tensorboardX.event_file_writer")

    def add(self, tag: str, record: dict, made: float) -> None:
        """Adds the numbers of a record that was made at a time, in seconds since the epoch."""
        for key, value in numbers(tag, record).items():
            self._unwritten.append((made, record["step"], key, value))

    def flush(self) -> None:
        """Writes what was added."""
        if not self._unwritten:
            return
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        if self._file is None:
            file = EventsWriter(str(self._folder / "events"), f".{self._number}")
            if self._number == 0:
                start = SessionLog(status=SessionLog.START)
                event = Event(wall_time=time.time(), step=self._first_step, session_log=start)
                file.write_event(event)
            self._file = file
            self._number += 1
        while self._unwritten:
            wall_time, step, tag, value = self._unwritten[0]
            event = Event(wall_time=wall_time, step=step, summary=scalar(tag, value))
            self._file.write_event(event)
            self._unwritten.pop(0)
        self._file.flush()
        if self._scratch is None:
            return
        upload(epath.Path(self._folder), self._target)
        (path,) = self._folder.iterdir()
        if path.stat().st_size > _SMALL_BYTES:
            self._file.close()
            self._file = None
            path.unlink()

    def __exit__(self, *error):
        if self._file:
            with contextlib.suppress(OSError):
                self._file.close()
        if self._scratch:
            self._scratch.cleanup()


class MetricWriter(contextlib.ExitStack):
    """Writes metrics to files, and shows them: a bar on a terminal, lines in a log.

    The metrics of a step are fetched from the device after the next step was dispatched, which on
    a CPU may return when that one has ended. So a thread notes when a step ends.
    """

    def __init__(
        self,
        spec: Spec,
        workdir: epath.Path,
        start: int,
        stop: int,
        model_flops_per_token: float,
        peak_flops: float | None,
        lease: Lease | None = None,
    ):
        """Opens the files for steps start + 1 .. stop; `peak_flops` of a device may be unknown.

        Nothing is written once the lease is lost.
        """
        super().__init__()
        self._spec = spec
        self._workdir = workdir
        self._start = start
        self._stop = stop
        self._step_tokens = spec.batch_size * spec.data.seq_len
        self._step_flops = model_flops_per_token * self._step_tokens
        self._peak_flops = peak_flops
        self._rate = learning_rate(spec)
        self._files = self.enter_context(RecordFiles(workdir, start, lease, spec))
        self._skips_in_a_row = processes.call_on_first(lambda: _skips_before(workdir, start))
        show_bar = has_bars()
        form = "{n_fmt}/{total_fmt} |{bar:20}| {remaining} left{postfix}"
        bar = tqdm(total=stop, initial=start, bar_format=form, disable=not show_bar)
        self._bar = self.enter_context(bar)
        if show_bar:
            self.enter_context(logging_redirect_tqdm([log]))  # lines stand above the bar
        # Step, metrics, seconds of waiting for data before it, and when it ends.
        self._pending: tuple[int, dict[str, jax.Array], float, futures.Future] | None = None
        self._began = time.perf_counter()
        self._data_wait = 0.0
        self._logged = (start, 0.0, 0.0)  # step, seconds of training, seconds of waiting for data

    @contextlib.contextmanager
    def waiting_for_data(self):
        """Measures how long the loop waits for a batch."""
        before = time.perf_counter()
        yield
        self._data_wait += time.perf_counter() - before

    @contextlib.contextmanager
    def pause(self):
        """Reports the pending step; excludes what follows from the time of training."""
        self._report()
        before = time.perf_counter()
        self._files.flush(_PAUSE_SECONDS)
        yield
        self._began += time.perf_counter() - before

    def step(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of a step that was just dispatched; reports the step before.

        Raises RunFailed where the loss or the gradient of that step was not finite, and it may not
        be skipped.
        """
        self._report()
        end = futures.Future()
        threading.Thread(target=_note_end, args=(metrics, end), daemon=True).start()
        self._pending = (step, metrics, self._data_wait, end)

    def evaluation(self, step: int, record: dict) -> None:
        """Writes and shows an evaluation."""
        identity = {
            "step": step,
            "dataset": self._spec.data.dataset,
            "seq_len": self._spec.data.seq_len,
            "max_windows": self._spec.eval.max_windows,
        }
        encoding = record.get("encoding")
        tag = f"eval/{encoding}" if encoding else "eval"
        self._files.write("eval.jsonl", tag, identity | record)
        names = ("loss", *_EVALUATION)
        shown = [f"{name} {record[name]:.4f}" for name in names if record[name] is not None]
        which = f" with the encoding {encoding}" if encoding else ""
        losses = ", ".join(shown) or "without a predicted token"
        log.info("step %d: validation%s %s", step, which, losses)

    def evaluated(self, step: int, encoding: str | None = None) -> dict | None:
        """Returns the newest evaluation of `step` on this config's validation windows, if any."""
        records = read_jsonl(self._workdir / "eval.jsonl")
        return find_validation(records, self._spec, step, encoding)

    def summary(self, init_hash: str) -> dict:
        """Returns what the command prints; what the last step has no record of is None."""
        evaluation = self.evaluated(self._stop) or {}
        records = read_jsonl(self._workdir / "metrics.jsonl")
        last = {record["step"]: record for record in records}.get(self._stop, {})
        step, seconds, _ = self._logged
        speed = last.get("tokens_per_second")
        if seconds:  # over all steps of this start
            speed = (step - self._start) * self._step_tokens / seconds
        return {
            "step": self._stop,
            "loss": last.get("loss"),
            "eval_loss": evaluation.get("loss"),
            **{name: evaluation.get(name) for name in _EVALUATION},
            "rope_percentage": self._spec.model.rope_percentage,
            "init_hash": init_hash,
            "tokens_per_second": speed,
            "skipped_steps": len(read_jsonl(self._workdir / "skips.jsonl")),
            "workdir": str(self._workdir),
        }

    def _report(self) -> None:
        """Fetches the metrics of the pending step; writes and shows those to be logged."""
        if self._pending is None:
            return
        step, arrays, data_wait, end = self._pending
        self._pending = None
        batch_hash = f"{int(arrays.pop('batch_hash')):08x}"
        metrics = {name: float(value) for name, value in arrays.items()}
        if not all(map(math.isfinite, metrics.values())):
            self._skip(step, metrics)
            return
        self._skips_in_a_row = 0
        self._bar.update(step - self._bar.n)
        if step % self._spec.log_every and step not in (1, self._stop):
            return
        record = {"step": step, **metrics, "batch_hash": batch_hash}
        record["learning_rate"] = float(self._rate(step - 1))
        record |= self._measure_speed(step, end.result() - self._began, data_wait)
        self._files.write("metrics.jsonl", "train", record)
        self._show(record)

    def _measure_speed(self, step: int, seconds: float, data_wait: float) -> dict:
        """Measures speed since the last logged step, and memory; what is not known is None."""
        last, last_seconds, last_wait = self._logged
        self._logged = (step, seconds, data_wait)
        step_seconds = (seconds - last_seconds) / (step - last)
        flops_per_device = self._step_flops / step_seconds / jax.device_count()
        memory = jax.local_devices()[0].memory_stats() or {}
        return {
            "step_seconds": step_seconds,
            "tokens_per_second": self._step_tokens / step_seconds,
            "model_tflops_per_second_per_device": flops_per_device / 1e12,
            "mfu": flops_per_device / self._peak_flops if self._peak_flops else None,
            "memory_bytes": memory.get("bytes_in_use"),
            "peak_memory_bytes": memory.get("peak_bytes_in_use"),
            "data_wait_ms": 1000 * (data_wait - last_wait) / (step - last),
        }

    def _show(self, record: dict) -> None:
        """Shows a logged step on the terminal or in the log."""
        memory = record["memory_bytes"]
        figures = {
            "{:,.0f} tokens/s": record["tokens_per_second"],
            "{:.3g} s/step": record["step_seconds"],
            "{:.3g} TFLOP/s/device": record["model_tflops_per_second_per_device"],
            "MFU {:.1%}": record["mfu"],
            "{:.2f} GB": memory and memory / 1e9,
            "data wait {:.1f} ms": record["data_wait_ms"],
        }
        known = [text.format(value) for text, value in figures.items() if value is not None]
        speed = ", ".join(known)
        loss = record["loss"]
        self._bar.set_postfix_str(f"loss {loss:.4f}, {speed}")
        if self._bar.disable:
            step, seconds, _ = self._logged
            left = tqdm.format_interval((self._stop - step) * seconds / (step - self._start))
            line = "step %d/%d: loss %.4f, %s, %s left"
            log.info(line, step, self._stop, loss, speed, left)

    def _skip(self, step: int, metrics: dict[str, float]) -> None:
        """Records a step that was not finite and so changed nothing, or raises RunFailed."""
        self._skips_in_a_row += 1
        values = f"step {step} has loss {metrics['loss']} and grad_norm {metrics['grad_norm']}"
        rate = self._spec.optimizer.learning_rate
        lower = f"Lower config.optimizer.learning_rate (now {rate}) and start in a new --workdir"
        if self._spec.on_nonfinite == "stop":
            kept = f"checkpoints of earlier steps in {self._workdir}, if any, are good"
            go_on = "or go on here with --config.on_nonfinite=skip"
            raise RunFailed(f"{values}; {kept}. {lower}, {go_on}")
        if self._skips_in_a_row == _MAX_SKIPS:
            raise RunFailed(f"{values}, the last of {_MAX_SKIPS} skipped in a row. {lower}")
        log.info("%s: skipped, %d in a row", values, self._skips_in_a_row)
        record = {"step": step, "in_a_row": self._skips_in_a_row}
        record |= {name: str(value) for name, value in metrics.items()}  # JSON has no nan
        self._files.write("skips.jsonl", "skips", record)


def _note_end(metrics: dict[str, jax.Array], end: futures.Future) -> None:
    """Waits for a step's metrics, and tells the time; an error is left to who fetches them."""
    with contextlib.suppress(Exception):
        jax.block_until_ready(metrics)
    end.set_result(time.perf_counter())


def _skips_before(workdir: epath.Path, step: int) -> int:
    """Counts the skipped steps in a row that end with `step`."""
    skips = read_jsonl(workdir / "skips.jsonl")
    return skips[-1]["in_a_row"] if skips and skips[-1]["step"] == step else 0
