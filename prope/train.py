"""Trains a p-RoPE decoder, or resumes a run.

    python -m prope.train --config=configs/quickstart.py --workdir=runs/quickstart

Rerun the same command to resume from the last checkpoint. Batches, initial weights and updates are functions of the
config alone, so an interrupted run ends as an uninterrupted one does.

Several processes train one run where the environment says so (prope/runtime/processes.py). Exit codes: 0 done; 1 the
run failed; 2 invalid input; 75 stopped on request, with everything saved; 76 stuck, or another process is gone; 130
Ctrl-C. After 75, 76 or a kill the same command goes on.
"""

import contextlib
import functools
import logging
import pathlib

from absl import flags
from ml_collections import ConfigDict, config_flags

from prope import command


def define_flags() -> None:
    """Defines the command's flags."""
    config_flags.DEFINE_config_file("config", None, "the run's config file, such as configs/quickstart.py")
    flags.DEFINE_string("workdir", None, "directory of the run: created, or resumed")
    flags.DEFINE_string("init_from", None, "start from the parameters of the run in this directory")
    stop = "save and stop after this step, as an interrupted run would; rerun to resume"
    flags.DEFINE_integer("stop_at_step", None, stop, lower_bound=1)
    flags.mark_flags_as_required(["config", "workdir"])


if __name__ == "__main__":  # before JAX is imported, so that --help answers at once
    command.answer_help(define_flags, __doc__)

import jax

from prope import model, sharding
from prope.config import differences, from_dict
from prope.data.mixture import open_windows
from prope.data.windows import Windows, ahead, train_batch
from prope.errors import INTERRUPTED, PREEMPTED, Stopped, UsageError
from prope.inference.evaluation import make_evaluation
from prope.optimizer import make_optimizer
from prope.runtime import processes
from prope.runtime.interrupts import Interrupts, Request
from prope.runtime.startup import Startup
from prope.runtime.validate import validate, validate_devices
from prope.runtime.watchdog import Watchdog
from prope.sharding import hash_arrays
from prope.step import compile_step, init_state, with_attention
from prope.workdir import checkpoints as checkpoint
from prope.workdir import metrics
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.records import append_jsonl

log = logging.getLogger("prope")


def train(
    config: ConfigDict, workdir: str, init_from: str | None = None, stop_at_step: int | None = None
) -> dict | None:
    """Trains the run in `workdir` up to its last step, or to `stop_at_step`.

    Returns:
      What the command prints; None in all processes but the first.

    Raises:
      UsageError: what was given does not fit; found before a device is touched wherever that is possible.
      RunFailed: a loss or a gradient was not finite.
      Stopped: it was asked to stop, and everything is saved; or another process is gone.
    """
    validate(config)
    path, startup = checkpoint.folder(workdir), Startup()
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts(config.checkpoint.every_minutes))
        watchdog = stack.enter_context(Watchdog(config.watchdog_minutes))
        stack.enter_context(processes.peer_loss_as_stopped())
        processes.start()
        interrupts.listen()
        startup.done("processes")
        with processes.raise_on_all():
            open_workdir(path, config)
            with watchdog.paused():  # on first use text is made into tokens: for an hour, maybe, but not in silence
                splits = ("train", "validation")
                windows = {split: open_windows(config.data, config.model.vocab_size, split) for split in splits}
            startup.done("data")
            validate_devices(config, jax.device_count(), sharding.num_slices(jax.devices()))
            here = with_attention(config, jax.devices()[0])
        processes.check_shared(path)
        startup.use_cache(path)
        mesh = sharding.make_mesh(config.mesh.data, config.mesh.tensor)
        interrupts.over(mesh)
        optimizer = make_optimizer(config)
        state = sharding.with_shardings(jax.eval_shape(functools.partial(init_state, config, optimizer)), mesh)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        with processes.raise_on_all():
            checkpoint.check_disk(path, size)
            if processes.is_first():
                checkpoint.write_config(path, config)
        log.info(
            "%d x %s; %s parameters; p-RoPE turns %s of %d pairs (p = %s); %s windows of %d tokens of %s",
            jax.device_count(), jax.devices()[0].device_kind, f"{model.num_parameters(state[0]):,}",
            model.rotated_pairs(config.model), config.model.head_dim // 2,
            config.model.rope_percentage, f"{windows['train'].count:,}", config.data.seq_len, config.data.dataset,
        )  # fmt: skip
        startup.done("devices")

        checkpoints = stack.enter_context(Checkpoints(path, config.checkpoint))
        data = {
            "fingerprint": windows["train"].store.fingerprint,
            "seed": config.seed,
            "seq_len": config.data.seq_len,
        }
        start, params, opt_state, init_hash = start_or_resume(config, checkpoints, init_from, optimizer, state, data)
        stop = max(start, min(config.num_steps, stop_at_step or config.num_steps))
        startup.done("restore" if start else "weights")

        evaluation = make_evaluation(here, windows["validation"], mesh)
        about = {name: config.data[name] for name in ("dataset", "seq_len")} | {"max_windows": config.eval.max_windows}
        out = stack.enter_context(contextlib.closing(metrics.Metrics(config, path, start, stop, processes.is_first())))

        def evaluate(step: int) -> None:
            """Evaluates, or gives up half-way where the run is asked to stop: it is done when the run goes on."""

            def go_on() -> bool:
                watchdog.alive(f"a part of the evaluation of step {step}")
                return interrupts.poll() <= Request.SAVE

            with out.pause():
                if (found := evaluation(params, path / "eval" / str(step), go_on)) is not None:
                    out.evaluation({"step": step, **about, **found})

        def save(step: int) -> None:
            with out.pause():
                checkpoint.check_disk(path, size)  # again: disks fill up while runs go on
                identity = {"config": config.to_dict(), "init_hash": init_hash}
                checkpoints.save(step, params, opt_state, identity, data | {"examples": step * config.batch_size})
                interrupts.saved()

        if start == 0:
            out.say(f"init_hash {init_hash}")
        missing = start > 0 and out.evaluated({"step": start, **about}) is None  # it was stopped while it evaluated
        if processes.broadcast_from_first(missing and (start == stop or start % config.eval_every == 0)):
            evaluate(start)
        startup.done("evaluation")
        for step, batch in enumerate(batches(config, windows["train"], mesh, start, stop, out), start + 1):
            if step == start + 1:
                with out.pause():
                    startup.done("first batch")
                    update = compile_step(here, optimizer, mesh, state)
                    startup.compiled()
                interrupts.training = True
            params, opt_state, values = update(params, opt_state, batch)
            out.step(step, values)
            if step == start + 1:
                jax.block_until_ready(values)
                started = startup.first_step(step)
                if processes.is_first():
                    append_jsonl(path / "starts.jsonl", started)
            watchdog.alive(f"step {step}")
            checkpoints.check()
            if interrupts.poll() <= Request.SAVE and (step == stop or step % config.eval_every == 0):
                evaluate(step)
            if step == stop or step % config.checkpoint_every == 0 or interrupts.asked:
                save(step)
            if interrupts.asked > Request.SAVE:
                by, code = ("Ctrl-C", INTERRUPTED) if interrupts.asked == Request.INTERRUPT else ("SIGTERM", PREEMPTED)
                raise Stopped(f"{by}: step {step} of {config.num_steps} is saved; the same command goes on", code)
        evaluated, loss, speed = out.evaluated({"step": stop, **about}), out.last("loss"), out.tokens_per_second()

    processes.end()
    if not processes.is_first():
        return None
    return {
        "step": stop,
        "loss": loss,
        "eval_loss": evaluated["loss"],
        **{name: evaluated[name] for name in ("perplexity", "bits_per_byte", "unigram_bits_per_byte")},
        "rope_percentage": config.model.rope_percentage,
        "init_hash": init_hash,
        "tokens_per_second": speed,
        "workdir": str(path),
    }


