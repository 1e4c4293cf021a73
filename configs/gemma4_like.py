"""Gemma 4 on a sample of Wikipedia: p-RoPE with p = 0.25 in the global layers.

What       wiki_sample.py with the decoder of Gemma 4 12B: five local layers of RoPE, wavelength
           1e4 and a window of 64, to a global one with p = 0.25, wavelength 1e6, heads twice as
           wide and keys that are the values; norms of queries, keys and values; a soft cap.
Command    python launch/sweep.py --config=configs/gemma4_like.py --workdir=W \\
               --config.data.data_dir=DATA
           python -m prope.evaluate --workdir=W --seq_len=1x,2x,4x,8x --max_tokens=65536
           python -m prope.report --sweep=W
           The sweep is over p of the global layers, three seeds; prope.train makes one run.
           E2B has also --config.model.per_layer_input_dim=16.
Hardware   Two CPU cores and 2 GB of memory. DATA as in wiki_sample.py.
Hours      0.07: 1.2 M tokens at 6,300 tokens/s; the sweep of 12 runs 0.8.
Expected   configs/results/gemma4_like.md.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

families = runpy.run_path(str(pathlib.Path(__file__).with_name("families.py")))
wiki_sample = runpy.run_path(str(pathlib.Path(__file__).with_name("wiki_sample.py")))


def get_config(size: str = "full"):
    config = wiki_sample["get_config"]()
    config.num_steps = 600
    config.model.num_layers = 6
    families["gemma4"](config)
    config.model.global_head_dim = 128
    config.model.global_key_is_value = True
    config.model.sliding_window = 64
    return shrink_for_laptop(config, size)


def get_sweep(size: str = "full"):
    return {"seed": (0, 1, 2), "model.rope_percentage": (0, 0.25, 0.5, 1)}
