"""The paper's Table 2: Gemma 2B from scratch on Wikipedia and on FlanV2, for four values of p; eight runs.

What       gemma_2b_wiki.py and gemma_2b_flan.py, each for rope_percentage 0, 0.25, 0.75 and 1. Perplexity there:
                                NoPE (p = 0)   p = 0.25   p = 0.75   RoPE (p = 1)
               Wikipedia              4.8594     4.5302     4.4414         4.4627
               FlanV2                 6.6429     6.5111     6.4422         6.4429
Command    python launch/sweep.py --config=configs/table2.py --workdir=W
           python -m prope.report --sweep=W
           with the data of both, which the two files' pages describe, in ./data, and Gemma's tokenizer.model in this
           folder. --config=configs/table2.py:tiny tries the plumbing; --dry-run prints the eight commands.
Hardware   As gemma_2b_wiki.py: a slice of 64 TPU v5p or, with the flags there, of 256 v5e or 64 H100.
Hours      96: eight runs of 12 hours on 64 v5p at 55 % of their peak. Computed, not measured.
Expected   The paper's numbers, as far as what is assumed on the two pages holds. Not yet run.
"""

import pathlib
import runpy

WIKI, FLAN = (str(pathlib.Path(__file__).with_name(f"gemma_2b_{name}.py")) for name in ("wiki", "flan"))


def get_config(size: str = "full"):
    return runpy.run_path(WIKI)["get_config"](size)


def get_sweep(size: str = "full"):
    suffix = "" if size == "full" else f":{size}"
    return {"config": (WIKI + suffix, FLAN + suffix), "model.rope_percentage": (0, 0.25, 0.75, 1)}
