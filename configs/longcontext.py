"""Eight long-context tasks, learnt in windows of 128 bytes and asked up to 16 times as far.

What       180,000 parameters on longcontext/mix (prope/data/tasks/README.md) in 17 encodings, the
           methods of encodings_wiki.py with 16 pairs a head, wavelength 100: the slowest pairs of
           p = 0.25, 0.5, 0.75 and 1 take 15, 47, 149 and 471 tokens to turn once.
Command    python launch/sweep.py --config=configs/longcontext.py --workdir=W
           python -m prope.ask --workdir=W --tasks=all --seq_len=0.5x,1x,2x,4x,8x,16x
           python -m prope.report --sweep=W
           longcontext.py:p_rope_0.5 is one method; :rates has 3 learning rates; :tiny is quick.
Hardware   Two CPU cores and 1 GB of memory.
Hours      0.2 a run on one core, 16.4 M tokens, and 0.1 for its 48 evaluations; two at a time.
Expected   configs/results/longcontext.md: right answers in %, and each prediction's outcome.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

synthetic, wiki = (
    runpy.run_path(str(pathlib.Path(__file__).with_name(f"{name}.py")))
    for name in ("synthetic", "encodings_wiki")
)
METHODS = wiki["METHODS"]
SIZES = ("full", "tiny", "rates")


def get_config(argument: str = "full"):
    method, size = wiki["parse"](argument, METHODS, SIZES)
    config = synthetic["get_config"]()
    config.num_steps = 4000
    config.eval_every = 1000
    config.checkpoint_every = 1000

    config.model.num_layers = 4  # a chain takes about 2 + log2 of its links
    config.model.vocab_size = 260  # bytes and 4 special tokens
    config.model.use_qk_norm = True  # without it none learns to match names in as many steps
    config.model.rope_percentage = 1.0

    config.data.dataset = "longcontext/mix"
    config.model.update(wiki["encoding"](method, config.model, config.data.seq_len))
    return shrink_for_laptop(config, "tiny" if size == "tiny" else "full")


def get_sweep(argument: str = "full"):
    return wiki["sweep"](__file__, argument, METHODS, SIZES)
