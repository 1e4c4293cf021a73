"""Seventeen position encodings on a sample of Wikipedia, from equal weights and batches.

What       wiki_sample.py in each of METHODS, 3 seeds, 700 steps: p-RoPE beside partial rotary,
           cutoffs, CoPE, RoPE-ID, other wavelengths, RNoPE-SWA (these the results page explains),
           p-RoPE between layers with windows, and windows alone: the control of both.
Command    python launch/sweep.py --config=configs/encodings_wiki.py --workdir=W \\
               --config.data.data_dir=DATA
           python -m prope.evaluate --workdir=W --seq_len=1x,2x,4x,8x --max_tokens=65536
           python -m prope.report --sweep=W
           encodings_wiki.py:cope is one method; :rates has 3 learning rates; :long has windows of
           1024; :tiny is quick; :cope-long is both.
Hardware   Two CPU cores and 2 GB of memory. DATA as in wiki_sample.py.
Hours      1.8: 51 runs of about 230 seconds on one core, two at a time; computed from 39.
Expected   configs/results/encodings_wiki.md: losses at 1x to 8x the length of training; not yet of
           swa_only and p_rope_swa.
"""

import pathlib
import runpy

import numpy as np

from prope.config import shrink_for_laptop
from prope.encodings import cutoff_frequencies
from prope.rope import frequencies

METHODS = (
    "rope",
    "nope",
    "p_rope_0.25",
    "p_rope_0.5",
    "p_rope_0.75",
    "partial_0.25",
    "partial_0.5",
    "partial_0.75",
    "cutoff_1",
    "cutoff_0.5",
    "cope",
    "rope_id",
    "base_length",
    "base_bound",
    "rnope_swa",
    "p_rope_swa",
    "swa_only",
)
WITH_WINDOWS = METHODS[-3:]
CUTOFFS = (
    "cutoff_0.25",
    "cutoff_2",
    "cutoff_4",
)  # not in the grid: about the rule that --intervene suggests
SIZES = ("full", "tiny", "long", "rates")

wiki_sample = runpy.run_path(str(pathlib.Path(__file__).with_name("wiki_sample.py")))


def parse(argument, methods, sizes):
    """Reads METHOD, SIZE or METHOD-SIZE; returns (method, size)."""
    method, _, size = (
        f"rope-{argument}".partition("-") if argument in sizes else argument.partition("-")
    )
    size = size or "full"
    if method not in methods or size not in sizes:
        raise ValueError(
            f"{argument}: must be a method ({', '.join(methods)}), "
            f"a size ({', '.join(sizes)}) or both"
        )
    return method, size


def least_wavelength(head_dim: int, length: int) -> float:
    """Finds the least base, in steps of 0.1 %, for which sum_k cos(m f_k) >= 0 at all m < length.

    Source: 2405.14591.
    """
    distances = np.arange(length)

    def negative_distances(wavelength, distances):
        angles = distances[:, None] * frequencies(head_dim, wavelength)
        return distances[np.cos(angles).sum(axis=1) < 0]

    wavelength = float(length)
    negative = negative_distances(wavelength, distances)
    while negative.size:
        # Most steps fail at the distance where the one before did: it is tried alone first.
        while negative_distances(wavelength, negative[-1:]).size:
            wavelength *= 1.001
        negative = negative_distances(wavelength, distances)
    return wavelength


def encoding(method, model, length):
    """Returns the fields of config.model that make a method of RoPE, in training at this length."""
    window = {"sliding_window": length // 4}
    three_of_four = {
        "layer_types": ("sliding_attention",) * 3 + ("full_attention",),
        "local_rope_percentage": 1.0,
    }
    complete = int((cutoff_frequencies(model.head_dim, model.max_wavelength, length) > 0).sum())
    return {
        "rope": {},
        "nope": {"rope_percentage": 0.0},
        "p_rope_0.25": {"rope_percentage": 0.25},
        "p_rope_0.5": {"rope_percentage": 0.5},
        "p_rope_0.75": {"rope_percentage": 0.75},
        "partial_0.25": {"rope_type": "partial", "rope_percentage": 0.25},
        "partial_0.5": {"rope_type": "partial", "rope_percentage": 0.5},
        "partial_0.75": {"rope_type": "partial", "rope_percentage": 0.75},
        **{
            f"cutoff_{c:g}": {"rope_type": "cutoff", "rope_cutoff": c, "original_seq_len": length}
            for c in (0.25, 0.5, 1.0, 2.0, 4.0)
        },
        "cope": {
            "rope_type": "cope",
            "clip_low_n": max(round(0.69 * (model.head_dim // 2 - complete)), 2),
        },
        "rope_id": {
            "rope_type": "rope_id",
            "original_seq_len": length,
            "max_wavelength": 10_000.0,
        },  # which it ignores
        "base_length": {"max_wavelength": float(length)},
        "base_bound": {"max_wavelength": least_wavelength(model.head_dim, length)},
        "rnope_swa": window | three_of_four | {"rope_percentage": 0.0},
        "p_rope_swa": window | three_of_four | {"rope_percentage": 0.25},
        "rope_swa": window | three_of_four,  # not in the grid: the control of both
        "swa_only": window | {"layer_types": ("sliding_attention",)},
    }[method]


def get_config(argument: str = "full"):
    method, size = parse(argument, METHODS + CUTOFFS, SIZES)
    config = wiki_sample["get_config"]()
    config.optimizer.learning_rate = 6e-3  # in :rates the best of every method, or within 0.005
    config.num_steps = config.eval_every = {"rates": 300, "long": 500}.get(size, 700)
    config.eval.max_windows = 256
    if size == "long":
        config.data.seq_len, config.batch_size, config.eval.max_windows = 1024, 2, 128
    config.model.rope_percentage = 1.0
    config.model.update(encoding(method, config.model, config.data.seq_len))
    return shrink_for_laptop(config, "tiny" if size == "tiny" else "full")


def sweep(file, argument, methods, sizes):
    """Returns the grid of a page whose argument is a method, a size or both."""
    method, size = parse(argument, methods, sizes)
    suffix = "" if size == "full" else f"-{size}"
    files = {
        "config": tuple(
            f"{file}:{m}{suffix}" for m in (methods if argument in sizes else (method,))
        )
    }
    if size == "rates":
        return files | {"optimizer.learning_rate": (1e-3, 3e-3, 6e-3)}
    return files | {"seed": (0,) if size == "tiny" else (0, 1, 2)}


def get_sweep(argument: str = "full"):
    return sweep(__file__, argument, METHODS if argument in SIZES else METHODS + CUTOFFS, SIZES)
