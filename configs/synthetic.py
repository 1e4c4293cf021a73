"""The paper's Table 1 in minutes: which encoding can attend by position, which by meaning.

What       93,000 parameters on synthetic/mix, generated as it is read: repeat the letter that stood
           1 to 4 tokens before (positional), and give the value of a key set anywhere before
           (semantic); see prope/data/tasks/README.md. Over a window of training the slowest pair
           turns by 1.7 radians (in the paper: 0.9), over one eight times as long by 14.
Command    python launch/sweep.py --config=configs/synthetic.py --workdir=W \\
               --rope_percentage=0,0.75,1 --grid=seed=0,1,2
           python -m prope.evaluate --workdir=W --seq_len=1x,2x,4x,8x --max_windows=128
           python -m prope.report --sweep=W
Hardware   Two CPU cores and 1 GB of memory.
Hours      0.03 a run: 2,048,000 tokens at 20,000 tokens/s, and the start.
Expected   configs/results/synthetic.md: right answers in % by length of the window.
"""

from prope.config import default_config, shrink_for_laptop


def get_config(size: str = "full"):
    config = default_config()
    config.num_steps = 500
    config.batch_size = 32  # sequences, so 4096 tokens, of which 370 are answers
    config.accumulation = 1
    config.seed = 0
    config.log_every = 100
    config.eval_every = 500
    config.checkpoint_every = 500

    config.model.num_layers = 2
    config.model.embed_dim = 64
    config.model.num_heads = 2
    config.model.num_kv_heads = 2
    config.model.head_dim = 32
    config.model.hidden_dim = 128
    config.model.vocab_size = 168  # tokens of synthetic data
    config.model.max_wavelength = 100.0
    config.model.rope_percentage = 0.75
    config.model.dtype = "float32"
    config.model.scan_layers = False

    config.data.dataset = "synthetic/mix"
    config.data.seq_len = 128

    config.optimizer.learning_rate = 3e-3
    config.optimizer.final_learning_rate = 3e-5
    config.optimizer.warmup_steps = 100
    config.optimizer.b2 = 0.98
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_norm = 1.0

    config.eval.batch_size = 64
    return shrink_for_laptop(config, size)
