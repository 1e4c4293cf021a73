"""Gemma 3 on a sample of Wikipedia: five local layers to a global one.

What       wiki_sample.py with the decoder of Gemma 3: RoPE of wavelength 1e4 in local layers, 1e6
           in global ones; RMSNorm of queries and keys; norms before and after attention and MLP.
           The window is 64 of 512, so that five local layers reach back 315 (there: 512 of 32k).
Command    python -m prope.train --config=configs/gemma3_like.py --workdir=W \\
               --config.data.data_dir=DATA
Hardware   Two CPU cores and 2 GB of memory. DATA as in wiki_sample.py.
Hours      0.11: 1.5 times a run of wiki_sample.py, for six layers instead of four. Computed.
Expected   Not yet run. Its rivals are wiki_sample.py's, with --config.model.num_layers=6.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

families = runpy.run_path(str(pathlib.Path(__file__).with_name("families.py")))
wiki_sample = runpy.run_path(str(pathlib.Path(__file__).with_name("wiki_sample.py")))


def get_config(size: str = "full"):
    config = wiki_sample["get_config"]()
    config.model.num_layers = 6
    families["gemma3"](config)
    config.model.sliding_window = 64
    return shrink_for_laptop(config, size)
