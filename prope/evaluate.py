"""Loss and perplexity of a saved checkpoint over the validation documents: python -m prope.evaluate --workdir=W.

The run knows its config. Every token of every validation document is predicted once; the sums are made per window
and added up in float64, so the batch size does not change the result.
"""

import logging
import math
from collections.abc import Callable

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from prope import checkpoint, command, metrics, model, sharding
from prope.config import validate
from prope.data.mixture import open_windows
from prope.data.windows import Windows
from prope.step import batch_losses

log = logging.getLogger("prope")


def make_evaluation(config: ConfigDict, windows: Windows, mesh: Mesh) -> Callable[..., dict | None]:
    """A function of the parameters that evaluates `windows`: all, or config.eval.max_windows evenly spread ones.

    It returns `tokens` (how many were predicted), `loss` (nats per token), `perplexity`, `bits_per_byte`, and
    `unigram_bits_per_byte`: what predicting every token by its frequency in the training split would give. Its second
    argument is called before every batch, as often in every process; where that returns False it gives up, with None.
    """
    count = min(config.eval.max_windows or windows.count, windows.count)
    chosen = [place * windows.count // count for place in range(count)]
    parts = mesh.devices.size // mesh.shape["tensor"]
    size = -(-min(config.eval.batch_size, count) // parts) * parts
    mine = sharding.rows_of_this_process(mesh, size)

    def read(start: int) -> dict[str, np.ndarray]:
        rows = [chosen[start + row] for row in mine if start + row < count]
        padding = windows.empty(len(mine) - len(rows))
        return {name: np.concatenate([part, padding[name]]) for name, part in windows.read(rows).items()}

    def sums_per_window(params, batch):
        weights = batch["weights"]
        return (batch_losses(config, params, batch) * weights).sum(axis=1), weights.sum(axis=1)

    step = jax.jit(sums_per_window, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def evaluation(params: model.Params, go_on: Callable[[], bool] = lambda: True) -> dict | None:
        totals = np.zeros(2)
        for start in range(0, count, size):
            if not go_on():
                return None
            with sharding.use(mesh):
                sums = step(params, sharding.global_batch(mesh, read(start), size))
            totals += [np.asarray(part, np.float64).sum() for part in sums]
        loss = float(totals[0] / totals[1])
        store = windows.store
        bits_per_byte = store.targets("validation") / store.index["validation"]["bytes"] / math.log(2)
        return {
            "tokens": int(totals[1]),
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": loss * bits_per_byte,
            "unigram_bits_per_byte": store.index["unigram_loss"] * bits_per_byte,
        }

    return evaluation


def define_flags() -> None:
    """The command's flags."""
    flags.DEFINE_string("workdir", None, "directory of the run")
    flags.DEFINE_integer("step", None, "checkpoint to evaluate; the newest by default")
    flags.DEFINE_integer("batch_size", None, "windows at a time: changes the speed, not the result", lower_bound=1)
    flags.DEFINE_integer(
        "max_windows", None, "evaluate this many windows, evenly spread; all by default", lower_bound=1
    )
    flags.DEFINE_integer("seq_len", None, "tokens in a window; as in training by default", lower_bound=1)
    flags.DEFINE_string("dataset", None, "another dataset, as in config.data.dataset")
    flags.DEFINE_string("data_dir", None, "where the dataset is, as in config.data.data_dir")
    flags.mark_flags_as_required(["workdir"])


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    run = checkpoint.load_run(given.workdir, given.step)
    config = run.config.copy_and_resolve_references()
    config.model.attention = "auto"  # of this machine, which need not be the one that trained
    config.eval.max_windows = given.max_windows
    config.eval.batch_size = given.batch_size or config.eval.batch_size
    config.data.seq_len = given.seq_len or config.data.seq_len
    if given.dataset is not None:
        plain = {"mixture": (), "template": "", "loss_on": "all"}
        config.data.update({"dataset": given.dataset, "data_dir": "", **plain})
    if given.data_dir is not None:
        config.data.data_dir = given.data_dir
    config.data.position_range = None  # of training only: what is evaluated may be longer
    validate(config)
    windows = open_windows(config.data, config.model.vocab_size, "validation")
    pairs = model.turned_pairs(config.model)
    log.info(
        "evaluating step %d of %s on %d windows of %s; p-RoPE turns %s of %d pairs", run.step, run.workdir,
        windows.count, config.data.dataset, pairs, config.model.head_dim // 2,
    )  # fmt: skip
    record = {
        "step": run.step,
        "rope_percentage": config.model.rope_percentage,
        "rotated_pairs": pairs,
        "dataset": config.data.dataset,
        "seq_len": config.data.seq_len,
        "max_windows": config.eval.max_windows,
        **make_evaluation(config, windows, sharding.make_mesh())(run.params),
        "init_hash": run.init_hash,
        "workdir": str(run.workdir),
    }
    metrics.append_jsonl(run.workdir / "eval.jsonl", record)
    return record


if __name__ == "__main__":
    command.run(main, define_flags)
