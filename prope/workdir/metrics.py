"""Writes a run's metrics to metrics.jsonl, eval.jsonl, skips.jsonl, TensorBoard and the terminal."""

import collections
import contextlib
import json
import math
import sys
import tempfile
import time

import jax
from etils import epath
from ml_collections import ConfigDict
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from prope.errors import RunFailed, log
from prope.optimizer import learning_rate
from prope.runtime import processes
from prope.runtime.files import append_jsonl, is_url, upload, write_atomic
from prope.workdir.records import evaluations_of_training, find_evaluation, read_jsonl

_URL_SECONDS = 30.0  # between writes to a URL, where a file cannot grow; a checkpoint or an evaluation writes too
_MAX_SKIPS = (
    10  # steps in a row whose loss or gradient is not finite, with config.on_nonfinite=skip
)


class MetricWriter(contextlib.ExitStack):
    """Writes metrics to files, in the first process only, and shows them: a bar on a terminal, lines in a log.

    The metrics of a step are fetched from the device after the next step was dispatched. A resumed run repeats the
    steps after its last checkpoint, so their lines are dropped at the start.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: epath.Path,
        start: int,
        stop: int,
        model_flops_per_token: float,
        peak_flops: float | None,
    ):
        """Opens the files for steps start + 1 .. stop; `peak_flops`, of a device, may be unknown: None."""
        super().__init__()
        self._model_flops_per_token, self._peak_flops = model_flops_per_token, peak_flops
        self._config, self._workdir, self._start, self._stop = config, workdir, start, stop
        self._step_tokens = config.batch_size * config.data.seq_len
        self._writes = processes.is_first()
        for name in ("metrics.jsonl", "eval.jsonl", "skips.jsonl") if self._writes else ():
            kept = [record for record in read_jsonl(workdir / name) if record["step"] <= start]
            write_atomic(workdir / name, "".join(json.dumps(record) + "\n" for record in kept))
        self._unwritten: dict[str, list[dict]] = collections.defaultdict(list)  # by file
        self._written_at = time.monotonic()
        self._events, self._scratch = None, None
        if self._writes and start < stop:
            if is_url(workdir):
                self._scratch = epath.Path(self.enter_context(tempfile.TemporaryDirectory()))
                self.callback(self._flush)
            self._events = self.enter_context(_open_events(self._scratch or workdir, start + 1))
        shown = self._writes and sys.stderr.isatty()
        self._bar = self.enter_context(
            tqdm(total=stop, initial=start, unit="step", disable=not shown)
        )
        if shown:
            self.enter_context(logging_redirect_tqdm([log]))  # lines stand above the bar
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._began = time.perf_counter()
        self._data_wait = 0.0
        last_skip = next(reversed(read_jsonl(workdir / "skips.jsonl")), {"step": None})
        in_a_row = last_skip["in_a_row"] if last_skip["step"] == start else 0
        self._skips_in_a_row = processes.broadcast_from_first(in_a_row)
        self._logged = (start, 0.0, 0.0)  # step, seconds of training, seconds of waiting for data

    @contextlib.contextmanager
    def waiting_for_data(self):
        """Measures how long the loop waits for a batch."""
        before = time.perf_counter()
        yield
        self._data_wait += time.perf_counter() - before

    @contextlib.contextmanager
    def pause(self):
        """Reports the pending step; excludes what follows, such as an evaluation, from the time of training."""
        self._report()
        before = time.perf_counter()
        self._flush()
        yield
        self._began += time.perf_counter() - before

    def step(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of a step that was just dispatched; reports the step before.

        Raises RunFailed where the loss or the gradient of that step was not finite, and it may not be skipped.
        """
        self._report()
        self._pending = (step, metrics)

    def evaluation(self, step: int, record: dict) -> None:
        """Writes and shows an evaluation."""
        data, windows = self._config.data, self._config.eval.max_windows
        identity = {
            "step": step,
            "dataset": data.dataset,
            "seq_len": data.seq_len,
            "max_windows": windows,
        }
        self._write("eval.jsonl", "eval", identity | record)
        figures = (
            record[name]
            for name in ("loss", "perplexity", "bits_per_byte", "unigram_bits_per_byte")
        )
        log.info(
            "step %d: validation loss %.4f, perplexity %.3f, %.4f bits per byte (unigram: %.4f)",
            step,
            *figures,
        )

    def evaluated(self, step: int) -> dict | None:
        """Returns the newest evaluation of `step` on this config's validation windows; None if there is none."""
        records = evaluations_of_training(
            read_jsonl(self._workdir / "eval.jsonl"), self._config, step
        )
        return find_evaluation(records, max_windows=self._config.eval.max_windows)

    def summary(self, init_hash: str) -> dict:
        """Returns what the command prints; `loss` is None where metrics.jsonl was removed."""
        evaluation, records = (
            self.evaluated(self._stop),
            read_jsonl(self._workdir / "metrics.jsonl"),
        )
        last = records[-1] if records else {"loss": None, "tokens_per_second": None}
        step, seconds, _ = self._logged
        # Over all steps of this start; where it made none, of the last logged step.
        speed = (
            (step - self._start) * self._step_tokens / seconds
            if seconds
            else last["tokens_per_second"]
        )
        return {
            "step": self._stop,
            "loss": last["loss"],
            "eval_loss": evaluation["loss"],
            **{
                name: evaluation[name]
                for name in ("perplexity", "bits_per_byte", "unigram_bits_per_byte")
            },
            "rope_percentage": self._config.model.rope_percentage,
            "init_hash": init_hash,
            "tokens_per_second": speed,
            "skipped_steps": len(read_jsonl(self._workdir / "skips.jsonl")),
            "workdir": str(self._workdir),
        }

    def _report(self) -> None:
        if self._pending is None:
            return
        (step, arrays), self._pending = self._pending, None
        batch_hash = f"{int(arrays.pop('batch_hash')):08x}"
        metrics = {name: float(value) for name, value in arrays.items()}
        if not all(map(math.isfinite, metrics.values())):
            self._skip(step, metrics)
            return
        self._skips_in_a_row = 0
        self._bar.update(step - self._bar.n)
        if step % self._config.log_every and step not in (1, self._stop):
            return
        seconds = time.perf_counter() - self._began
        last, last_seconds, last_wait = self._logged
        step_seconds = (seconds - last_seconds) / (step - last)
        model_flops = (
            self._model_flops_per_token * self._step_tokens / step_seconds / jax.device_count()
        )
        memory = jax.local_devices()[0].memory_stats() or {}
        self._logged = (step, seconds, self._data_wait)
        record = {
            "step": step,
            **metrics,
            "batch_hash": batch_hash,
            "learning_rate": float(learning_rate(self._config)(step - 1)),
            "step_seconds": step_seconds,
            "tokens_per_second": self._step_tokens / step_seconds,
            "model_tflops_per_second_per_device": model_flops / 1e12,
            "mfu": model_flops / self._peak_flops if self._peak_flops else None,
            "memory_bytes": memory.get("bytes_in_use"),
            "peak_memory_bytes": memory.get("peak_bytes_in_use"),
            "data_wait_ms": 1000 * (self._data_wait - last_wait) / (step - last),
        }
        self._write("metrics.jsonl", "train", record)
        speed = _describe_speed(record)
        self._bar.set_postfix_str(f"loss {metrics['loss']:.4f}, {speed}")
        if self._bar.disable:
            left = tqdm.format_interval((self._stop - step) * seconds / (step - self._start))
            log.info(
                "step %d/%d: loss %.4f, %s, %s left", step, self._stop, metrics["loss"], speed, left
            )

    def _skip(self, step: int, metrics: dict[str, float]) -> None:
        """Records a step that was not finite and so changed nothing, or raises RunFailed."""
        self._skips_in_a_row += 1
        values = f"step {step} has loss {metrics['loss']} and grad_norm {metrics['grad_norm']}"
        remedy = (
            f"Lower config.optimizer.learning_rate (now {self._config.optimizer.learning_rate})"
        )
        if self._config.on_nonfinite == "stop":
            start = f"{remedy} and start in a new --workdir, or go on here with --config.on_nonfinite=skip"
            raise RunFailed(
                f"{values}; the earlier checkpoints in {self._workdir} are good. {start}"
            )
        if self._skips_in_a_row == _MAX_SKIPS:
            last = f"the last of {_MAX_SKIPS} skipped in a row"
            raise RunFailed(f"{values}, {last}. {remedy} and start in a new --workdir")
        log.info("%s: skipped, %d in a row", values, self._skips_in_a_row)
        numbers = {name: str(value) for name, value in metrics.items()}  # JSON has no nan
        self._write(
            "skips.jsonl", "skips", {"step": step, "in_a_row": self._skips_in_a_row, **numbers}
        )

    def _write(self, name: str, tag: str, record: dict) -> None:
        if not self._writes:
            return
        self._unwritten[name].append(record)
        for key, value in record.items():
            if self._events and key != "step" and isinstance(value, int | float):
                self._events.add_scalar(f"{tag}/{key}", value, record["step"])
        if not is_url(self._workdir) or time.monotonic() - self._written_at > _URL_SECONDS:
            self._flush()

    def _flush(self) -> None:
        """Writes the records since the last call; at a URL every file is written anew."""
        for name, records in self._unwritten.items():
            append_jsonl(self._workdir / name, *records)
        self._unwritten.clear()
        if self._scratch:
            self._events.flush()
            upload(self._scratch, self._workdir)
        self._written_at = time.monotonic()


def _describe_speed(record: dict) -> str:
    """Formats the figures of a logged step for a terminal; what is not known is left out."""
    figures = {
        "{:,.0f} tokens/s": record["tokens_per_second"],
        "{:.3g} s/step": record["step_seconds"],
        "{:.3g} TFLOP/s/device": record["model_tflops_per_second_per_device"],
        "MFU {:.1%}": record["mfu"],
        "{:.2f} GB": record["memory_bytes"] and record["memory_bytes"] / 1e9,
        "data wait {:.1f} ms": record["data_wait_ms"],
    }
    return ", ".join(text.format(value) for text, value in figures.items() if value is not None)


def _open_events(workdir: epath.Path, first_step: int):
    """Opens a TensorBoard event file that replaces earlier ones from `first_step` on."""
    # tensorboardX imports these where they are installed, which takes seconds; scalars in a local folder need neither.
    absent = [
        name for name in ("torch", "boto3", "google.cloud.storage") if name not in sys.modules
    ]
    sys.modules.update(dict.fromkeys(absent))
    try:
        from tensorboardX import SummaryWriter
    finally:
        for name in absent:
            del sys.modules[name]
    return SummaryWriter(str(workdir), purge_step=first_step)
