"""The attention of Gemma 2 on a sample of Wikipedia: layers with a window and layers without take turns.

What       wiki_sample.py with the layers of Gemma 2, 2B: one local, one global; both are RoPE with wavelength 10 000.
           Kept: the pattern, the encoding, no norm of queries and keys, and the window's share of the length: 4096 of
           8192 tokens there, 256 of 512 here. Not kept: soft caps of the attention's logits (50) and the final ones
           (30), which are not built; head_dim 256; 26 layers.
Command    python -m prope.train --config=configs/gemma2_like.py --workdir=W --config.data.data_dir=DATA
           DATA as in wiki_sample.py; --config=configs/gemma2_like.py:tiny tries the plumbing.
Hardware   Two CPU cores and 2 GB of memory.
Hours      0.08, as a run of wiki_sample.py. Computed, not measured.
Expected   Not yet run. Its rivals are wiki_sample.py's p = 0.75 and p = 1.
"""

import pathlib
import runpy

from prope.config import sized

wiki_sample = runpy.run_path(str(pathlib.Path(__file__).with_name("wiki_sample.py")))


def get_config(size: str = "full"):
    config = wiki_sample["get_config"]()
    config.model.rope_percentage = 1.0
    config.model.layer_types = ("sliding_attention", "full_attention")
    config.model.sliding_window = 256
    return sized(config, size)
