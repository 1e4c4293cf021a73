"""Gemma 3 270M on English Wikipedia: onwards from Google's checkpoint, or from scratch.

What       The decoder of google/gemma-3-270m, 268,098,176 parameters, with the training of
           gemma_300m_wiki.py: windows of 2048 tokens, four of its sliding layers'. Its own: 32,768.
Command    python -m prope.import_hf --input=google/gemma-3-270m --workdir=W0
           python -m prope.train --config=configs/gemma3_270m.py --workdir=W --init_from=W0 \\
               --config.data.data_dir=DATA --config.data.tokenizer=W0/tokenizer
           DATA as in gemma_2b_wiki.py; from scratch without --init_from,
           with the same tokenizer.
Hardware   One H100 with 80 GB.
Hours      3.9 billion tokens, about 6.8e18 FLOPs: 5 on one H100 at 40 % of its peak. Computed.
Expected   Not yet run. The learning rate is ours.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

families = runpy.run_path(str(pathlib.Path(__file__).with_name("families.py")))


def get_config(size: str = "full"):
    config = families["on_wikipedia"]()
    config.data.bos_every_window = True  # as the checkpoint was trained
    config.optimizer.learning_rate = 3e-4
    config.optimizer.final_learning_rate = 3e-5
    families["gemma3"](config)
    config.model.num_layers = 18
    config.model.embed_dim = 640
    config.model.num_heads = 4
    config.model.num_kv_heads = 1
    config.model.head_dim = 256
    config.model.hidden_dim = 2048
    config.model.vocab_size = 262_144
    return shrink_for_laptop(config, size)
