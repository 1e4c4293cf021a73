"""Trains a p-RoPE decoder, or resumes a run.

    python -m prope.train --config=configs/quickstart.py --workdir=runs/quickstart

Rerun the same command to resume from the last checkpoint. Batches, initial weights and updates are
functions of the config alone, so an interrupted run ends as an uninterrupted one does.

With --init_from=W training begins with the parameters of the run W, or of an import, and a new
optimizer, from step 0. The run is evaluated before its first step, and so is the model as it was:
the record "init_from". Where the config has another encoding, the model is converted to it at once.

Several processes train one run where the environment says so (prope/runtime/processes.py). Exit
codes: 0 done; 1 the run failed; 2 invalid input; 75 stopped on request, with everything saved; 76
stuck, another process is gone, the storage has failed, or another training is at work on the run;
130 Ctrl-C. After 75, 76 or a kill the same command goes on.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict

from prope import command


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_config()
    command.define_place("workdir", "directory of the run: created, or resumed")
    command.define_place(
        "init_from", "start from the parameters of the run in this directory; recorded for reruns"
    )
    stop = "save and stop after this step, as an interrupted run would; rerun to resume"
    flags.DEFINE_integer("stop_at_step", None, stop, lower_bound=1)
    flags.mark_flags_as_required(["config", "workdir"])


if __name__ == "__main__":  # before JAX is imported, so that --help answers at once
    command.prepare(define_flags, __doc__)

import jax
from etils import epath

from prope import sharding
from prope.cost.flops import model_flops_per_token, peak_flops
from prope.data.mixture import open_windows
from prope.data.windows import Windows, prefetch, train_batch
from prope.encodings import describe
from prope.errors import UsageError, log, warn_if_unwritten
from prope.inference.losses import LossEvaluation
from prope.inference.paired import sums_folder
from prope.optimizer import warmup_steps
from prope.runtime.environment import check_environment
from prope.runtime.files import as_path
from prope.runtime.memory import check_activations, check_memory
from prope.runtime.processes import call_on_first, check_count, is_first, leave, raise_on_all
from prope.runtime.profiler import Profiler
from prope.runtime.progress import compiling
from prope.runtime.session import Session
from prope.runtime.validate import validate, validate_devices
from prope.stack import parameters
from prope.step import Prepared, compile_step, init_state, prepare, resolve_attention
from prope.workdir.checkpoints import Checkpoints, newest_undamaged
from prope.workdir.hashes import hash_arrays
from prope.workdir.metrics import MetricWriter
from prope.workdir.reader import CheckpointReader
from prope.workdir.records import UNCONVERTED
from prope.workdir.run import Run, check_disk, check_same, open_workdir, write_config
from prope.workdir.source import config_before, open_source, read_params, record_source

_MEMORY_ADVICE = (
    "lower config.batch_size or config.data.seq_len, raise config.accumulation, or set "
    "config.model.remat=full; python -m prope.plan computes what fits"
)


class State(NamedTuple):
    """What training starts from; `step` is the last one that is done."""

    step: int
    params: Any
    opt_state: Any
    init_hash: str


def train(
    config: ConfigDict, workdir: str, init_from: str | None = None, stop_at_step: int | None = None
) -> dict | None:
    """Trains the run in `workdir` up to its last step, or to `stop_at_step`.

    Returns:
      What the command prints; None in all processes but the first.

    Raises:
      UsageError: invalid input; before a device is touched wherever that is possible.
      RunFailed: a loss or a gradient was not finite; the disk is full; the storage has failed.
      Stopped: the run was asked to stop, and everything is saved; or another process is gone.
    """
    check_environment()
    validate(config)
    with Session(config) as session:
        run = Training(session, config, as_path("--workdir", workdir), init_from)
        params, opt_state = run.restore(stop_at_step)
        first = run.start + 1
        for step, batch in enumerate(run.batches(), first):
            if step == first:  # invalid data has failed by now, before a long compilation
                train_step = run.compile()
            params, opt_state, metrics = run.profiler.run(
                step, train_step, params, opt_state, batch
            )
            run.writer.step(step, metrics)
            if step == first:
                session.first_step(step, metrics)
            run.checkpoints.check()
            if session.poll(f"step {step}") and run.is_due(step, config.eval_every):
                run.evaluate(step, params)
            if run.is_due(step, config.checkpoint_every) or session.wants_save:
                run.save(step, params, opt_state)
            session.stop_if_requested(step)
    return run.writer.summary(run.init_hash) if is_first() else None


class Training:
    """A run that is trained: its data, devices and files, and what the loop does with them.

    `restore` opens the files, and comes before all other methods.
    """

    def __init__(
        self, session: Session, config: ConfigDict, path: epath.Path, init_from: str | None
    ):
        """Opens the run's directory and data, then the devices; checks memory and disk."""
        self.session = session
        self.config = config
        self.path = path
        with raise_on_all():
            stop = session.interrupts.ask_to_stop
            self.lease = session.enter_context(open_workdir(path, config, stop))
        self.source = open_source(config, path, init_from)
        with raise_on_all():  # processes wait for one another here
            vocab_size = config.model.vocab_size
            self.windows = open_windows(config.data, vocab_size, "train")
            validation = open_windows(config.data, vocab_size, "validation")
        with raise_on_all():
            check_count()
            validate_devices(config, jax.devices())
            check_activations(config, _MEMORY_ADVICE)
            self.prepared = prepare(config, jax.devices())
        self.evaluation = LossEvaluation(self.prepared.config, validation)
        session.attach(path, self.prepared.mesh)
        with raise_on_all():
            self.check_disk()
            log_run(config, self.windows)

    def restore(self, stop_at_step: int | None) -> tuple:
        """Returns (params, opt_state) to start from; opens the run's files for writing.

        A run that ended without the evaluation of its last step is evaluated first.
        """
        config = self.config
        session = self.session
        self.checkpoints = session.enter_context(Checkpoints(self.path, config.checkpoint))
        self.start, params, opt_state, self.init_hash = start_or_resume(
            config, self.checkpoints, self.source, self.prepared, self.windows
        )
        self.saved = self.start
        with raise_on_all():
            if is_first():
                if self.source and self.start == 0:
                    record_source(self.path, self.source)
                write_config(self.path, config)
        _log_warmup(config)
        self.stop = max(self.start, min(config.num_steps, stop_at_step or config.num_steps))
        flops = model_flops_per_token(config.model, config.data.seq_len)
        peak = peak_flops(jax.devices()[0].device_kind)
        writer = MetricWriter(config, self.path, self.start, self.stop, flops, peak, self.lease)
        self.writer = session.enter_context(writer)
        profiler = Profiler(config.profile, self.path, writer.pause)
        self.profiler = session.enter_context(profiler)
        if self.start == 0:
            log.info("init_hash %s", self.init_hash)
        if (self.start or self.source) and self.is_due(self.start, config.eval_every):
            self.evaluate_start(params)
        return params, opt_state

    def evaluate_start(self, params) -> None:
        """Evaluates the step to start from, as far as it has no records.

        Before the first update, a run that begins from another encoding is evaluated with that too.
        """
        encodings = [None]
        if self.start == 0 and config_before(self.config, self.source).model != self.config.model:
            encodings = [UNCONVERTED, None]
        for encoding in encodings:
            evaluated = functools.partial(self.writer.evaluated, self.start, encoding)
            if call_on_first(evaluated) is None:
                self.evaluate(self.start, params, encoding)

    def batches(self) -> Iterator[dict]:
        """Yields the global batches of the steps after `start`, read some steps ahead.

        Each process reads its rows only.
        """
        config = self.config
        mesh = self.prepared.mesh
        rows = sharding.rows_of_this_process(mesh, config.batch_size)

        def read(step: int) -> dict:
            return train_batch(self.windows, config.seed, config.batch_size, step, rows)

        local_batches = prefetch(read, self.start, self.stop)
        for _ in range(self.start, self.stop):
            with self.writer.waiting_for_data():
                batch = next(local_batches)
            yield sharding.global_batch(mesh, batch, config.batch_size)

    def compile(self) -> Callable:
        """Compiles the training step; from then on a signal saves before it stops the run."""
        local_config, mesh, optimizer, state = self.prepared
        with self.writer.pause(), compiling():
            step = compile_step(local_config, optimizer, mesh, state)
            check_memory(step, _MEMORY_ADVICE)
        self.session.interrupts.training = True
        return step

    def is_due(self, step: int, every: int) -> bool:
        """Tells whether something is done after this step: every so often, and after the last."""
        return step == self.stop or step % every == 0

    def evaluate(self, step: int, params, encoding: str | None = None) -> None:
        """Evaluates; a request to stop ends it, and the resumed run then evaluates this step.

        `encoding` is UNCONVERTED for that of the run that this one begins from, None for its own.
        """
        progress = f"a part of the evaluation of step {step}"
        go_on = functools.partial(self.session.poll, progress)
        # As `prope.evaluate` describes encodings that are not the run's own.
        fields = {"encoding": encoding, "factor": 1.0} if encoding else {}
        folder = sums_folder(self.path, {"step": step} | fields)
        evaluation = self.evaluation
        if encoding == UNCONVERTED:
            before = config_before(self.config, self.source)
            before = resolve_attention(before, jax.devices()[0])
            evaluation = LossEvaluation(before, evaluation.windows)
        mesh = self.prepared.mesh
        with self.writer.pause():
            record = evaluation.evaluate(params, mesh, folder, go_on, warn_if_unwritten)
            if record is not None:
                self.writer.evaluation(step, record | fields)

    def save(self, step: int, params, opt_state) -> None:
        """Starts saving a checkpoint."""
        identity = {"config": self.config.to_dict(), "init_hash": self.init_hash}
        data = data_state(self.config, self.windows, step)
        with self.writer.pause():
            with raise_on_all():
                self.check_disk()  # again: disks fill up while runs go on
            call_on_first(lambda: self.lease.check())  # which only the first one has
            self.checkpoints.save(step, params, opt_state, identity, data)
            if self.lease:  # the save before this one is complete, and the first one is waited for
                self.lease.saved = self.saved or step
            self.saved = step
            self.session.interrupts.saved()

    def check_disk(self) -> None:
        """Raises UsageError where the disk has no room for a checkpoint."""
        leaves = jax.tree.leaves(self.prepared.state)
        check_disk(self.path, sum(leaf.size * leaf.dtype.itemsize for leaf in leaves))


