"""Trains a p-RoPE decoder, or resumes a run.

    python -m prope.train --config=configs/quickstart.py --workdir=runs/quickstart

Rerun the same command to resume from the last checkpoint. Batches, initial weights and updates are functions of the
config alone, so an interrupted run ends as an uninterrupted one does.

Several processes train one run where the environment says so (prope/runtime/processes.py). Exit codes: 0 done; 1 the
run failed; 2 invalid input; 75 stopped on request, with everything saved; 76 stuck, or another process is gone; 130
Ctrl-C. After 75, 76 or a kill the same command goes on.
"""

import functools
from collections.abc import Iterator

from absl import flags
from ml_collections import ConfigDict, config_flags

from prope import command


def define_flags() -> None:
    """Defines the command's flags."""
    config_flags.DEFINE_config_file(
        "config", None, "the run's config file, such as configs/quickstart.py"
    )
    flags.DEFINE_string("workdir", None, "directory of the run: created, or resumed")
    flags.DEFINE_string("init_from", None, "start from the parameters of the run in this directory")
    stop = "save and stop after this step, as an interrupted run would; rerun to resume"
    flags.DEFINE_integer("stop_at_step", None, stop, lower_bound=1)
    flags.mark_flags_as_required(["config", "workdir"])


if __name__ == "__main__":  # before JAX is imported, so that --help answers at once
    command.prepare(define_flags, __doc__)

import jax

from prope import sharding
from prope.config import MAY_CHANGE, flat
from prope.cost.flops import model_flops_per_token, num_parameters, peak_flops
from prope.data.mixture import open_windows
from prope.data.windows import Windows, prefetch, train_batch
from prope.encodings import FIELDS, describe
from prope.errors import UsageError, log
from prope.inference.losses import LossEvaluation
from prope.runtime.files import as_path
from prope.runtime.memory import check_activations, check_memory
from prope.runtime.processes import (
    broadcast_from_first,
    check_count,
    is_first,
    joined,
    leave,
    raise_on_all,
)
from prope.runtime.profiler import Profiler
from prope.runtime.session import Session
from prope.runtime.validate import validate, validate_devices
from prope.step import compile_step, init_state, prepare
from prope.workdir.checkpoints import Checkpoints, newest_undamaged
from prope.workdir.hashes import hash_arrays
from prope.workdir.metrics import MetricWriter
from prope.workdir.reader import CheckpointReader
from prope.workdir.run import check_disk, check_same, open_run, open_workdir, write_config

_LESS_MEMORY = (  # remedy
    "lower config.batch_size or config.data.seq_len, raise config.accumulation, or set config.model.remat=full; "
    "python -m prope.plan computes what fits"
)


def train(
    config: ConfigDict, workdir: str, init_from: str | None = None, stop_at_step: int | None = None
) -> dict | None:
    """Trains the run in `workdir` up to its last step, or to `stop_at_step`.

    Returns:
      What the command prints; None in all processes but the first.

    Raises:
      UsageError: invalid input; before a device is touched wherever that is possible.
      RunFailed: a loss or a gradient was not finite.
      Stopped: the run was asked to stop, and everything is saved; or another process is gone.
    """
    validate(config)
    path = as_path("workdir", workdir)
    with Session(config) as session:
        session.enter_context(joined())  # which waits for all at the end
        session.startup.mark("processes")
        with raise_on_all():
            session.enter_context(open_workdir(path, config))
        with raise_on_all():  # apart: opening windows has processes wait for one another
            with session.watchdog.paused():  # text is tokenized on first use, maybe for an hour
                windows = open_windows(config.data, config.model.vocab_size, "train")
                validation = open_windows(config.data, config.model.vocab_size, "validation")
            session.startup.mark("data")
            check_count()
            validate_devices(config, jax.devices())
            check_activations(config, _LESS_MEMORY)
            local_config, mesh, optimizer, state = prepare(config, jax.devices())
        session.attach(path, mesh)
        size = sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
        )  # of a checkpoint, in bytes
        with raise_on_all():
            check_disk(path, size)
        log_run(config, state[0], windows)
        session.startup.mark("devices")

        checkpoints = session.enter_context(Checkpoints(path, config.checkpoint))
        start, params, opt_state, init_hash = start_or_resume(
            config, checkpoints, init_from, optimizer, state, windows
        )
        with raise_on_all():
            if is_first():
                write_config(path, config)
        session.startup.mark("restore" if start else "weights")
        stop = max(start, min(config.num_steps, stop_at_step or config.num_steps))
        costs = (
            model_flops_per_token(config.model, config.data.seq_len),
            peak_flops(jax.devices()[0].device_kind),
        )
        writer = session.enter_context(MetricWriter(config, path, start, stop, *costs))
        profiler = session.enter_context(Profiler(config.profile, path, writer.pause))
        evaluation = LossEvaluation(local_config, validation)

        def evaluate(step: int) -> None:
            """Evaluates; a request to stop ends it half-way, and the resumed run makes up for it."""
            with writer.pause():
                go_on = functools.partial(session.poll, f"a part of the evaluation of step {step}")
                if (
                    record := evaluation.evaluate(params, mesh, path / "eval" / str(step), go_on)
                ) is not None:
                    writer.evaluation(step, record)

        def save(step: int) -> None:
            with writer.pause():
                with raise_on_all():
                    check_disk(path, size)  # again: disks fill up while runs go on
                identity = {"config": config.to_dict(), "init_hash": init_hash}
                checkpoints.save(
                    step, params, opt_state, identity, data_state(config, windows, step)
                )
                session.interrupts.saved()

        def due(step: int, every: int) -> bool:
            return step == stop or step % every == 0

        if start == 0:
            log.info("init_hash %s", init_hash)
        elif broadcast_from_first(
            due(start, config.eval_every) and writer.evaluated(start) is None
        ):
            evaluate(start)
        session.startup.mark("evaluation")
        for step, batch in enumerate(
            batches(config, windows, mesh, start, stop, writer), start + 1
        ):
            if step == start + 1:  # invalid data has failed by now, before a long compilation
                session.startup.mark("first batch")
                with writer.pause():
                    train_step = compile_step(local_config, optimizer, mesh, state)
                    check_memory(train_step, _LESS_MEMORY)
                session.startup.mark("compile")
                session.interrupts.training = True  # from now on a signal saves before it stops
            params, opt_state, metrics = profiler.run(step, train_step, params, opt_state, batch)
            writer.step(step, metrics)
            if step == start + 1:
                session.first_step(step, metrics)
            checkpoints.check()
            if session.poll(f"step {step}") and due(step, config.eval_every):
                evaluate(step)
            if (
                due(step, config.checkpoint_every) or session.interrupts.request
            ):  # any; to stop needs a save, too
                save(step)
            session.stop_if_requested(step)
    return writer.summary(init_hash) if is_first() else None


