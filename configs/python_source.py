"""p-RoPE on source files, whose names are defined far above their use: five values of p, 3 seeds.

What       wiki_sample.py on 32 files of Python 3.11's library; 11 others are the validation text.
           Windows of 512 bytes; :2048 and :8192 have longer ones, with as many tokens in a step.
Command    python launch/sweep.py --config=configs/python_source.py --workdir=W
           python -m prope.evaluate --workdir=W --seq_len=512,2048,8192 --max_tokens=131072
           python -m prope.evaluate --workdir=W --seq_len=8192 --window=512,2048 --max_tokens=131072
           python -m prope.report --sweep=W
           The lengths instead of p: --grid=seed=0,1,2 and, as one argument,
           --grid=config=F.py,F.py:2048,F.py:8192 where F is configs/python_source.
Hardware   Two CPU cores and 2 GB of memory.
Hours      1.1: 15 runs of 4.4 minutes, at wiki_sample.py's speed; :2048 takes 1.5 and :8192 3.5,
           by the time of six steps. Computed.
Expected   RoPE of :2048: configs/results/encodings_python.md. The rest was not run.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

LENGTHS = {"full": 512, "2048": 2048, "8192": 8192, "tiny": 512}

wiki_sample = runpy.run_path(str(pathlib.Path(__file__).with_name("wiki_sample.py")))


def get_config(argument: str = "full"):
    if argument not in LENGTHS:
        raise ValueError(f"{argument}: must be one of {', '.join(LENGTHS)}")
    length = LENGTHS[argument]
    config = wiki_sample["get_config"]()
    config.num_steps = 400
    config.eval_every = 400
    config.batch_size = 8192 // length

    config.data.dataset = "python_source"
    config.data.data_dir = ""
    config.data.seq_len = length
    config.data.validation_fraction = 0.25  # of so few files a tenth would be three or four

    config.eval.batch_size = config.batch_size
    config.eval.max_windows = 131_072 // length
    return shrink_for_laptop(config, "tiny" if argument == "tiny" else "full")


def get_sweep(argument: str = "full"):
    return wiki_sample["get_sweep"]()