def log_run(config: ConfigDict, windows: Windows) -> None:
    """Logs the devices, the model's size and encoding, and the data, in one line."""
    log.info(
        "%d x %s; %s parameters; %s (p = %s); %s windows of %d tokens of %s",
        jax.device_count(),
        jax.devices()[0].device_kind,
        f"{parameters.count(config.model):,}",
        describe(config.model),
        config.model.rope_percentage,
        f"{windows.count:,}",
        config.data.seq_len,
        config.data.dataset,
    )


def data_state(config: ConfigDict, windows: Windows, step: int) -> dict:
    """Returns what identifies the training data, and the position in it after `step` updates."""
    return {
        "fingerprint": windows.store.fingerprint,
        "seed": config.seed,
        "seq_len": config.data.seq_len,
        "examples": step * config.batch_size,
    }


def start_or_resume(
    config: ConfigDict,
    checkpoints: Checkpoints,
    source: Run | None,
    prepared: Prepared,
    windows: Windows,
) -> State:
    """Returns the state to start from, the first of these that there is:

    1. the run's newest checkpoint: the run was stopped and goes on;
    2. the parameters of `source`, the run that --init_from names, or named when this run was begun,
       with a new optimizer, from step 0;
    3. from scratch.
    """
    if checkpoints.steps():
        return resume(config, checkpoints, prepared, windows)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, prepared.state)
    if source is not None:
        params = read_params(source, prepared.state[0])
        init = jax.jit(prepared.optimizer.init, out_shardings=shardings[1])
        return State(0, params, init(params), hash_arrays(params))
    init = functools.partial(init_state, config, prepared.optimizer)
    params, opt_state = jax.jit(init, out_shardings=shardings)()
    return State(0, params, opt_state, hash_arrays(params))


