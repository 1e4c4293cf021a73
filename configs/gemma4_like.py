"""Gemma 4's attention on a sample of Wikipedia: p-RoPE with p = 0.25 in the global layers.

What       wiki_sample.py with the layers of Gemma 4, E4B: five local of RoPE, wavelength 1e4, one
           global with p = 0.25, wavelength 1e6; RMSNorm of queries and keys; window as in
           gemma3_like.py. Not built: wider global heads, the norm of values, unscaled logits, the
           soft cap of the final logits, keys that are the values.
Command    python -m prope.train --config=configs/gemma4_like.py --workdir=W \\
               --config.data.data_dir=DATA
Hardware   Two CPU cores and 2 GB of memory. DATA as in wiki_sample.py.
Hours      0.11: 1.5 times a run of wiki_sample.py, for six layers instead of four. Computed.
Expected   Not yet run. Its rivals are wiki_sample.py's, with --config.model.num_layers=6.
"""

import pathlib
import runpy

from prope.config import sized

wiki_sample = runpy.run_path(str(pathlib.Path(__file__).with_name("wiki_sample.py")))


def get_config(size: str = "full"):
    config = wiki_sample["get_config"]()
    config.model.num_layers = 6
    config.model.rope_percentage = 0.25
    config.model.local_rope_percentage = 1.0
    config.model.max_wavelength = 1e6
    config.model.local_max_wavelength = 1e4
    config.model.layer_types = ("sliding_attention",) * 5 + ("full_attention",)
    config.model.sliding_window = 64
    config.model.use_qk_norm = True
    return sized(config, size)
