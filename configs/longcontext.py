"""Eight long-context tasks, learnt in windows of 128 bytes and asked up to 16 times as far.

What       180,000 parameters on longcontext/mix (prope/data/tasks/README.md), the methods of
           encodings_wiki.py with 16 pairs a head, wavelength 100: the slowest pairs of p = 0.25,
           0.5, 0.75 and 1 take 15, 47, 149 and 471 tokens to turn once. :table is TABLE with eight
           seeds, at wavelengths of 100 and 10,000: Gemma 4's layout (p_rope_swa: three layers with
           windows of 32 and RoPE, a full one with p = 0.25) beside the same with RoPE or NoPE in
           the full one, then others. :niah is these three on niah alone, in windows of 64
           at wavelength 10,000, where a pair of p = 0.25 takes 35 tokens to turn once, or fewer.
Command    python launch/sweep.py --config=configs/longcontext.py:table --workdir=W
           python -m prope.ask --workdir=W --tasks=all --seq_len=0.5x,1x,2x,4x,8x,16x
           python configs/results/longcontext.py W
           longcontext.py:p_rope_0.5 is one method, :p_rope_0.5-10000 at wavelength 10,000; :full
           is 17 methods with three seeds; :rates has 3 learning rates; :tiny is quick.
Hardware   Two CPU cores and 1 GB of memory.
Hours      0.2 a run on one core, 16.4 M tokens, and 0.1 for its 48 evaluations; two at a time. So
           :table, 176 runs, takes 26 hours of two cores; :niah, 24 runs, one.
Expected   configs/results/longcontext.md: right answers in %, and each prediction's outcome; not
           yet of :table and :niah.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

synthetic, wiki = (
    runpy.run_path(str(pathlib.Path(__file__).with_name(f"{name}.py")))
    for name in ("synthetic", "encodings_wiki")
)
METHODS = wiki["METHODS"]
SIZES = ("full", "10000", "niah", "tiny", "rates", "table")
NIAH = ("rope_swa", "p_rope_swa", "rnope_swa")  # windows, and one full layer of each encoding
OTHERS = ("rope", "p_rope_0.75", "p_rope_0.25", "nope", "swa_only", "partial_0.5", "rope_id")
TABLE = (*NIAH, *OTHERS, "cutoff_1")


def get_config(argument: str = "full"):
    method, size = wiki["parse"](argument, (*METHODS, *NIAH), SIZES)
    config = synthetic["get_config"]()
    config.num_steps = 4000
    config.eval_every = 1000
    config.checkpoint_every = 1000

    config.model.num_layers = 4  # a chain takes about 2 + log2 of its links
    config.model.vocab_size = 260  # bytes and 4 special tokens
    config.model.use_qk_norm = True  # without it none learns to match names in as many steps
    config.model.rope_percentage = 1.0

    config.data.dataset = "longcontext/mix"
    if size == "niah":
        config.num_steps = config.eval_every = config.checkpoint_every = 2000
        config.data.dataset = "longcontext/niah"
        config.data.seq_len = 64
    if size in ("10000", "niah"):
        config.model.max_wavelength = 10_000.0
    config.model.update(wiki["encoding"](method, config.model, config.data.seq_len))
    return shrink_for_laptop(config, "tiny" if size == "tiny" else "full")


def get_sweep(argument: str = "full"):
    """Of :table and :niah, all methods of a seed come before the next seed."""
    seeds = {"seed": tuple(range(8))}
    if argument == "table":
        names = (f"{method}-{size}" for size in ("10000", "full") for method in TABLE)
        return seeds | {"config": tuple(f"{__file__}:{name}" for name in names)}
    if argument == "niah":
        return seeds | {"config": tuple(f"{__file__}:{method}-niah" for method in NIAH)}
    methods = METHODS if argument in SIZES else (*METHODS, *NIAH)
    return wiki["sweep"](__file__, argument, methods, SIZES)
