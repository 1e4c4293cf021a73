"""Gemma 3 1B at its own length, 32,768 tokens, on English Wikipedia.

What       The decoder of google/gemma-3-1b-pt, 999,885,952 parameters: 22 of its 26 layers see 512
           tokens. The training of gemma_300m_wiki.py, with batches of 1 M tokens.
Command    python -m prope.import_hf --input=google/gemma-3-1b-pt --workdir=W0
           python -m prope.train --config=configs/gemma3_1b.py --workdir=W --init_from=W0 \\
               --config.data.data_dir=DATA --config.data.tokenizer=W0/tokenizer
           DATA as in gemma_2b_wiki.py; from scratch without --init_from,
           with the same tokenizer.
Hardware   8 H100: 56 of the 78 GB of each, compiled. 16 TPU v5e need 20.2 of the 16.9 GB of each,
           compiled: about 4 GB less with --config.model.remat=full, computed.
Hours      15.7 billion tokens, about 1.1e20 FLOPs: 24 on 16 v5e, 10 on 8 H100, at 40 %
           of their peak. Computed.
Expected   Not yet run. The learning rate is ours.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

families = runpy.run_path(str(pathlib.Path(__file__).with_name("families.py")))


def get_config(size: str = "full"):
    config = families["on_wikipedia"]()
    config.data.bos_every_window = True  # as the checkpoint was trained
    config.batch_size = 32  # sequences, so 1 M tokens
    config.data.seq_len = 32_768
    config.optimizer.learning_rate = 3e-4
    config.optimizer.final_learning_rate = 3e-5
    config.eval.batch_size = 16
    config.eval.max_windows = 64
    families["gemma3"](config)
    config.model.num_layers = 26
    config.model.embed_dim = 1152
    config.model.num_heads = 4
    config.model.num_kv_heads = 1
    config.model.head_dim = 256
    config.model.hidden_dim = 6912
    config.model.vocab_size = 262_144
    config.model.remat = "save_qkv"
    return shrink_for_laptop(config, size)
