"""The paper's Table 2: Gemma 2B from scratch on Wikipedia and on FlanV2, in seven encodings; 14 runs.

What       gemma_2b_wiki.py and gemma_2b_flan.py, each for rope_percentage 0, 0.25, 0.75 and 1, RoPE at wavelength 5e5,
           and two other ways to rotate three quarters of the pairs. Perplexity there:
                                                          Wikipedia   FlanV2
               NoPE (p = 0)                                  4.8594   6.6429
               p = 0.25                                      4.5302   6.5111
               p = 0.75                                      4.4414   6.4422
               RoPE (p = 1)                                  4.4627   6.4429
               RoPE, wavelength 5e5                          4.4485   6.4593
               0.75-reversed: the slowest three quarters     4.4592   6.4683
               0.75-partial: RoPE of three quarters          4.4537   6.4562
           The text of the paper that defines partial was not seen: it is taken for the RoPE of GPT-NeoX, whose
           wavelengths span the pairs that rotate.
Command    python launch/sweep.py --config=configs/table2.py --workdir=W
           python -m prope.report --sweep=W
           with the data of both, which the two files' pages describe, in ./data, and Gemma's tokenizer.model in this
           folder. --config=configs/table2.py:tiny tries the plumbing; --dry-run prints the 14 commands.
Hardware   As gemma_2b_wiki.py: a slice of 64 TPU v5p or, with the flags there, of 256 v5e or 64 H100.
Hours      168: 14 runs of 12 hours on 64 v5p at 55 % of their peak. Computed, not measured.
Expected   The paper's numbers, as far as what is assumed on the two pages holds. Not yet run.
"""

import pathlib
import runpy

WIKI, FLAN = (
    str(pathlib.Path(__file__).with_name(f"gemma_2b_{name}.py")) for name in ("wiki", "flan")
)


def get_config(size: str = "full"):
    return runpy.run_path(WIKI)["get_config"](size)


def get_sweep(size: str = "full"):
    suffix = "" if size == "full" else f":{size}"
    both = {"config": (WIKI + suffix, FLAN + suffix)}
    return (
        both | {"model.rope_percentage": (0, 0.25, 0.75, 1)},
        both | {"model.rope_percentage": (1,), "model.max_wavelength": (500_000,)},
        both | {"model.rope_percentage": (0.75,), "model.rope_type": ("reversed", "partial")},
    )
