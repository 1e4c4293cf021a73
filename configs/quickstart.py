"""p-RoPE on a laptop's CPU in two minutes: byte by byte over Python's own documentation.

What       1.0 M parameters on 2 MB of English prose that every Python carries; nothing is downloaded. The run that
           launch/quickstart.sh makes, and the one to copy for an experiment of your own.
Command    python -m prope.train --config=configs/quickstart.py --workdir=W
Hardware   Two CPU cores and 2 GB of memory.
Hours      0.03: 100 seconds of training at 14,000 tokens/s.
Expected   Validation loss 1.45 nats per byte, 2.09 bits per byte (token frequencies alone: 4.73). Python's versions
           differ in their documentation, so a second digit differs between them.
Length     Of four values of p, one seed each, read on to 131,072 bytes, 512 times the length of training:
               python -m prope.evaluate --workdir=W --seq_len=131072 --split=all --max_windows=1
           5 minutes of a core and 3.0 GB a run (2026-11-23). Loss in nats per byte by position, mostly of known text:
                        up to 1k   to 2k   4k to 8k   16k to 32k   64k to 128k
               p = 0        2.50    2.56       2.53         2.53          2.57
               p = 0.5      1.37    1.88       2.81         3.38          3.66
               p = 0.75     1.50    2.44       3.16         3.52          3.74
               p = 1        1.50    2.36       3.32         3.63          3.81
           p = 0.5, whose slowest pair turns once in 471 bytes, breaks as the others do, only later.
"""

from prope.config import default_config, sized


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
    return sized(config, size)
