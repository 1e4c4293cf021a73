"""Gemma 2B from scratch on English Wikipedia: the run of Barbero et al. (ICLR 2025), section 6 and appendix C.

What       One row of the paper's Table 2 for each value of rope_percentage. Validation perplexity there, on its own
           split of the same dump, 8192 tokens, wavelength 10 000:
               NoPE (p = 0) 4.8594   p = 0.25: 4.5302   p = 0.75: 4.4414   RoPE (p = 1) 4.4627
Command    python -m prope.train --config=configs/gemma_2b_wiki.py --workdir=W \
               --config.data.data_dir=gs://tfds-data/datasets \
               --config.data.tokenizer=gs://gemma-data/tokenizers/tokenizer_gemma2.model
           Both are public: wikipedia/20230601.en as TFDS prepares it (21 GB), and Gemma's tokenizer. Copies
           on a disk do as well. launch/README.md has every command on a pod. To try the plumbing on a laptop first, in
           seconds: --config=configs/gemma_2b_wiki.py:tiny
Hardware   A slice of 64 TPU v5p, or of 256 v5e; 8 nodes of 8 H100 with 80 GB. To see first what fits, on any machine:
           python -m prope.plan --config=configs/gemma_2b_wiki.py --topology=v5p:4x4x4
           512 sequences on 64 v5p are 8 a chip, computed in two parts: 59 GB of 103 (compiled, not run); on 64 H100
           give --config.accumulation=4: 44 GB of 78, the share that launch/run.sh gpu takes; on 256 v5e, 2 a chip,
           give --config.accumulation=1 --config.model.remat=save_qkv: 11 GB of 17.
Hours      42 billion tokens, about 7.1e20 FLOPs: 12 hours on 64 v5p at 55 % of their peak. Computed, not measured.
Expected   Not yet run at this size. The paper's text does not survive with three of its numbers, which are assumed
           here and marked so: the steps, the batch and the share of validation documents. The learning rate and its
           schedule, which the paper does not give, are ours.
"""

from prope.config import default_config, sized


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
    return sized(config, size)
