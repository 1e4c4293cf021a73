"""What a run says while it runs: metrics.jsonl and eval.jsonl, TensorBoard events, and the terminal."""

import contextlib
import json
import logging
import math
import pathlib
import sys
import time

import jax
from ml_collections import ConfigDict
from tensorboardX import SummaryWriter
from tqdm import tqdm

from prope.errors import RunFailed
from prope.optimizer import learning_rate
from prope.runtime.files import write_atomic
from prope.workdir.records import append_jsonl, read_jsonl

log = logging.getLogger("prope")


class Metrics:
    """Writes a run's metrics to its directory and shows them: a bar on a terminal, plain lines in a log.

    A step's numbers are fetched from the device after the next step is on its way. Steps that a killed run had
    logged after its last checkpoint are done again, so their lines are dropped at the start.
    """

    def __init__(self, config: ConfigDict, workdir: pathlib.Path, start: int, stop: int, writes: bool = True):
        """`writes` is False in all processes of a run but one."""
        self._config, self._workdir, self._start, self._stop, self._writes = config, workdir, start, stop, writes
        for name in ("metrics.jsonl", "eval.jsonl") if writes else ():
            kept = [record for record in read_jsonl(workdir / name) if record["step"] <= start]
            write_atomic(workdir / name, "".join(json.dumps(record) + "\n" for record in kept))
        self._events = SummaryWriter(str(workdir), purge_step=start + 1) if writes and start < stop else None
        self._bar = tqdm(total=stop, initial=start, unit="step", disable=not (writes and sys.stderr.isatty()))
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._began = time.perf_counter()
        self._data_wait = 0.0
        self._logged = (start, 0.0, 0.0)  # step, seconds of training, seconds of waiting for data

    @contextlib.contextmanager
    def waiting_for_data(self):
        """Time that a batch was waited for."""
        before = time.perf_counter()
        yield
        self._data_wait += time.perf_counter() - before

    @contextlib.contextmanager
    def pause(self):
        """Reports what is pending; then time that is not training: evaluation, saving."""
        self._report()
        before = time.perf_counter()
        yield
        self._began += time.perf_counter() - before

    def step(self, step: int, values: dict[str, jax.Array]) -> None:
        """Takes the metrics of a step that was just dispatched; reports those of the step before.

        Raises:
          RunFailed: the loss or the gradient of the step before was not finite.
        """
        self._report()
        self._pending = (step, values)

    def evaluation(self, record: dict) -> None:
        """Keeps and shows an evaluation."""
        self._keep("eval.jsonl", "eval", record)
        self.say(
            f"step {record['step']}: validation loss {record['loss']:.4f}, perplexity {record['perplexity']:.3f}, "
            f"{record['bits_per_byte']:.4f} bits per byte (unigram: {record['unigram_bits_per_byte']:.4f})"
        )

    def say(self, line: str) -> None:
        """Shows a line: above the bar, or in the log."""
        if self._bar.disable:
            log.info(line)
        else:
            self._bar.write(line, file=sys.stderr)

    def evaluated(self, about: dict) -> dict | None:
        """The newest evaluation with these values in it."""
        records = [r for r in read_jsonl(self._workdir / "eval.jsonl") if about.items() <= r.items()]
        return records[-1] if records else None

    def last(self, name: str) -> float | None:
        """A metric of the last logged step; None where metrics.jsonl was removed."""
        records = read_jsonl(self._workdir / "metrics.jsonl")
        return records[-1][name] if records else None

    def tokens_per_second(self) -> float | None:
        """Over all the steps of this start; where it made none, what the last logged step says."""
        step, seconds, _ = self._logged
        return self._tokens(step - self._start) / seconds if seconds else self.last("tokens_per_second")

    def close(self) -> None:
        """Ends the bar and the event file."""
        self._bar.close()
        if self._events:
            self._events.close()

    def _report(self) -> None:
        if self._pending is None:
            return
        (step, values), self._pending = self._pending, None
        batch_hash = f"{int(values.pop('batch_hash')):08x}"
        values = {name: float(value) for name, value in values.items()}
        if not all(map(math.isfinite, values.values())):
            raise RunFailed(
                f"step {step} has loss {values['loss']} and grad_norm {values['grad_norm']}; the earlier checkpoints "
                f"in {self._workdir} are good. Lower config.optimizer.learning_rate (now "
                f"{self._config.optimizer.learning_rate}) and start in a new --workdir"
            )
        self._bar.update(step - self._bar.n)
        if step % self._config.log_every and step not in (1, self._stop):
            return
        seconds = time.perf_counter() - self._began
        last, then, waited = self._logged
        self._logged = (step, seconds, self._data_wait)
        record = {
            "step": step,
            **values,
            "batch_hash": batch_hash,
            "learning_rate": float(learning_rate(self._config)(step - 1)),
            "tokens_per_second": self._tokens(step - last) / (seconds - then),
            "data_wait_ms": 1000 * (self._data_wait - waited) / (step - last),
        }
        self._keep("metrics.jsonl", "train", record)
        speed = f"{record['tokens_per_second']:,.0f} tokens/s"
        self._bar.set_postfix_str(f"loss {values['loss']:.4f}, {speed}")
        if self._bar.disable:
            left = tqdm.format_interval((self._stop - step) * seconds / (step - self._start))
            log.info("step %d/%d: loss %.4f, %s, %s left", step, self._stop, values["loss"], speed, left)

    def _tokens(self, steps: int) -> int:
        return steps * self._config.batch_size * self._config.data.seq_len

    def _keep(self, name: str, tag: str, record: dict) -> None:
        if not self._writes:
            return
        append_jsonl(self._workdir / name, record)
        for key, value in record.items():
            if self._events and key != "step" and isinstance(value, int | float):
                self._events.add_scalar(f"{tag}/{key}", value, record["step"])
