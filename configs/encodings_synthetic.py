"""The encodings of encodings_wiki.py on the tasks of synthetic.py: copying by position, recalling by meaning.

What       synthetic.py in 14 encodings, 3 seeds each: 16 pairs a head, wavelength 100, windows of 128 tokens. Names are
           those of encodings_wiki.py, without rnope_swa, whose pattern takes four layers. Here cutoff_1 rotates 11
           pairs and cutoff_0.5 9, cope tapers 3, and the wavelength of base_bound is 1030.
Command    python launch/sweep.py --config=configs/encodings_synthetic.py --workdir=W
           python -m prope.evaluate --workdir=W --seq_len=1x,2x,4x,8x --max_windows=128
           python -m prope.report --sweep=W
           encodings_synthetic.py:cope is one encoding; :rates has 3 learning rates, not yet run, for a task is learnt
           all at once, so that fewer steps would tell little; :tiny tries the plumbing.
Hardware   Two CPU cores and 1 GB of memory.
Hours      0.5: 42 runs of 50 to 75 seconds on one core, two at a time; measured beside tests.
Expected   Right answers in %, by length of the window (guessing: 12.5); means of 3 seeds, 128 windows. At the length
           of training all but nope copy 100 %, and all recall 96 to 100 %:

                          pairs   copy: 4x     8x     recall: 2x     4x     8x
           rope              16       99.4   96.0           67.8   43.3   29.9
           nope               0       22.2   17.7          100.0   97.4   90.3
           p_rope_0.25        4       87.4   69.3          100.0   98.6   92.4
           p_rope_0.5         8       99.9   99.2          100.0   98.8   92.4
           p_rope_0.75       12       99.8   99.3           99.6   98.0   91.7
           partial_0.25       4       66.7   46.3           99.9   98.4   91.2
           partial_0.5        8       97.1   89.4           97.3   93.9   86.9
           partial_0.75      12       94.6   80.5           93.0   83.9   75.7
           cutoff_1          11       99.6   98.4           99.6   97.9   91.6
           cutoff_0.5         9       99.5   98.7          100.0   98.9   93.7
           cope              15       99.4   93.9           83.9   64.2   51.5
           rope_id            8      100.0  100.0           93.9   88.5   70.9
           base_length       16       94.8   87.0           74.3   48.5   33.2
           base_bound        16       99.5   95.6           92.3   73.1   55.7

           What stands, by paired differences of 3 seeds (95 % intervals): dropping the pairs that do not turn once in
           training, by p = 0.5 (0.75 keeps one) or a cutoff, recalls at 8x 62 to 64 points more than rope (from +45 on)
           and copies as well. Tapering or slowing them (cope, base_bound) gains 22 and 26. Partial rotary with as many
           pairs as p = 0.75, whose band has slow ones, recalls 16.0 less than p-RoPE (13.3 to 18.7) and copies 18.8
           less (1.2 to 36.4). What does not: p = 0.5, 0.75 and both cutoffs cannot be told apart, nor partial_0.5 from
           p_rope_0.5. One learning rate for all; one task of minutes, whose training length is 128.
"""

import pathlib
import runpy

from prope.config import sized

synthetic, wiki = (
    runpy.run_path(str(pathlib.Path(__file__).with_name(f"{name}.py")))
    for name in ("synthetic", "encodings_wiki")
)
METHODS = tuple(method for method in wiki["METHODS"] if method != "rnope_swa")
SIZES = ("full", "tiny", "rates")


def get_config(argument: str = "full"):
    method, size = wiki["parse"](argument, METHODS, SIZES)
    config = synthetic["get_config"]()
    config.model.rope_percentage = 1.0
    config.model.update(wiki["encoding"](method, config.model, config.data.seq_len))
    return sized(config, "tiny" if size == "tiny" else "full")


def get_sweep(argument: str = "full"):
    return wiki["sweep"](__file__, argument, METHODS, SIZES)
