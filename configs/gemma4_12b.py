"""Gemma 4 12B at 32,768 tokens on English Wikipedia.

What       The text decoder of google/gemma-4-12B, 11,907,350,320 parameters: 40 of its 48 layers
           see 1024 tokens. The training of gemma_300m_wiki.py, with batches of 2 M tokens.
Command    python -m prope.import_hf --input=google/gemma-4-12B --workdir=W0
           python -m prope.train --config=configs/gemma4_12b.py --workdir=W --init_from=W0 \\
               --config.data.data_dir=DATA --config.data.tokenizer=W0/tokenizer
           DATA as in gemma_2b_wiki.py; from scratch without --init_from,
           with the same tokenizer.
Hardware   64 TPU v5p, 41 of the 103 GB of each, or 64 H100, 67 of the 78 GB of each. Compiled,
           which takes half an hour for v5p.
Hours      4.2 billion tokens, about 3.6e20 FLOPs: 9 on 64 v5p at 40 % of their peak. Computed.
Expected   Not yet run. The learning rate is ours.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

families = runpy.run_path(str(pathlib.Path(__file__).with_name("families.py")))


def get_config(size: str = "full"):
    config = families["on_wikipedia"]()
    config.data.bos_every_window = True  # as the checkpoint was trained
    config.num_steps = 2000
    config.batch_size = 64  # sequences, so 2 M tokens
    config.accumulation = 1
    config.data.seq_len = 32_768
    config.optimizer.learning_rate = 3e-4
    config.optimizer.final_learning_rate = 3e-5
    config.optimizer.warmup_steps = 100
    config.eval_every = 200
    config.checkpoint_every = 100
    config.eval.batch_size = 64
    config.eval.max_windows = 64
    families["gemma4"](config)
    config.model.num_layers = 48
    config.model.embed_dim = 3840
    config.model.num_heads = 16
    config.model.num_kv_heads = 8
    config.model.num_global_kv_heads = 1
    config.model.global_key_is_value = True
    config.model.head_dim = 256
    config.model.hidden_dim = 15360
    config.model.vocab_size = 262_144
    config.model.remat = "full"
    return shrink_for_laptop(config, size)
