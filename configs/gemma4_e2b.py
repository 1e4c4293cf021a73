"""Gemma 4 E2B on English Wikipedia: onwards from Google's checkpoint.

What       The text decoder of google/gemma-4-E2B, 4,628,569,379 parameters, of which 2.3 billion
           are looked up for the inputs of its layers; 20 of its 35 layers share keys and values.
           The training of gemma_300m_wiki.py. Its own length: 131,072.
Command    python -m prope.import_hf --input=google/gemma-4-E2B --workdir=W0
           python -m prope.train --config=configs/gemma4_e2b.py --workdir=W --init_from=W0 \\
               --config.data.data_dir=DATA --config.data.tokenizer=W0/tokenizer
           DATA as in gemma_2b_wiki.py; from scratch without --init_from,
           with the same tokenizer.
Hardware   8 H100, or 16 TPU v5e. On one H100 4 sequences fit, 75 of its 78 GB, compiled:
           --config.batch_size=4 --config.accumulation=1.
Hours      3.9 billion tokens, about 5.6e19 FLOPs: 5 on 8 H100, 12 on 16 v5e, at 40 % of their peak.
           Computed.
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
    families["gemma4"](config)
    config.model.num_layers = 35
    config.model.embed_dim = 1536
    config.model.num_heads = 8
    config.model.num_kv_heads = 1
    config.model.head_dim = 256
    config.model.hidden_dim = 6144
    config.model.vocab_size = 262_144
    config.model.layer_types = ("sliding_attention",) * 4 + ("full_attention",)
    config.model.sliding_window = 512
    config.model.num_kv_shared_layers = 20
    config.model.use_double_wide_mlp = True
    config.model.per_layer_input_dim = 256
    config.model.remat = "save_qkv"
    return shrink_for_laptop(config, size)
