"""Llama 3.2 1B at 8192 tokens on English Wikipedia.

What       The decoder of meta-llama/Llama-3.2-1B, 1,235,814,400 parameters, with its scaling from
           8192 to 131,072 tokens. The training of gemma_300m_wiki.py, with batches of 1 M tokens.
Command    python -m prope.import_hf --input=meta-llama/Llama-3.2-1B --workdir=W0
           python -m prope.train --config=configs/llama32_1b.py --workdir=W --init_from=W0 \\
               --config.data.data_dir=DATA --config.data.tokenizer=W0/tokenizer
           DATA as in gemma_2b_wiki.py; from scratch without --init_from,
           with the same tokenizer.
Hardware   16 TPU v5e, 16.6 of the 16.9 GB of each, or 8 H100, 48 of the 78 GB of each; compiled.
Hours      15.7 billion tokens, about 1.4e20 FLOPs: 31 on 16 v5e, 12 on 8 H100, at 40 %
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
    config.data.seq_len = 8192
    config.optimizer.learning_rate = 3e-4
    config.optimizer.final_learning_rate = 3e-5
    config.eval.max_windows = 256
    families["llama"](config)
    config.model.max_wavelength = 5e5
    config.model.rope_scaling_type = "llama3"
    config.model.rope_scaling_factor = 32.0
    config.model.original_seq_len = 8192
    config.model.num_layers = 16
    config.model.embed_dim = 2048
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.head_dim = 64
    config.model.hidden_dim = 8192
    config.model.vocab_size = 128_256
    config.model.remat = "save_qkv"
    return shrink_for_laptop(config, size)
