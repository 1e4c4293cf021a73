"""The encodings of encodings_wiki.py on the tasks of synthetic.py: copying and recalling.

What       synthetic.py in 14 encodings, 3 seeds each: 16 pairs a head, wavelength 100, windows of
           128 tokens. Methods are those of encodings_wiki.py, without windows. Here cutoff_1
           rotates 11 pairs, cutoff_0.5 9, cope tapers 3, and base_bound has wavelength 1030.
Command    python launch/sweep.py --config=configs/encodings_synthetic.py --workdir=W
           python -m prope.evaluate --workdir=W --seq_len=1x,2x,4x,8x --max_windows=128
           python -m prope.report --sweep=W
           encodings_synthetic.py:cope is one encoding; :rates has 3 learning rates; :tiny is quick.
Hardware   Two CPU cores and 1 GB of memory.
Hours      0.5: 42 runs of 50 to 75 seconds on one core, two at a time; measured beside tests.
Expected   configs/results/synthetic.md: right answers in % by encoding and length.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

synthetic, wiki = (
    runpy.run_path(str(pathlib.Path(__file__).with_name(f"{name}.py")))
    for name in ("synthetic", "encodings_wiki")
)
METHODS = tuple(method for method in wiki["METHODS"] if method not in wiki["WITH_WINDOWS"])
SIZES = ("full", "tiny", "rates")


def get_config(argument: str = "full"):
    method, size = wiki["parse"](argument, METHODS, SIZES)
    config = synthetic["get_config"]()
    config.model.rope_percentage = 1.0
    config.model.update(wiki["encoding"](method, config.model, config.data.seq_len))
    return shrink_for_laptop(config, "tiny" if size == "tiny" else "full")


def get_sweep(argument: str = "full"):
    return wiki["sweep"](__file__, argument, METHODS, SIZES)
