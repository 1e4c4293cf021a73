"""Five values of p on a laptop's CPU in minutes: launch/sweep.py's first example.

What       quickstart.py five times, for rope_percentage 0, 0.25, 0.5, 0.75 and 1, with fewer steps.
           The runs start from equal weights and see equal batches.
Command    python launch/sweep.py --config=configs/quick_sweep.py --workdir=W
           python -m prope.report --sweep=W
Hardware   Two CPU cores and 2 GB of memory.
Hours      0.09: five runs of 66 seconds.
Expected   Validation perplexity 13.14, 5.35, 5.15, 5.14 and 5.13 for p = 0, 0.25, 0.5, 0.75 and 1,
           one seed each, on an x86 CPU with AVX-512: the last three are as good as equal, and
           another processor moves the last digit.
"""

import pathlib
import runpy

quickstart = runpy.run_path(str(pathlib.Path(__file__).with_name("quickstart.py")))


def get_config(size: str = "full"):
    config = quickstart["get_config"](size)
    if size == "full":
        config.num_steps = 350
        config.checkpoint_every = 100
    return config


def get_sweep(size: str = "full"):
    return {"model.rope_percentage": (0, 0.25, 0.5, 0.75, 1)}
