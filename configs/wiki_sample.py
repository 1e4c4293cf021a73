"""p-RoPE on a sample of Wikipedia, byte by byte, on a laptop's CPU: five values of p, three seeds.

What       1.0 M parameters on windows of 512 bytes: the paper's comparison at a size that two cores
           train in minutes. Differences between p are small at this size, hence three seeds.
Command    python launch/sweep.py --config=configs/wiki_sample.py --workdir=W \\
               --config.data.data_dir=DATA
           python -m prope.evaluate --workdir=W --seq_len=1x,2x,4x,8x --max_windows=48
           python -m prope.report --sweep=W
           DATA holds wikipedia/20230601.en in TFDS's layout, whole or a few articles under that
           name; with a whole Wikipedia give --config.eval.max_windows=512.
Hardware   Two CPU cores and 2 GB of memory.
Hours      0.9: 15 runs of 3.5 minutes, at 12,500 tokens/s; computed from one of them.
Expected   On 106 articles of May 2016: configs/results/wiki_sample.md.
"""

from prope.config import default_config, shrink_for_laptop


def get_config(size: str = "full"):
    config = default_config()
    config.num_steps = 1200
    config.batch_size = 4  # sequences, so 2048 tokens: small batches learn most from few tokens
    config.accumulation = 1
    config.seed = 0
    config.log_every = 25
    config.eval_every = 600
    config.checkpoint_every = 100

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

    config.data.dataset = "wikipedia/20230601.en"
    config.data.data_dir = "data"
    config.data.tokenizer = "byte"
    config.data.seq_len = 512
    config.data.mask_documents = False
    config.data.validation_fraction = 0.1

    config.optimizer.learning_rate = 3e-3
    config.optimizer.final_learning_rate = 3e-5
    config.optimizer.warmup_steps = 100
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0

    config.eval.batch_size = 16
    return shrink_for_laptop(config, size)


def get_sweep(size: str = "full"):
    return {"seed": (0, 1, 2), "model.rope_percentage": (0, 0.25, 0.5, 0.75, 1)}
