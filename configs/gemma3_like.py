"""Gemma 3's attention on a sample of Wikipedia: five local layers to a global one.

What       wiki_sample.py with the layers of Gemma 3, 1B: RoPE of wavelength 1e4 in local layers,
           1e6 in global ones; RMSNorm of queries and keys. The window is 64 of 512, so that five
           local layers reach back 315 (there: 512 of 32k).
Command    python -m prope.train --config=configs/gemma3_like.py --workdir=W \\
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
    config.model.rope_percentage = 1.0
    config.model.max_wavelength = 1e6
    config.model.local_max_wavelength = 1e4
    config.model.layer_types = ("sliding_attention",) * 5 + ("full_attention",)
    config.model.sliding_window = 64
    config.model.use_qk_norm = True
    return sized(config, size)