def resume(
    config: ConfigDict, checkpoints: Checkpoints, prepared: Prepared, windows: Windows
) -> State:
    """Restores the newest undamaged checkpoint; sets aside damaged ones."""

    def read(step: int) -> State:
        if step == 0:
            problem = "holds an imported checkpoint, without optimizer state"
            remedy = "start from it in another --workdir, with --init_from naming this one"
            raise UsageError(f"--workdir={checkpoints.directory.parent}: {problem}: {remedy}")
        reader = CheckpointReader(checkpoints.directory / str(step))
        check_same(config, reader.config, f"checkpoint {step} is of another config")
        expected = data_state(config, windows, step)
        if reader.data != expected:
            other = f"was trained on other data ({reader.data}, now {expected})"
            changed = "the documents, the tokenizer, the split or how text is read have changed"
            remedy = "bring the old data or code back, or start in a new --workdir"
            raise UsageError(f"checkpoint {step} {other}: {changed}; {remedy}")
        params, opt_state = prepared.state
        arrays = reader.restore(params=params, opt_state=opt_state)
        return State(step, arrays["params"], arrays["opt_state"], reader.init_hash)

    steps = checkpoints.steps()
    step, state = newest_undamaged(checkpoints.directory, steps[::-1], read)
    for damaged in steps[steps.index(step) + 1 :]:
        checkpoints.set_aside(damaged)
    log.info("resumed from step %d", step)
    return state


def _log_warmup(config: ConfigDict) -> None:
    """Logs the steps of warmup where the run is too short for the config's."""
    asked = config.optimizer.warmup_steps
    warmup = warmup_steps(config)
    if warmup != asked:
        text = "optimizer.warmup_steps=%d in a run of %d steps: warmup takes %d"
        log.info(text, asked, config.num_steps, warmup)


def main() -> dict | None:
    """Trains; returns what the command prints."""
    values = flags.FLAGS
    return train(values.config, values.workdir, values.init_from, values.stop_at_step)


if __name__ == "__main__":
    command.run(main, define_flags, leave)
