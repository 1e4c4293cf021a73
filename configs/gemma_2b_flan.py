"""Gemma 2B from scratch on FlanV2: the other run of Barbero et al. (ICLR 2025), section 6.

What       One row of the paper's Table 2 for each rope_percentage.
Command    python -m prope.train --config=configs/gemma_2b_flan.py --workdir=W \\
               --config.data.tokenizer=tokenizer.model
           from the folder that holds data/flan_v2, with Gemma's tokenizer;
           configs/results/gemma_2b.md brings the data and says what is assumed of it.
Hardware   As gemma_2b_wiki.py: a slice of 64 TPU v5p or, with the flags there, of 256 v5e or 64
           H100.
Hours      42 billion tokens, about 7.1e20 FLOPs: 12 on 64 v5p at 55 % of their peak. Computed.
Expected   Not yet run. Paper, validation perplexity: NoPE 6.6429, p = 0.25 6.5111, p = 0.75 6.4422,
           RoPE 6.4429.
"""

from prope.config import default_config, shrink_for_laptop

WEIGHTS = {"flan2021": 0.40, "t0": 0.32, "niv2": 0.20, "cot": 0.05, "dialog": 0.03}


def get_config(size: str = "full"):
    config = default_config()
    config.num_steps = 10_000  # assumed
    config.batch_size = 512  # assumed; sequences, so 4.2 M tokens
    config.accumulation = 2
    config.seed = 0
    config.log_every = 10
    config.eval_every = 500
    config.checkpoint_every = 500

    config.model.num_layers = 18
    config.model.embed_dim = 2048
    config.model.num_heads = 8
    config.model.num_kv_heads = 1
    config.model.head_dim = 256
    config.model.hidden_dim = 16_384
    config.model.vocab_size = 256_128  # Gemma's 256,000 and padding that divides well
    config.model.max_wavelength = 10_000.0
    config.model.rope_percentage = 0.75  # the paper's best
    config.model.dtype = "bfloat16"
    config.model.remat = "minimal"

    config.data.dataset = "mixture"
    config.data.mixture = tuple(
        {"weight": weight, "dataset": "files", "data_dir": f"data/flan_v2/{part}"}
        for part, weight in WEIGHTS.items()
    )
    config.data.template = "{inputs}\n{targets}"  # assumed
    config.data.loss_on = "all"  # assumed
    config.data.tokenizer = "tokenizer.model"
    config.data.seq_len = 8192
    config.data.mask_documents = False
    config.data.validation_fraction = 0.1  # assumed

    config.optimizer.learning_rate = 3e-4
    config.optimizer.final_learning_rate = 3e-5
    config.optimizer.warmup_steps = 500
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0

    config.eval.batch_size = 64
    config.eval.max_windows = 1024  # 8.4 M tokens while training; prope.evaluate takes all
    return shrink_for_laptop(config, size)
