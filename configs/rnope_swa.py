"""RNoPE-SWA (2501.18795) on a sample of Wikipedia: three RoPE layers with a window, one with none.

What       wiki_sample.py with the layers of RNoPE-SWA: every fourth layer sees all tokens and does
           not rotate. The window is 128 of 512 tokens (there: 4096). encodings_wiki.py has this
           encoding beside the others.
Command    python -m prope.train --config=configs/rnope_swa.py --workdir=W \\
               --config.data.data_dir=DATA
Hardware   Two CPU cores and 2 GB of memory. DATA as in wiki_sample.py.
Hours      0.08, as a run of wiki_sample.py. Computed.
Expected   Not yet run. Its rivals are wiki_sample.py's p = 0.75 and p = 1.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

wiki_sample = runpy.run_path(str(pathlib.Path(__file__).with_name("wiki_sample.py")))


def get_config(size: str = "full"):
    config = wiki_sample["get_config"]()
    config.model.rope_percentage = 0.0
    config.model.local_rope_percentage = 1.0
    config.model.layer_types = ("sliding_attention",) * 3 + ("full_attention",)
    config.model.sliding_window = 128
    return shrink_for_laptop(config, size)
