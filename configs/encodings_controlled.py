"""Eight encodings under control: tuned learning rates, ten seeds, truncated windows beside.

What       wiki_sample.py in METHODS; 64 of the 106 articles are the validation text. Each loss at
           8x the length stands beside those of the same checkpoint with attention cut to fewer
           keys, which tells use of context from survival.
Command    python launch/sweep.py --config=configs/encodings_controlled.py --workdir=W \\
               --config.data.data_dir=DATA
           Contrasts, evaluations and the report: configs/results/encodings_controlled.md.
           :python trains on python_source.py's text, four seeds; :rates has three learning rates,
           on two other seeds; :rope is one method and :rope-python both; :tiny is quick.
Hardware   Two CPU cores and 2 GB of memory. DATA as in wiki_sample.py.
Hours      2 to 4: 80 runs of 150 to 380 seconds on one core, by the processor, two at a time.
           :rates takes 0.5 to 1.0 and :python 0.8.
Expected   configs/results/encodings_controlled.md, encodings_python.md.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

METHODS = (
    "rope",
    "p_rope_0.25",
    "p_rope_0.5",  # at this length and wavelength cutoff_1 rotates the same pairs
    "p_rope_0.75",
    "cutoff_0.5",
    "nope_qk_norm",
    "rnope_swa",
    "swa_only",
)
RATES = (3e-3, 6e-3, 1.2e-2)
SIZES = ("full", "tiny", "rates", "python")
SEEDS = {"full": tuple(range(10)), "tiny": (0,), "rates": (100, 101), "python": (0, 1, 2, 3)}

wiki = runpy.run_path(str(pathlib.Path(__file__).with_name("encodings_wiki.py")))


def encoding(method, model, length):
    """Returns the fields of config.model that make a method of RoPE, in training at this length."""
    if method == "nope_qk_norm":
        return {"rope_percentage": 0.0, "use_qk_norm": True}
    return wiki["encoding"](method, model, length)


def get_config(argument: str = "full"):
    method, size = wiki["parse"](argument, METHODS, SIZES)
    config = wiki["get_config"]("rope")  # its rate, 6e-3, is the best of RATES or close
    config.data.validation_fraction = 0.6  # 64 articles; the 42 others are read 1.7 times
    if size == "rates":
        config.num_steps = config.eval_every = 300
    if size == "python":
        config.data.dataset = "python_source"
        config.data.data_dir = ""
        config.data.validation_fraction = 0.25  # 11 of 43 files
    config.model.update(encoding(method, config.model, config.data.seq_len))
    return shrink_for_laptop(config, "tiny" if size == "tiny" else "full")


def get_sweep(argument: str = "full"):
    method, size = wiki["parse"](argument, METHODS, SIZES)
    methods = METHODS if argument in SIZES else (method,)
    suffix = "" if size == "full" else f"-{size}"
    files = {"config": tuple(f"{__file__}:{name}{suffix}" for name in methods)}
    rates = {"optimizer.learning_rate": RATES} if size == "rates" else {}
    return {"seed": SEEDS[size]} | files | rates
