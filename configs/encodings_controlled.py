"""Eight encodings under control: a learning rate for each, ten seeds, truncated windows beside.

What       wiki_sample.py in METHODS, at the best of three learning rates each; 64 of the 106
           articles are the validation text. Every loss at a longer window stands beside that of the
           same checkpoint with attention cut to fewer keys, which tells use from survival.
Command    python launch/sweep.py --config=configs/encodings_controlled.py --workdir=W \\
               --config.data.data_dir=DATA
           python -m prope.evaluate --workdir=W --seq_len=1x,2x,4x,8x --max_tokens=131072
           python -m prope.evaluate --workdir=W --seq_len=8x --max_tokens=131072 \\
               --window=128,256,512 --sinks=0,4
           python -m prope.report --sweep=W --contrast=p_rope_0.75,rope \\
               --contrast=p_rope_0.5,rope --contrast=p_rope_0.25,rope \\
               --contrast=p_rope_0.5,p_rope_0.75 --contrast=rnope_swa,rope \\
               --contrast=swa_only,rope --contrast=rnope_swa,swa_only
           The last command declares the contrasts: give it before any run is evaluated, too.
           :python trains on python_source.py's text instead, four seeds; :rates has the learning
           rates, on two other seeds; :rope is one method and :rope-python both; :tiny is quick.
Hardware   Two CPU cores and 2 GB of memory. DATA as in wiki_sample.py.
Hours      4.2: 80 runs of about 380 seconds on one core, two at a time; computed. :rates takes 1.0
           and :python 1.7.
Expected   configs/results/encodings_controlled.md: the learning rates; not yet the ten seeds.
"""

import pathlib
import runpy

from prope.config import sized

# Of RATES the best after 300 steps, or within 0.005 of it: configs/results/encodings_controlled.md.
BEST_RATES = {
    "rope": 6e-3,
    "p_rope_0.25": 6e-3,
    "p_rope_0.5": 6e-3,  # at this length and wavelength cutoff_1 rotates the same pairs
    "p_rope_0.75": 6e-3,
    "cutoff_0.5": 6e-3,
    "nope_qk_norm": 6e-3,
    "rnope_swa": 6e-3,
    "swa_only": 6e-3,
}
METHODS = tuple(BEST_RATES)
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
    config = wiki["get_config"]("rope")
    config.data.validation_fraction = 0.6  # 64 articles; the 42 others are read 1.7 times
    if size == "rates":
        config.num_steps = config.eval_every = 300
    if size == "python":
        config.data.dataset = "python_source"
        config.data.data_dir = ""
        config.data.validation_fraction = 0.25  # 11 of 43 files
    config.optimizer.learning_rate = BEST_RATES[method]
    config.model.update(encoding(method, config.model, config.data.seq_len))
    return sized(config, "tiny" if size == "tiny" else "full")


def get_sweep(argument: str = "full"):
    method, size = wiki["parse"](argument, METHODS, SIZES)
    methods = METHODS if argument in SIZES else (method,)
    suffix = "" if size == "full" else f"-{size}"
    files = {"config": tuple(f"{__file__}:{name}{suffix}" for name in methods)}
    rates = {"optimizer.learning_rate": RATES} if size == "rates" else {}
    return {"seed": SEEDS[size]} | files | rates
