"""Code of your own without a change to the package: text, frequencies, learning rate and log.

What       The sizes of quickstart.py, with four functions of this file, which the config names as
           my_module:function. A copy of the file where you start the command names its own: that
           of my_config.py is my_config. The file is part of the run: once it has changed, text is
           tokenised again, and a run does not go on with it.
Command    python -m prope.train --config=configs/custom.py --workdir=W
Hardware   As quickstart.py: two CPU cores.
Hours      0.02, for 300 steps. Computed.
Expected   Validation 2.06 bits per byte on an x86 CPU (token frequencies alone: 4.70).
"""

import os
import sys
from pydoc_data.topics import topics

import jax.numpy as jnp
import numpy as np

from prope.config import default_config, shrink_for_laptop

# This file, as Python imports it where the command is started: configs.custom.
MODULE = os.path.relpath(os.path.splitext(__file__)[0]).replace(os.sep, ".")


def documents():
    """Yields the text of each document, or (text, name): here Python's topics of help."""
    for name, text in topics.items():
        yield text, name


def frequencies(head_dim, layer):
    """Returns the radians per token of a layer's pairs, [P], or of each of its key heads, [K, P].

    Pairs of 0 do not rotate. Here the base is 1,000, and the slowest quarter stands.
    """
    pairs = np.arange(head_dim // 2)
    return np.where(pairs < 3 * head_dim // 8, 1000.0 ** (-2 * pairs / head_dim), 0)


def schedule(spec):
    """Returns an Optax schedule, from the count of updates, 0 at first, to the learning rate.

    `spec` has all values of the config. Here the rate falls as 1 / sqrt(step) after warmup.
    """
    peak, warmup = spec.optimizer.learning_rate, spec.optimizer.warmup_steps
    return lambda count: peak * jnp.minimum((count + 1) / warmup, jnp.sqrt(warmup / (count + 1)))


def on_log(record):
    """Takes every record: the dict that is written to the JSON lines, and its "tag"."""
    if record["tag"] == "eval":
        print(f"step {record['step']}: {record['bits_per_byte']:.3f} bits", file=sys.stderr)


def get_config(size: str = "full"):
    config = default_config()
    config.num_steps = 300
    config.batch_size = 8
    config.log_every = 20
    config.eval_every = 100
    config.checkpoint_every = 100
    config.model.embed_dim = 128
    config.model.num_heads = 2
    config.model.hidden_dim = 512
    config.model.scan_layers = False
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 50
    shrink_for_laptop(config, size)  # before the text is chosen, which it would replace

    config.data.dataset = f"{MODULE}:documents"
    config.model.rope_percentage = 1.0
    config.model.rope_type = f"{MODULE}:frequencies"
    config.optimizer.schedule = f"{MODULE}:schedule"
    config.log_to = ("tensorboard", "csv", f"{MODULE}:on_log")
    return config
