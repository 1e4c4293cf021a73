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

import contextlib
import functools
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

from prope import parameters, sharding
from prope.config import resolve
from prope.cost.flops import find_chip, model_flops_per_token
from prope.data.mixture import open_windows
from prope.data.windows import Windows, prefetch, train_batch
from prope.encodings import turning_share
from prope.errors import UsageError, log, warn_if_unwritten
from prope.inference.losses import LossEvaluation
from prope.inference.paired import sums_folder
from prope.optimizer import check_extension, decay_begin, warmup_steps
from prope.runtime import watchdog
from prope.runtime.environment import check_environment
from prope.runtime.files import append_jsonl, as_path
from prope.runtime.interrupts import Interrupts
from prope.runtime.memory import check_memory
from prope.runtime.processes import (
    call_on_first,
    check_count,
    check_shared,
    is_first,
    joined,
    leave,
    raise_on_all,
)
from prope.runtime.profiler import Profiler
from prope.runtime.progress import compiling
from prope.runtime.startup import Startup
from prope.spec.run import Spec
from prope.step import Prepared, compile_step, init_state, prepare, resolve_attention
from prope.workdir.checkpoints import Checkpoints, newest_undamaged
from prope.workdir.hashes import hash_arrays
from prope.workdir.logs import check_log_to
from prope.workdir.metrics import MetricWriter
from prope.workdir.reader import CheckpointReader
from prope.workdir.records import UNCONVERTED
from prope.workdir.run import Run, check_disk, check_same, open_workdir, write_config
from prope.workdir.source import open_source, record_source, spec_before

_MEMORY_ADVICE = (
    "lower config.batch_size or config.data.seq_len, raise config.accumulation, or set "
    "config.model.remat=full; python -m prope.plan computes what fits"
)


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
    spec = resolve(config)
    path = as_path("--workdir", workdir)
    startup = Startup()
    # What is opened is closed in the opposite order; then a process waits for the others.
    with contextlib.ExitStack() as opened:
        interrupts = opened.enter_context(Interrupts(spec.checkpoint.every_minutes))
        opened.enter_context(watchdog.watching(spec.watchdog_minutes))
        opened.enter_context(joined())

        # The directory, the data, the devices. Invalid input of one process ends all.
        call_on_first(lambda: check_log_to(spec))
        with raise_on_all():
            lease = opened.enter_context(open_workdir(path, spec, interrupts.ask_to_stop))
        source = open_source(spec, path, init_from)
        with raise_on_all():  # processes wait for one another here
            windows = open_windows(spec.data, spec.model.vocab_size, "train")
            validation = open_windows(spec.data, spec.model.vocab_size, "validation")
        with raise_on_all():
            check_count()
            sharding.check_devices(spec, jax.devices())
            prepared = prepare(spec, jax.devices())
        local_spec, mesh, optimizer, state = prepared
        check_shared(path)
        startup.use_cache()
        interrupts.vote_over(mesh)
        with raise_on_all():
            _check_room(path, state)
            _log_run(spec, windows)

        # The state to start from, and the files to write.
        stable = decay_begin(spec)  # a longer run may go on from there
        checkpoints = opened.enter_context(Checkpoints(path, spec.checkpoint, stable))
        start, params, opt_state, init_hash = start_or_resume(
            spec, checkpoints, source, prepared, windows
        )
        with raise_on_all():
            if is_first():
                if source and start == 0:
                    record_source(path, source)
                write_config(path, spec)
        stop = max(start, min(spec.num_steps, stop_at_step or spec.num_steps))
        flops = model_flops_per_token(spec.model, spec.data.seq_len)
        chip = find_chip(jax.devices()[0].device_kind)
        writer = MetricWriter(spec, path, start, stop, flops, chip and chip.flops, lease)
        opened.enter_context(writer)
        profiler = opened.enter_context(Profiler(spec.profile, path, writer.pause))
        if start == 0:
            log.info("init_hash %s", init_hash)
        last_saved = start

        def go_on(progress: str) -> bool:
            """Reports progress; returns False, in all processes, once a stop is asked for."""
            watchdog.alive(progress)
            interrupts.poll()
            return not interrupts.should_stop

        def is_due(step: int, every: int) -> bool:
            """Returns whether something is done after a step: so often, and after the last."""
            return step == stop or step % every == 0

        def evaluate(step, params, evaluation, encoding: str | None = None) -> None:
            """Evaluates; a request to stop ends it, and the resumed run evaluates this step."""
            # As `prope.evaluate` describes encodings that are not the run's own.
            fields = {"encoding": encoding, "factor": 1.0} if encoding else {}
            folder = sums_folder(path, {"step": step} | fields)
            ask = functools.partial(go_on, f"a part of the evaluation of step {step}")
            with writer.pause():
                record = evaluation.evaluate(params, mesh, folder, ask, warn_if_unwritten)
                if record is not None:
                    writer.evaluation(step, record | fields)

        evaluation = LossEvaluation(local_spec, validation)
        if (start or source) and is_due(start, spec.eval_every):
            # If the source has another encoding, step 0 is also evaluated with that one.
            before = spec if start else spec_before(spec, source)
            if before != spec and not _is_evaluated(writer, start, UNCONVERTED):
                before = resolve_attention(before, jax.devices()[0])
                evaluate(start, params, LossEvaluation(before, validation), UNCONVERTED)
            if not _is_evaluated(writer, start):
                evaluate(start, params, evaluation)

        rows = sharding.rows_of_this_process(mesh, spec.batch_size)
        read = functools.partial(train_batch, windows, spec.seed, spec.batch_size, rows=rows)
        batches = prefetch(read, start, stop)
        for step in range(start + 1, stop + 1):
            with writer.waiting_for_data():
                batch = next(batches)
            batch = sharding.global_batch(mesh, batch, spec.batch_size)
            if step == start + 1:  # invalid data has failed by now, before a long compilation
                with writer.pause(), compiling():
                    train_step = compile_step(local_spec, optimizer, mesh, state)
                    check_memory(train_step, _MEMORY_ADVICE)
                interrupts.training = True  # from now on a signal saves before it stops the run
            params, opt_state, metrics = profiler.run(step, train_step, params, opt_state, batch)
            writer.step(step, metrics)
            if step == start + 1:
                jax.block_until_ready(metrics)
                _record_start(path, startup, step)
            checkpoints.check()
            if go_on(f"step {step}") and is_due(step, spec.eval_every):
                evaluate(step, params, evaluation)
            if is_due(step, spec.checkpoint_every) or step == stable or interrupts.wants_save:
                with writer.pause():
                    with raise_on_all():
                        _check_room(path, state)  # disks fill up while runs go on
                    call_on_first(lambda: lease.check())  # which only the first one has
                    identity = {"config": spec.to_dict(), "init_hash": init_hash}
                    data = data_state(spec, windows, step)
                    checkpoints.save(step, params, opt_state, identity, data)
                    if lease:  # the save before this one is complete
                        lease.saved = last_saved or step
                    last_saved = step
                    interrupts.saved()
            interrupts.stop_if_requested(f"step {step} of {spec.num_steps} is saved")
    return writer.summary(init_hash) if is_first() else None


