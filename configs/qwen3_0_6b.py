"""Qwen3 0.6B on English Wikipedia: onwards from Alibaba's checkpoint, or from scratch.

What       The decoder of Qwen/Qwen3-0.6B-Base, 596,049,920 parameters, with the training of
           gemma_300m_wiki.py: windows of 2048 tokens. Its own: 32,768.
Command    python -m prope.import_hf --input=Qwen/Qwen3-0.6B-Base --workdir=W0
           python -m prope.train --config=configs/qwen3_0_6b.py --workdir=W --init_from=W0 \\
               --config.data.data_dir=DATA --config.data.tokenizer=W0/tokenizer
           DATA as in gemma_2b_wiki.py; from scratch without --init_from,
           with the same tokenizer.
Hardware   One H100 with 80 GB.
Hours      3.9 billion tokens, about 1.7e19 FLOPs: 12 on one H100 at 40 % of its peak. Computed.
Expected   Not yet run. The learning rate is ours.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

families = runpy.run_path(str(pathlib.Path(__file__).with_name("families.py")))


def get_config(size: str = "full"):
    config = families["on_wikipedia"]()
    config.optimizer.learning_rate = 3e-4
    config.optimizer.final_learning_rate = 3e-5
    families["qwen3"](config)
    config.model.num_layers = 28
    config.model.embed_dim = 1024
    config.model.num_heads = 16
    config.model.num_kv_heads = 8
    config.model.head_dim = 128
    config.model.hidden_dim = 3072
    config.model.vocab_size = 151_936
    return shrink_for_laptop(config, size)