def log_run(config: ConfigDict, params, windows: Windows) -> None:
    """Logs the devices, the model's size and encoding, and the data, in one line."""
    log.info(
        "%d x %s; %s parameters; %s (p = %s); %s windows of %d tokens of %s",
        jax.device_count(),
        jax.devices()[0].device_kind,
        f"{num_parameters(params):,}",
        describe(config.model),
        config.model.rope_percentage,
        f"{windows.count:,}",
        config.data.seq_len,
        config.data.dataset,
    )


def data_state(config: ConfigDict, windows: Windows, step: int) -> dict:
    """Returns what identifies the training data, and the position in it after `step` updates."""
    identity = {
        "fingerprint": windows.store.fingerprint,
        "seed": config.seed,
        "seq_len": config.data.seq_len,
    }
    return identity | {"examples": step * config.batch_size}


def start_or_resume(config, checkpoints, init_from, optimizer, state, windows):
    """Returns (step, params, opt_state, init_hash) to start from. In this order:

    1. its own newest checkpoint: the run was stopped and goes on;
    2. the parameters of the run that --init_from names, with a new optimizer, from step 0;
    3. from scratch.
    """
    if steps := checkpoints.steps():

        def read(step: int):
            if step == 0:
                imported = "holds an imported checkpoint, without optimizer state"
                remedy = "start from it in another --workdir, with --init_from naming this one"
                raise UsageError(f"--workdir={checkpoints.directory.parent}: {imported}: {remedy}")
            reader = CheckpointReader(checkpoints.directory / str(step))
            check_same(config, reader.config, f"checkpoint {step} is of another config")
            if reader.data != (expected := data_state(config, windows, step)):
                changed = "the documents, the tokenizer or the split have changed"
                remedy = f"{changed}; bring the old data back, or start in a new --workdir"
                other = f"was trained on other data ({reader.data}, now {expected})"
                raise UsageError(f"checkpoint {step} {other}: {remedy}")
            arrays = reader.restore(params=state[0], opt_state=state[1])
            return arrays["params"], arrays["opt_state"], reader.init_hash

        step, resumed = newest_undamaged(checkpoints.directory, steps[::-1], read)
        for damaged in [other for other in steps if other > step]:
            checkpoints.set_aside(damaged)
        log.info("resumed from step %d", step)
        return step, *resumed

    if init_from is not None:
        run = open_run(init_from)
        ours, theirs = flat(config), flat(run.config)
        changed = [
            name
            for name in ours
            if name.startswith(("model.", "data.")) and ours[name] != theirs[name]
        ]
        allowed = (*MAY_CHANGE, "data.", *(f"model.{field}" for field in FIELDS))
        if others := [
            f"{name}: {theirs[name]}, not {ours[name]}"
            for name in changed
            if not name.startswith(allowed)
        ]:
            raise UsageError(f"--init_from={init_from}: is another model ({'; '.join(others)})")
        changed = [f"{name}: {theirs[name]} -> {ours[name]}" for name in changed]
        log.info("other than in %s: %s", init_from, "; ".join(changed) or "nothing")
        _, initial = run.first_undamaged(lambda run: run.params(state[0]))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    params, opt_state = jax.jit(
        functools.partial(init_state, config, optimizer), out_shardings=shardings
    )()
    if init_from is not None:
        params = initial
    return 0, params, opt_state, hash_arrays(params)


def batches(
    config, windows: Windows, mesh, start: int, stop: int, writer: MetricWriter
) -> Iterator[dict]:
    """Yields the global batches of steps start + 1 .. stop; each process reads its own rows, some steps ahead."""
    rows = sharding.rows_of_this_process(mesh, config.batch_size)
    local = prefetch(
        lambda step: train_batch(windows, config.seed, config.batch_size, step, rows), start, stop
    )
    for _ in range(start, stop):
        with writer.waiting_for_data():
            batch = next(local)
        yield sharding.global_batch(mesh, batch, config.batch_size)


def main() -> dict | None:
    """Trains; returns what the command prints."""
    values = flags.FLAGS
    return train(values.config, values.workdir, values.init_from, values.stop_at_step)


if __name__ == "__main__":
    command.run(main, define_flags, leave)
