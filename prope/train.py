"""Trains a p-RoPE decoder: python -m prope.train --config=configs/quickstart.py --workdir=W.

Started again with the same --workdir it goes on from the last checkpoint. The batch of a step, the initial weights
and the updates are functions of the config alone, so a run that was stopped ends as one that was not.
"""

import contextlib
import functools
import logging
import pathlib

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from prope import checkpoint, command, metrics, model, sharding
from prope.checkpoint import Checkpoints
from prope.config import differences, from_dict, validate, validate_devices
from prope.data.mixture import open_windows
from prope.data.windows import Windows, ahead, train_batch
from prope.errors import UsageError
from prope.evaluate import make_evaluation
from prope.optimizer import make_optimizer
from prope.step import compile_step, hash_params, init_state, with_attention

log = logging.getLogger("prope")


def train(config: ConfigDict, workdir: str, init_from: str | None = None, stop_at_step: int | None = None) -> dict:
    """Trains the run in `workdir` up to its last step, or to `stop_at_step`; returns what the command prints.

    Raises:
      UsageError: what was given does not fit; found before a device is touched wherever that is possible.
      RunFailed: a loss or a gradient was not finite.
    """
    validate(config)
    path = pathlib.Path(workdir)
    open_workdir(path, config)
    windows = {split: open_windows(config.data, config.model.vocab_size, split) for split in ("train", "validation")}

    validate_devices(config, jax.device_count(), sharding.num_slices(jax.devices()))
    here = with_attention(config, jax.devices()[0])
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.tensor)
    optimizer = make_optimizer(config)
    state = sharding.with_shardings(jax.eval_shape(functools.partial(init_state, config, optimizer)), mesh)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    checkpoint.check_disk(path, size)
    checkpoint.write_config(path, config)
    log.info(
        "%d x %s; %s parameters; p-RoPE turns %s of %d pairs (p = %s); %s windows of %d tokens of %s",
        jax.device_count(), jax.devices()[0].device_kind, f"{model.num_parameters(state[0]):,}",
        model.turned_pairs(config.model), config.model.head_dim // 2,
        config.model.rope_percentage, f"{windows['train'].count:,}", config.data.seq_len, config.data.dataset,
    )  # fmt: skip

    with contextlib.closing(Checkpoints(path, config.checkpoint.max_to_keep)) as checkpoints:
        data = {
            "fingerprint": windows["train"].store.fingerprint,
            "seed": config.seed,
            "seq_len": config.data.seq_len,
        }
        start, params, opt_state, init_hash = start_or_resume(config, checkpoints, init_from, optimizer, state, data)
        stop = max(start, min(config.num_steps, stop_at_step or config.num_steps))
        evaluation = make_evaluation(here, windows["validation"], mesh)
        about = {"dataset": config.data.dataset, "seq_len": config.data.seq_len, "max_windows": config.eval.max_windows}

        with contextlib.closing(metrics.Metrics(config, path, start, stop)) as out:
            if start == 0:
                out.say(f"init_hash {init_hash}")
            for step, batch in enumerate(batches(config, windows["train"], mesh, start, stop, out), start + 1):
                if step == start + 1:
                    with out.pause():
                        update = compile_step(here, optimizer, mesh, state)
                params, opt_state, values = update(params, opt_state, batch)
                out.step(step, values)
                if step == stop or step % config.eval_every == 0:
                    with out.pause():
                        out.evaluation({"step": step, **about, **evaluation(params)})
                if step == stop or step % config.checkpoint_every == 0:
                    with out.pause():
                        checkpoint.check_disk(path, size)  # again: disks fill up while runs go on
                        identity = {"config": config.to_dict(), "init_hash": init_hash}
                        position = data | {"examples": step * config.batch_size}
                        checkpoints.save(step, params, opt_state, identity, position)
            if out.evaluated(about) is None:  # a finished run whose eval.jsonl was removed
                out.evaluation({"step": stop, **about, **evaluation(params)})
            evaluated, loss, speed = out.evaluated(about), out.last("loss"), out.tokens_per_second()

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
    if steps := checkpoints.steps():
        step = steps[-1]
        saved = checkpoints.restore(step, config=None, data=None)
        checkpoint.check_same(config, from_dict(saved["config"]["config"]), f"checkpoint {step} is of another config")
        expected = data | {"examples": step * config.batch_size}
        if saved["data"] != expected:
            raise UsageError(
                f"checkpoint {step} was trained on other data ({saved['data']}, now {expected}): the documents, the "
                "tokenizer or the split have changed; bring the old data back, or start in a new --workdir"
            )
        arrays = checkpoints.restore(step, params=state[0], opt_state=state[1])
        log.info("resumed from step %d", step)
        return step, arrays["params"], arrays["opt_state"], saved["config"]["init_hash"]

    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    params, opt_state = jax.jit(functools.partial(init_state, config, optimizer), out_shardings=places)()
    if init_from is not None:
        run = checkpoint.load_run(init_from)
        differing = [line for line in differences(config, run.config) if line.startswith("model.")]
        if differing:
            raise UsageError(f"--init_from={init_from}: is another model ({'; '.join(differing)})")
        params = jax.device_put(run.params, places[0])
    return 0, params, opt_state, hash_params(params)


def batches(config, windows: Windows, mesh, start: int, stop: int, out: metrics.Metrics):
    """The global batches of steps start + 1 .. stop; this process reads its rows of them, one step ahead."""
    rows = sharding.rows_of_this_process(mesh, config.batch_size)
    coming = ahead(lambda step: train_batch(windows, config.seed, config.batch_size, step, rows), start, stop)
    for _ in range(start, stop):
        with out.waiting_for_data():
            batch = next(coming)
        yield sharding.global_batch(mesh, batch, config.batch_size)


def define_flags() -> None:
    """The command's flags."""
    config_flags.DEFINE_config_file("config", None, "the run's config file, such as configs/quickstart.py")
    flags.DEFINE_string("workdir", None, "directory of the run: it is made, or the run in it goes on")
    flags.DEFINE_string("init_from", None, "start from the parameters of the run in this directory")
    stop = "save and stop after this step, as an interrupted run would; run again to go on"
    flags.DEFINE_integer("stop_at_step", None, stop, lower_bound=1)
    flags.mark_flags_as_required(["config", "workdir"])


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    return train(given.config, given.workdir, given.init_from, given.stop_at_step)


if __name__ == "__main__":
    command.run(main, define_flags)