def _is_evaluated(writer: MetricWriter, step: int, encoding: str | None = None) -> bool:
    """Returns, in all processes, whether a step has a record of this encoding."""
    return call_on_first(lambda: writer.evaluated(step, encoding) is not None)


def _check_room(path: epath.Path, state) -> None:
    """Raises UsageError where the disk has no room for a checkpoint."""
    leaves = jax.tree.leaves(state)
    check_disk(path, sum(leaf.size * leaf.dtype.itemsize for leaf in leaves))


def _record_start(path: epath.Path, startup: Startup, step: int) -> None:
    """Adds this start to starts.jsonl, once its first step is done."""
    if is_first():
        record = startup.record(step)
        with warn_if_unwritten(path / "starts.jsonl"):
            append_jsonl(path / "starts.jsonl", record)


def _log_run(spec: Spec, windows: Windows) -> None:
    """Logs devices, size, encoding and data in a line; and warmup that the run is too short for."""
    rotation = spec.model.describe_rotation()
    if rotation.startswith("p-RoPE") and spec.model.rope_scaling_type == "none":
        p_star = turning_share(spec.data.seq_len, spec.model.max_wavelength)
        turning = f"pairs up to p = {min(max(p_star, 0), 1):.2f} complete a turn within a window"
        rotation += f" (p = {spec.model.rope_percentage}; {turning})"
    log.info(
        "%d x %s; %s parameters; %s; %s windows of %d tokens of %s",
        jax.device_count(),
        jax.devices()[0].device_kind,
        f"{parameters.count(spec.model):,}",
        rotation,
        f"{windows.count:,}",
        spec.data.seq_len,
        spec.data.dataset,
    )
    asked = spec.optimizer.warmup_steps
    warmup = warmup_steps(spec)
    if warmup != asked:
        text = "optimizer.warmup_steps=%d in a run of %d steps: warmup takes %d"
        log.info(text, asked, spec.num_steps, warmup)


class State(NamedTuple):
    """What training starts from; `step` is the last one that is done."""

    step: int
    params: Any
    opt_state: Any
    init_hash: str


def data_state(spec: Spec, windows: Windows, step: int) -> dict:
    """Returns what identifies the training data, and the position in it after `step` updates."""
    return {
        "fingerprint": windows.store.fingerprint,
        "seed": spec.seed,
        "seq_len": spec.data.seq_len,
        "examples": step * spec.batch_size,
    }


def start_or_resume(
    spec: Spec, checkpoints: Checkpoints, source: Run | None, prepared: Prepared, windows: Windows
) -> State:
    """Returns the state to start from, the first of these that there is:

    1. the run's newest checkpoint: the run was stopped and goes on;
    2. the parameters of `source`, the run that --init_from names, or named when this run was begun,
       with a new optimizer, from step 0;
    3. from scratch.
    """
    if checkpoints.steps():
        return resume(spec, checkpoints, prepared, windows)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, prepared.state)
    if source is not None:
        _, params = source.restore_newest_valid(lambda run: run.params(prepared.state[0]))
        init = jax.jit(prepared.optimizer.init, out_shardings=shardings[1])
        return State(0, params, init(params), hash_arrays(params))
    init = functools.partial(init_state, spec, prepared.optimizer)
    params, opt_state = jax.jit(init, out_shardings=shardings)()
    return State(0, params, opt_state, hash_arrays(params))


def resume(spec: Spec, checkpoints: Checkpoints, prepared: Prepared, windows: Windows) -> State:
    """Restores the newest undamaged checkpoint; sets aside damaged ones."""

    def read(step: int) -> State:
        if step == 0:
            problem = "holds an imported checkpoint, without optimizer state"
            remedy = "start from it in another --workdir, with --init_from naming this one"
            raise UsageError(f"--workdir={checkpoints.directory.parent}: {problem}: {remedy}")
        reader = CheckpointReader(checkpoints.directory / str(step))
        check_same(spec, reader.spec, f"checkpoint {step} is of another config")
        check_extension(spec, reader.spec, step)
        expected = data_state(spec, windows, step)
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


def main() -> dict | None:
    """Trains; returns what the command prints."""
    values = flags.FLAGS
    return train(values.config, values.workdir, values.init_from, values.stop_at_step)


if __name__ == "__main__":
    command.run(main, define_flags, leave)
