"""Gemma 2B from scratch on English Wikipedia: the run of Barbero et al. (ICLR 2025), section 6.

What       One row of the paper's Table 2 for each rope_percentage: configs/table2.py has them all.
Command    python -m prope.train --config=configs/gemma_2b_wiki.py --workdir=W \\
               --config.data.data_dir=gs://tfds-data/datasets \\
               --config.data.tokenizer=gs://gemma-data/tokenizers/tokenizer_gemma2.model
           Both are public (21 GB); copies on a disk do as well. launch/README.md is about pods.
Hardware   64 TPU v5p: 59 GB of 103 a chip, by prope.plan --topology=v5p:4x4x4 (not run); 64 H100
           with --config.accumulation=4: 44 GB of 78; 256 v5e with --config.accumulation=1
           --config.model.remat=save_qkv: 11 GB of 17.
Hours      42 billion tokens, about 7.1e20 FLOPs: 12 on 64 v5p at 55 % of their peak. Computed.
Expected   Not yet run. Paper, validation perplexity: NoPE 4.8594, p = 0.25 4.5302, p = 0.75 4.4414,
           RoPE 4.4627. Steps, batch, validation share and learning rate are assumed: marked below.
"""

from prope.config import default_config, shrink_for_laptop


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

    config.data.dataset = "wikipedia/20230601.en"
    config.data.data_dir = "data"
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
