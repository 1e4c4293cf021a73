"""The paper's Table 2: Gemma 2B from scratch on Wikipedia and on FlanV2, in seven encodings.

What       gemma_2b_wiki.py and gemma_2b_flan.py, each for rope_percentage 0, 0.25, 0.75 and 1, RoPE
           at wavelength 5e5, and two other ways to rotate three quarters of the pairs. "Partial" is
           taken for GPT-NeoX's, since the paper's definition was not seen.
Command    python launch/sweep.py --config=configs/table2.py --workdir=W
           python -m prope.report --sweep=W
           with the data of both pages in ./data and Gemma's tokenizer.model in this folder;
           --dry-run prints the 14 commands.
Hardware   As gemma_2b_wiki.py: a slice of 64 TPU v5p or, with the flags there, of 256 v5e or 64
           H100.
Hours      168: 14 runs of 12 on 64 v5p at 55 % of their peak. Computed.
Expected   Not yet run. The paper's perplexities: configs/results/gemma_2b.md.
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
