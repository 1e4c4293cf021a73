"""Eight long-context tasks, learnt in windows of 256 bytes and asked up to 16 times as far, in 14 encodings.

What       180,000 parameters on longcontext/mix: find, match, follow a chain, count places, take the latest, copy
           (prope/longcontext/README.md). Methods are those of encodings_synthetic.py, with 16 pairs a head, wavelength
           100: the slowest pairs of p = 0.25, 0.5, 0.75 and 1 take 15, 47, 149 and 471 tokens to turn once. Here
           cutoff_1 rotates 13 pairs and cutoff_0.5 11, cope tapers 2.
Command    python launch/sweep.py --config=configs/longcontext.py --workdir=W
           python -m prope.evaluate --workdir=W --tasks=all --seq_len=0.5x,1x,2x,4x,8x,16x
           python -m prope.report --sweep=W
           longcontext.py:p_rope_0.5 is one method; five values of p alone:
           --config=configs/longcontext.py:rope --rope_percentage=0,0.25,0.5,0.75,1 --grid=seed=0,1,2
           :rates has 3 learning rates; :tiny tries the plumbing.
Hardware   Two CPU cores and 1 GB of memory.
Hours      0.2 a run, 8.2 M tokens; 4.2 for all 42, two at a time. Computed, not measured.
Expected   Not yet run. Predictions: p = 1 answers only what stands less than 256 tokens back, whatever the length
           (passkey, niah, lookup, chain); p between answers at any length, with fewer right as the text grows; p = 0
           is near chance on offset, index, flipflop and duplicate at any length. p = 0.25 fades on offset, whose far
           places look like near ones, and p = 0.5 on flipflop beyond half the period of its slowest pair.
"""

import pathlib
import runpy

from prope.config import sized

synthetic, wiki = (
    runpy.run_path(str(pathlib.Path(__file__).with_name(f"{name}.py"))) for name in ("synthetic", "encodings_wiki")
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
    return sized(config, "tiny" if size == "tiny" else "full")


def get_sweep(argument: str = "full"):
    return wiki["sweep"](__file__, argument, METHODS, SIZES)
