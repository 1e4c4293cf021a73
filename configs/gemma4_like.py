"""The attention of Gemma 4 on a sample of Wikipedia: p-RoPE with p = 0.25 in the global layers, RoPE in the local ones.

What       wiki_sample.py with the layers of Gemma 4, E4B: five local, one global. Kept: the pattern; p = 0.25 with
           wavelength 1e6 in global layers, p = 1 with 1e4 in local ones; RMSNorm of queries and keys. Not kept: the
           window is 512 tokens there, here 64 of 512, as in gemma3_like.py; global heads twice as wide as local ones;
           the norm of values; logits that are not divided by sqrt(head_dim); the soft cap of the final logits (30);
           keys that are also the values (26B, 31B); 42 layers.
Command    python -m prope.train --config=configs/gemma4_like.py --workdir=W --config.data.data_dir=DATA
           DATA as in wiki_sample.py; --config=configs/gemma4_like.py:tiny tries the plumbing.
Hardware   Two CPU cores and 2 GB of memory.
Hours      0.11: 1.5 times a run of wiki_sample.py, for six layers instead of four. Computed, not measured.
Expected   Not yet run. Its rivals are wiki_sample.py's p = 0.75 and p = 1, with --config.model.num_layers=6.
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
