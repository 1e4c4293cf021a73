"""Fifteen position encodings on a sample of Wikipedia: p-RoPE beside its rivals, from equal weights and batches.

What       wiki_sample.py in each encoding, 3 seeds each, in 700 steps. They differ in nothing else. 32 pairs a head,
           wavelength 10 000; "length" is that of a window, 512 bytes:
               rope, nope, p_rope_*   p = 1, with which the report compares all others; p = 0; and p between them
               partial_*              RoPE of a share of the lanes, whose wavelengths span it (GPT-NeoX)
               cutoff_1, cutoff_0.5   pairs that turn once in length, or twice (FoPE, HoPE): 16 and 13 pairs, so that
                                      cutoff_1 is p_rope_0.5 here; not so at other lengths
               cope                   11 pairs, 69 % of those that do not turn once in length, tapered to 0 (CoPE);
                                      its larger wavelength is left out
               rope_id                half of the pairs, from a turn in 32 tokens to two turns in length (RoPE-ID); its
                                      factor on the logits of longer windows is left out
               base_length            wavelength = length (FMRoPE); another one in longer windows is left out
               base_bound             the least wavelength with which the sum of the pairs' cosines is negative at no
                                      distance within length (2405.14591): 3441
               rnope_swa              three RoPE layers that see length / 4 tokens, then one that sees all and does
                                      not rotate
Command    python launch/sweep.py --config=configs/encodings_wiki.py --workdir=W --config.data.data_dir=DATA
           python -m prope.evaluate --workdir=W --seq_len=1x,2x,4x,8x --max_windows=48
           python -m prope.report --sweep=W
           DATA as in wiki_sample.py; encodings_wiki.py:cope is one encoding, :cope-long one of another size:
               :rates   300 steps with 3 learning rates: 1e-3, 3e-3 and 6e-3
               :long    windows of 1024, half as many a step; every encoding goes by this length. For the best alone:
                        --grid=config=configs/encodings_wiki.py:rope-long,configs/encodings_wiki.py:cope-long \
                        --grid=seed=0,1,2
               :tiny    tries the plumbing, one seed
           Longer windows by rescaling: prope.evaluate --workdir=W/config=rope,seed=0 --seq_len=2x,4x --encoding=yarn;
           rope_id has no wavelength to rescale
Hardware   Two CPU cores and 2 GB of memory.
Hours      2.6: 45 runs of 3.5 minutes, as wiki_sample.py's; :rates 0.7. Computed, not measured.
Expected   Not yet run. wiki_sample.py has the results of rope, nope and p_rope_*.
"""

import pathlib
import runpy

from prope.config import sized
from prope.encodings import cutoff_frequencies, least_wavelength

METHODS = (
    "rope", "nope", "p_rope_0.25", "p_rope_0.5", "p_rope_0.75", "partial_0.25", "partial_0.5", "partial_0.75",
    "cutoff_1", "cutoff_0.5", "cope", "rope_id", "base_length", "base_bound", "rnope_swa",
)  # fmt: skip
SIZES = ("full", "tiny", "long", "rates")

wiki_sample = runpy.run_path(str(pathlib.Path(__file__).with_name("wiki_sample.py")))


def parse(argument, methods, sizes):
    """Reads METHOD, SIZE or METHOD-SIZE; returns (method, size)."""
    method, _, size = f"rope-{argument}".partition("-") if argument in sizes else argument.partition("-")
    size = size or "full"
    if method not in methods or size not in sizes:
        raise ValueError(f"{argument}: must be a method ({', '.join(methods)}), a size ({', '.join(sizes)}) or both")
    return method, size


def encoding(method, model, length):
    """Returns the fields of config.model that make a method of RoPE, in training at this length."""
    complete = int((cutoff_frequencies(model.head_dim, model.max_wavelength, length) > 0).sum())
    bound = least_wavelength(model.head_dim, length) if method == "base_bound" else None  # takes half a second
    return {
        "rope": {},
        "nope": {"rope_percentage": 0.0},
        "p_rope_0.25": {"rope_percentage": 0.25},
        "p_rope_0.5": {"rope_percentage": 0.5},
        "p_rope_0.75": {"rope_percentage": 0.75},
        "partial_0.25": {"rope_type": "partial", "rope_percentage": 0.25},
        "partial_0.5": {"rope_type": "partial", "rope_percentage": 0.5},
        "partial_0.75": {"rope_type": "partial", "rope_percentage": 0.75},
        "cutoff_1": {"rope_type": "cutoff", "rope_cutoff": 1.0, "original_seq_len": length},
        "cutoff_0.5": {"rope_type": "cutoff", "rope_cutoff": 0.5, "original_seq_len": length},
        "cope": {"rope_type": "cope", "clip_low_n": max(round(0.69 * (model.head_dim // 2 - complete)), 2)},
        "rope_id": {"rope_type": "rope_id", "original_seq_len": length, "max_wavelength": 10_000.0},  # which it ignores
        "base_length": {"max_wavelength": float(length)},
        "base_bound": {"max_wavelength": bound},
        "rnope_swa": {
            "layer_types": ("sliding_attention",) * 3 + ("full_attention",), "sliding_window": length // 4,
            "rope_percentage": 0.0, "local_rope_percentage": 1.0,
        },
    }[method]  # fmt: skip


def get_config(argument: str = "full"):
    method, size = parse(argument, METHODS, SIZES)
    config = wiki_sample["get_config"]()
    config.optimizer.learning_rate = 6e-3  # of :rates, the best of every method but for 0.002
    config.num_steps = config.eval_every = 300 if size == "rates" else 700
    config.eval.max_windows = 256
    if size == "long":
        config.data.seq_len, config.batch_size, config.eval.max_windows = 1024, 2, 128
    config.model.rope_percentage = 1.0
    config.model.update(encoding(method, config.model, config.data.seq_len))
    return sized(config, "tiny" if size == "tiny" else "full")


def sweep(file, argument, methods, sizes):
    """Returns the grid of a page whose argument is a method, a size or both."""
    method, size = parse(argument, methods, sizes)
    suffix = "" if size == "full" else f"-{size}"
    files = {"config": tuple(f"{file}:{m}{suffix}" for m in (methods if argument in sizes else (method,)))}
    if size == "rates":
        return files | {"optimizer.learning_rate": (1e-3, 3e-3, 6e-3)}
    return files | {"seed": (0,) if size == "tiny" else (0, 1, 2)}


def get_sweep(argument: str = "full"):
    return sweep(__file__, argument, METHODS, SIZES)
