"""Do lanes without rotation help retrieval beyond the length of training, or pairs that are fast?

What       9.4 M parameters, bytes, windows of 2048, six encodings. Four are a square: all lanes
           rotate, or 11 of 32 pairs do not (`unrotated`); some pairs never turn once in a window
           (`slow`), or all do. Then the paper's p = 0.75 and 0.25. 70 % of the windows are text in
           which context pays, 30 % longcontext/mix. Encodings and seeds train in one program,
           vmapped; every run is then an ordinary one.

           slow, all rotate      rope         theta 10,000
           slow, unrotated       partial      21 pairs from 6 to 40,000 tokens a turn
           none, all rotate      fast         32 pairs, theta (L / 2 pi)^(32 / 31)
           none, unrotated       p_rope       the 21 fastest of theta 10,000: p = 21 / 32
Command    python configs/results/unrotated_or_fast.py pack --source=LINUX.tar.xz --output=DATA
           timeout 480 python configs/results/unrotated_or_fast.py train --workdir=W --data=DATA
           The second again goes on, and then adds four seeds. configs/results/unrotated_or_fast.md
           has the evaluations. --size=pilot is for a CPU: 0.3 M parameters, windows of 256.
Hardware   One H100 or H200 with 80 GB. The pilot: one CPU core and 3 GB of memory.
Hours      8 minutes for 24 models of 24 M tokens, computed at 1.8 M tokens/s; not run on a GPU.
Expected   configs/results/unrotated_or_fast.md: what is declared, and a pilot of 60
           steps; not yet run at this size.
"""

import math

from prope.config import default_config, shrink_for_laptop
from prope.encodings import cutoff_frequencies

ARMS = ("rope", "fast", "partial", "p_rope", "p_rope_0.75", "p_rope_0.25")
SIZES = ("full", "pilot", "tiny")


def encoding(arm: str, model, length: int) -> dict:
    """Returns the fields of config.model that make an arm, in training at this length."""
    pairs = model.head_dim // 2
    turning = cutoff_frequencies(model.head_dim, model.max_wavelength, length) > 0
    p = int(turning.sum()) / pairs
    return {
        "rope": {},
        "fast": {"max_wavelength": (length / (2 * math.pi)) ** (pairs / (pairs - 1))},
        "partial": {"rope_type": "partial", "rope_percentage": p},
        "p_rope": {"rope_percentage": p},
        "p_rope_0.75": {"rope_percentage": 0.75},
        "p_rope_0.25": {"rope_percentage": 0.25},
    }[arm]


def get_config(argument: str = "rope"):
    """Makes the config of ARM, SIZE or ARM-SIZE."""
    arm, _, size = argument.partition("-") if argument not in SIZES else ("rope", "", argument)
    size = size or "full"
    if arm not in ARMS or size not in SIZES:
        allowed = f"{', '.join(ARMS)}; {', '.join(SIZES)}; or both as in rope-pilot"
        raise ValueError(f"{argument}: must be one of {allowed}")
    config = default_config()
    config.num_steps = 1464  # of 8 windows of 2048: 24 M tokens
    config.batch_size = 8
    config.seed = 0
    config.log_every = 50
    config.eval_every = config.checkpoint_every = 366

    config.model.num_layers = 6
    config.model.embed_dim = 384
    config.model.num_heads = 6
    config.model.num_kv_heads = 2
    config.model.head_dim = 64
    config.model.hidden_dim = 1024
    config.model.vocab_size = 260  # bytes and 4 special tokens
    config.model.max_wavelength = 10_000.0
    config.model.rope_percentage = 1.0
    config.model.use_qk_norm = True
    config.model.dtype = "bfloat16"
    config.model.remat = "minimal"

    config.data.tokenizer = "byte"
    config.data.seq_len = 2048
    config.data.mask_documents = False

    config.optimizer.learning_rate = 2e-3
    config.optimizer.final_learning_rate = 2e-5
    config.optimizer.warmup_steps = 100
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    if size == "pilot":
        config.num_steps = config.eval_every = config.checkpoint_every = 60
        config.log_every = 20
        config.batch_size = 4
        config.model.num_layers = 4
        config.model.embed_dim = 64
        config.model.num_heads = 2
        config.model.num_kv_heads = 1
        config.model.hidden_dim = 256
        config.model.dtype = "float32"
        config.model.remat = "none"
        config.data.seq_len = 256
        config.optimizer.warmup_steps = 10
    text = {"weight": 0.7, "dataset": "files", "data_dir": "data"}
    tasks = {"weight": 0.3, "dataset": "longcontext/mix", "data_dir": ""}
    config.data.dataset = "mixture"
    config.data.mixture = (text, tasks)
    shrink_for_laptop(config, "tiny" if size == "tiny" else "full")
    config.model.update(encoding(arm, config.model, config.data.seq_len))
    return config


def get_sweep(argument: str = "full"):
    suffix = "" if argument == "full" else f"-{argument}"
    configs = tuple(f"{__file__}:{arm}{suffix}" for arm in ARMS)
    return {"seed": (0,) if argument == "tiny" else (0, 1, 2, 3), "config": configs}
