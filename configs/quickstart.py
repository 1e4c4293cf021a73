"""p-RoPE on a laptop's CPU in two minutes: byte by byte over Python's own documentation.

What       1.0 M parameters on 2 MB of English prose that every Python carries; nothing is
           downloaded. The run of launch/quickstart.sh, and the one to copy for your own experiment.
Command    python -m prope.train --config=configs/quickstart.py --workdir=W
Hardware   Two CPU cores and 2 GB of memory.
Hours      0.03: 100 seconds of training at 14,000 tokens/s.
Expected   Validation loss 1.45 nats per byte, 2.09 bits per byte (token frequencies alone: 4.73).
           On an x86 CPU with AVX-512: other processors round elsewhere, and Python's versions
           differ in their documentation, so a second digit differs between them.
           configs/results/quickstart.md has the loss by position out to 131,072 bytes.
"""

from prope.config import default_config, shrink_for_laptop


def get_config(size: str = "full"):
    config = default_config()
    config.num_steps = 700
    config.batch_size = 8  # sequences, so 2048 tokens: small batches learn most from few tokens
    config.accumulation = 1
    config.seed = 0
    config.log_every = 20
    config.eval_every = 350
    config.checkpoint_every = 350

    config.model.num_layers = 4
    config.model.embed_dim = 128
    config.model.num_heads = 2
    config.model.num_kv_heads = 1
    config.model.head_dim = 64
    config.model.hidden_dim = 512
    config.model.vocab_size = 260  # 256 bytes and 4 special tokens
    config.model.max_wavelength = 10_000.0
    config.model.rope_percentage = 0.75
    config.model.dtype = "float32"  # a CPU is slower in bfloat16
    config.model.scan_layers = False  # unrolled is faster here, and compiles in seconds

    config.data.dataset = "python_docs"
    config.data.tokenizer = "byte"
    config.data.seq_len = 256
    config.data.mask_documents = False
    config.data.validation_fraction = 0.05

    config.optimizer.learning_rate = 3e-3
    config.optimizer.final_learning_rate = 3e-5
    config.optimizer.warmup_steps = 50
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0

    config.eval.batch_size = 16
    return shrink_for_laptop(config, size)
