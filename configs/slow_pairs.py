"""Do pairs that never turn once in training break longer windows, and which remedy helps?

What       encodings_controlled.py's articles, with every pair, or those that turn once in 2, 1 or
           half the length of training: wavelengths of 100, 1000 and 10 000, windows of 256 and 512
           bytes. Then three ways to have no pair slower than 471 bytes in windows of 512: "dense",
           32 pairs between 6 and 471; cutoff_1 at 10 000, 16 pairs and 32 lanes that do not rotate;
           "narrow" and "narrow_4", the same 16 pairs in heads of 32 lanes, 2 heads or 4.
Command    python launch/sweep.py --config=configs/slow_pairs.py --workdir=W \\
               --config.data.data_dir=DATA
           python -m prope.evaluate --workdir=W --seq_len=1x,8x --max_tokens=131072
           python -m prope.report --sweep=W
           slow_pairs.py:cutoff_1-1000-256 has one method, wavelength and length; :tiny is quick.
Hardware   Two CPU cores and 2 GB of memory. DATA as in wiki_sample.py.
Hours      1.3: 104 runs of 300 steps, 90 seconds each on one core with evaluations, two at a time.
Expected   configs/results/slow_pairs.md.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

CUTOFFS = ("rope", "cutoff_2", "cutoff_1", "cutoff_0.5")
# By name, what differs from RoPE of 32 pairs. Slowest: 2 pi 10,000^(15/32) = 471 bytes a turn.
SAME_SLOWEST = {
    "dense": {"max_wavelength": 10_000 ** (15 / 31)},
    "narrow": {"max_wavelength": 100.0, "head_dim": 32},
    "narrow_4": {"max_wavelength": 100.0, "head_dim": 32, "num_heads": 4, "num_kv_heads": 2},
}
GRID = tuple(
    f"{method}-{wavelength}-{length}"
    for wavelength in (100, 1000, 10_000)
    for length in (256, 512)
    for method in CUTOFFS
    # Wavelength 100 has no pair slower than 544 bytes: cutoff_2 is RoPE there.
    if (method, wavelength, length) != ("cutoff_2", 100, 512)
)
ARGUMENTS = GRID + tuple(f"{name}-10000-512" for name in SAME_SLOWEST)

controlled = runpy.run_path(str(pathlib.Path(__file__).with_name("encodings_controlled.py")))


def get_config(argument: str = "rope-10000-512"):
    size = "full"
    if argument in ("full", "tiny"):
        size = argument
        argument = "rope-10000-512"
    if argument not in ARGUMENTS:
        raise ValueError(f"{argument}: must be full, tiny or one of {', '.join(ARGUMENTS)}")
    method, wavelength, length = argument.split("-")
    config = controlled["get_config"]("rope")
    config.num_steps = 300
    config.eval_every = 300
    config.data.seq_len = int(length)
    config.batch_size = 2048 // config.data.seq_len
    config.eval.batch_size = 2 * config.eval.batch_size * 256 // config.data.seq_len
    config.eval.max_windows = 2**17 // config.data.seq_len
    config.model.max_wavelength = float(wavelength)
    if method in SAME_SLOWEST:
        config.model.update(SAME_SLOWEST[method])
    else:
        config.model.update(controlled["encoding"](method, config.model, config.data.seq_len))
    return shrink_for_laptop(config, size)


def get_sweep(argument: str = "full"):
    arguments = ARGUMENTS if argument == "full" else (argument,)
    seeds = (0,) if argument == "tiny" else (0, 1, 2, 3)
    return {"seed": seeds, "config": tuple(f"{__file__}:{one}" for one in arguments)}
