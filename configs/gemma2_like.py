"""Gemma 2 on a sample of Wikipedia: layers with and without a window take turns.

What       wiki_sample.py with the decoder of Gemma 2: one local layer, one global, both RoPE of
           wavelength 10 000; norms before and after attention and MLP; soft caps of scores and
           logits. The window is half of the length, as there.
Command    python -m prope.train --config=configs/gemma2_like.py --workdir=W \\
               --config.data.data_dir=DATA
Hardware   Two CPU cores and 2 GB of memory. DATA as in wiki_sample.py.
Hours      0.08, as a run of wiki_sample.py. Computed.
Expected   Not yet run. Its rivals are wiki_sample.py's p = 0.75 and p = 1.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

families = runpy.run_path(str(pathlib.Path(__file__).with_name("families.py")))
wiki_sample = runpy.run_path(str(pathlib.Path(__file__).with_name("wiki_sample.py")))


def get_config(size: str = "full"):
    config = wiki_sample["get_config"]()
    families["gemma2"](config)
    config.model.sliding_window = 256
    return shrink_for_laptop(config, size)
