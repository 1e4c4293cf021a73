"""Gemma 2B at 1,048,576 tokens: the run of gemma_2b_128k.py, trained on 8 times longer windows.

What       A third stage by --init_from. Wavelength 10,000,000 and p = 0.75, by the rule of
           gemma_2b_128k.py: the slowest pair that rotates turns once in 985,127 tokens.
Command    python -m prope.train --config=configs/gemma_2b_1m.py --workdir=W --init_from=W128K \\
               --config.data.data_dir=gs://tfds-data/datasets \\
               --config.data.tokenizer=gs://gemma-data/tokenizers/tokenizer_gemma2.model
Hardware   512 TPU v5p, 128 chips a sequence: 46 GB of 103 a chip, by prope.plan
           --topology=v5p:8x8x8 (not run); 64 H200 with --config.mesh.context=8
           --config.batch_size=8 --config.model.remat=save_qkv: 75 GB of 139.
Hours      1.05 billion tokens, about 2.6e20 FLOPs, 94 % of them attention: 0.6 on 512 v5p at 55 %
           of their peak. Computed.
Expected   Not yet run. The steps and the learning rate are ours.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

shorter = runpy.run_path(str(pathlib.Path(__file__).with_name("gemma_2b_128k.py")))


def get_config(size: str = "full"):
    config = shorter["get_config"]()
    config.num_steps = 250
    config.batch_size = 4  # sequences, so 4.2 M tokens as before
    config.accumulation = 1
    config.eval_every = 50
    config.checkpoint_every = 50

    config.model.max_wavelength = 10_000_000.0
    config.data.seq_len = 1_048_576
    config.mesh.context = 128  # devices that share a sequence

    config.eval.batch_size = 2
    config.eval.max_windows = 8  # 8.4 M tokens
    return shrink_for_laptop(config, size)
