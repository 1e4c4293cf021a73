"""Gemma 2's attention on a sample of Wikipedia: layers with and without a window take turns.

What       wiki_sample.py with the layers of Gemma 2, 2B: one local, one global, both RoPE of
           wavelength 10 000; the window is half of the length, as there. Not built: soft caps.
Command    python -m prope.train --config=configs/gemma2_like.py --workdir=W \\
               --config.data.data_dir=DATA
Hardware   Two CPU cores and 2 GB of memory. DATA as in wiki_sample.py.
Hours      0.08, as a run of wiki_sample.py. Computed.
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
