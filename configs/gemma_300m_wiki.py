"""A 300 M decoder of Gemma's shape on English Wikipedia: p-RoPE's effect on one GPU, in hours.

What       The experiment of gemma_2b_wiki.py at a size that one GPU trains: 101 M parameters in 12
           layers and 197 M in the embedding, one KV head, 2048 tokens.
Command    python -m prope.train --config=configs/gemma_300m_wiki.py --workdir=W \\
               --config.data.data_dir=DATA --config.data.tokenizer=tokenizer.model
           DATA and tokenizer.model as in gemma_2b_wiki.py.
Hardware   One H100 with 80 GB: 38 GB in two parts, measured; 68 GB in one, by prope.plan (not run).
           On less memory config.accumulation of 4 or 8 changes no result.
Hours      3.9 billion tokens, about 7.5e18 FLOPs: 5.7 on one H100 for the steps alone, by 5
           measured at 37 % of its peak (2026-11-27).
Expected   Not yet run.
"""

from prope.config import default_config, shrink_for_laptop


def get_config(size: str = "full"):
    config = default_config()
    config.num_steps = 15_000
    config.batch_size = 128  # sequences, so 262 k tokens
    config.accumulation = 2
    config.seed = 0
    config.log_every = 10
    config.eval_every = 1000
    config.checkpoint_every = 500

    config.model.num_layers = 12
    config.model.embed_dim = 768
    config.model.num_heads = 6
    config.model.num_kv_heads = 1
    config.model.head_dim = 128
    config.model.hidden_dim = 3072
    config.model.vocab_size = 256_128
    config.model.max_wavelength = 10_000.0
    config.model.rope_percentage = 0.75
    config.model.dtype = "bfloat16"
    config.model.remat = "minimal"

    config.data.dataset = "wikipedia/20230601.en"
    config.data.data_dir = "data"
    config.data.tokenizer = "tokenizer.model"
    config.data.seq_len = 2048
    config.data.mask_documents = False
    config.data.validation_fraction = 0.1  # as in gemma_2b_wiki.py

    config.optimizer.learning_rate = 1e-3
    config.optimizer.final_learning_rate = 1e-4
    config.optimizer.warmup_steps = 500
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0

    config.eval.batch_size = 32
    config.eval.max_windows = 1024
    return shrink_for_laptop(config, size)