def open_workdir(path: pathlib.Path, config: ConfigDict) -> None:
    """Makes the directory; refuses one that holds another run."""
    there = checkpoint.read_config(path)
    if there is not None:
        what = f"--workdir={path}: holds a run of another config"
        checkpoint.check_same(config, there, what, "; choose another --workdir, or the config that it was started with")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--workdir={path}: cannot be made: {error.strerror}") from error


def start_or_resume(config, checkpoints, init_from, optimizer, state, data):
    """(step, params, opt_state, init_hash): where the run starts. In this order:

    1. its own newest checkpoint: the run was stopped and goes on;
    2. the parameters of the run that --init_from names, with a new optimizer, from step 0;
    3. from scratch.
    """
    if checkpoints.steps():

        def read(step: int):
            if step == 0:
                raise UsageError(
                    f"--workdir={checkpoints.directory.parent}: holds an imported checkpoint, without optimizer state: "
                    "start from it in another --workdir, with --init_from naming this one"
                )
            saved = checkpoints.restore(step, config=None, data=None)
            other = f"checkpoint {step} is of another config"
            checkpoint.check_same(config, from_dict(saved["config"]["config"]), other)
            expected = data | {"examples": step * config.batch_size}
            if saved["data"] != expected:
                raise UsageError(
                    f"checkpoint {step} was trained on other data ({saved['data']}, now {expected}): the documents, "
                    "the tokenizer or the split have changed; bring the old data back, or start in a new --workdir"
                )
            arrays = checkpoints.restore(step, params=state[0], opt_state=state[1])
            return arrays["params"], arrays["opt_state"], saved["config"]["init_hash"]

        step, resumed = checkpoints.newest(read)
        for later in [other for other in checkpoints.steps() if other > step]:
            checkpoints.set_aside(later)
        log.info("resumed from step %d", step)
        return step, *resumed

    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    params, opt_state = jax.jit(functools.partial(init_state, config, optimizer), out_shardings=places)()
    if init_from is not None:
        run = checkpoint.load_run(init_from)
        differing = [line for line in differences(config, run.config) if line.startswith("model.")]
        if differing:
            raise UsageError(f"--init_from={init_from}: is another model ({'; '.join(differing)})")
        params = jax.device_put(run.params, places[0])
    return 0, params, opt_state, hash_arrays(params)


def batches(config, windows: Windows, mesh, start: int, stop: int, out: metrics.Metrics):
    """The global batches of steps start + 1 .. stop; this process reads its rows of them, one step ahead."""
    rows = sharding.rows_of_this_process(mesh, config.batch_size)
    coming = ahead(lambda step: train_batch(windows, config.seed, config.batch_size, step, rows), start, stop)
    for _ in range(start, stop):
        with out.waiting_for_data():
            batch = next(coming)
        yield sharding.global_batch(mesh, batch, config.batch_size)


def main() -> dict | None:
    """Trains; returns what the command prints."""
    FLAGS = flags.FLAGS
    return train(FLAGS.config, FLAGS.workdir, FLAGS.init_from, FLAGS.stop_at_step)


if __name__ == "__main__":
    command.run(main, define_flags, processes.leave)
