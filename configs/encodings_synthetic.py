"""The encodings of encodings_wiki.py on the tasks of synthetic.py: copying by position, recalling by meaning.

What       synthetic.py in 14 encodings, 3 seeds each: 16 pairs a head, wavelength 100, windows of 128 tokens. Names are
           those of encodings_wiki.py, without rnope_swa, whose pattern takes four layers. Here cutoff_1 rotates 11
           pairs and cutoff_0.5 9, cope tapers 3, and the wavelength of base_bound is 1030.
Command    python launch/sweep.py --config=configs/encodings_synthetic.py --workdir=W
           python -m prope.evaluate --workdir=W --seq_len=1x,2x,4x,8x --max_windows=128
           python -m prope.report --sweep=W
           encodings_synthetic.py:cope is one encoding; :rates has 3 learning rates, and :tiny tries the plumbing.
Hardware   Two CPU cores and 1 GB of memory.
Hours      1.3: 42 runs of 2 minutes, as synthetic.py's; :rates the same, for a task is learnt all at once, so that
           fewer steps would tell little. Computed, not measured.
Expected   Not yet run. synthetic.py has the results of nope, p_rope_0.75 and rope.
"""

import pathlib
import runpy

from prope.config import sized

synthetic, wiki = (
    runpy.run_path(str(pathlib.Path(__file__).with_name(f"{name}.py"))) for name in ("synthetic", "encodings_wiki")
)
LEARNING_RATES = {  # at the peak; 3e-3, synthetic.py's, until they are measured
    "rope": 3e-3, "nope": 3e-3, "p_rope_0.25": 3e-3, "p_rope_0.5": 3e-3, "p_rope_0.75": 3e-3,
    "partial_0.25": 3e-3, "partial_0.5": 3e-3, "partial_0.75": 3e-3, "cutoff_1": 3e-3, "cutoff_0.5": 3e-3,
    "cope": 3e-3, "rope_id": 3e-3, "base_length": 3e-3, "base_bound": 3e-3,
}  # fmt: skip
SIZES = ("full", "tiny", "rates")


def get_config(argument: str = "full"):
    method, size = wiki["parse"](argument, LEARNING_RATES, SIZES)
    config = synthetic["get_config"]()
    config.optimizer.learning_rate = LEARNING_RATES[method]
    config.model.rope_percentage = 1.0
    config.model.update(wiki["encoding"](method, config.model, config.data.seq_len))
    return sized(config, "tiny" if size == "tiny" else "full")


def get_sweep(argument: str = "full"):
    return wiki["sweep"](__file__, argument, LEARNING_RATES, SIZES)
