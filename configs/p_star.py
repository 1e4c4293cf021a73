"""Which p for a length? Pairs that turn once in a window of training, a few more, or fewer.

What       encodings_controlled.py's articles at three lengths. p* = ln(L / 2 pi) / ln(theta) keeps
           the pairs that turn at least once in L bytes: 13 of 32 at 256, 16 at 512 and 18 at 1024,
           with theta = 10,000. p-RoPE of so many pairs, of 4 and 8 more and fewer, and RoPE. The
           paper's windows of 8192 have p* = 0.78; its best of the values that it tried is 0.75.
Command    python launch/sweep.py --config=configs/p_star.py --workdir=W --config.data.data_dir=DATA
           python -m prope.evaluate --workdir=W --seq_len=1x,8x --max_tokens=131072
           python -m prope.report --sweep=W
           p_star.py:16-512 has 16 pairs and windows of 512; :tiny is quick.
Hardware   Two CPU cores and 2 GB of memory. DATA as in wiki_sample.py.
Hours      2.7: 144 runs of 300 steps, 130 seconds each on one core with evaluations, two at a time;
           computed from slow_pairs.py.
Expected   Not yet run. If p* is right, the loss at 8 times the length rises from p* on, and at the
           length of training no p differs from RoPE.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop
from prope.encodings import turning_share

LENGTHS = (256, 512, 1024)
WAVELENGTH = 10_000.0
PAIRS = 32


def pairs_of(length: int) -> tuple[int, ...]:
    """Returns the numbers of pairs that are tried at a length: those of p*, around it, and all."""
    star = int(turning_share(length, WAVELENGTH) * PAIRS) + 1  # pair 0 counts
    return (star - 8, star - 4, star, star + 4, star + 8, PAIRS)


ARGUMENTS = tuple(f"{pairs}-{length}" for length in LENGTHS for pairs in pairs_of(length))

controlled = runpy.run_path(str(pathlib.Path(__file__).with_name("encodings_controlled.py")))


def get_config(argument: str = "16-512"):
    size = "tiny" if argument == "tiny" else "full"
    argument = "16-512" if argument in ("tiny", "full") else argument
    if argument not in ARGUMENTS:
        raise ValueError(f"{argument}: must be full, tiny or one of {', '.join(ARGUMENTS)}")
    pairs, length = map(int, argument.split("-"))
    config = controlled["get_config"]("rope")
    config.num_steps = config.eval_every = 300
    config.data.seq_len = length
    config.batch_size = 2048 // length
    config.eval.batch_size = 2 * config.eval.batch_size * 256 // length
    config.eval.max_windows = 2**17 // length
    config.model.rope_percentage = pairs / PAIRS
    return shrink_for_laptop(config, size)


def get_sweep(argument: str = "full"):
    arguments = ARGUMENTS if argument == "full" else (argument,)
    seeds = (0,) if argument == "tiny" else tuple(range(8))
    return {"seed": seeds, "config": tuple(f"{__file__}:{one}" for one in arguments)}
