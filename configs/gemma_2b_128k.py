"""Gemma 2B at 131,072 tokens: the run of gemma_2b_wiki.py, trained on 16 times longer windows.

What       A second stage by --init_from, with a new optimizer. Wavelength 500,000 and p = 0.75: the
           slowest pair that rotates turns once in 106,631 tokens, as in the first stage it does
           within 8192. configs/results/gemma_2b.md has other practice.
Command    python -m prope.train --config=configs/gemma_2b_128k.py --workdir=W --init_from=W8K \\
               --config.data.data_dir=gs://tfds-data/datasets \\
               --config.data.tokenizer=gs://gemma-data/tokenizers/tokenizer_gemma2.model
Hardware   64 TPU v5p, four chips a sequence: 76 GB of 103 a chip, by prope.plan
           --topology=v5p:4x4x4 (not run); 64 H100 or H200 with --config.mesh.context=8
           --config.accumulation=4: 39 GB; 256 v5e with --config.mesh.context=8
           --config.accumulation=1 --config.model.remat=save_qkv: 11 GB.
Hours      4.2 billion tokens, about 1.85e20 FLOPs: 3.2 on 64 v5p at 55 % of peak. Computed.
Expected   Not yet run. Then: loss by position, and the tasks of prope.ask by length.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

wiki = runpy.run_path(str(pathlib.Path(__file__).with_name("gemma_2b_wiki.py")))


def get_config(size: str = "full"):
    config = wiki["get_config"]()
    config.num_steps = 1000
    config.batch_size = 32  # sequences, so 4.2 M tokens as before
    config.accumulation = 2
    config.eval_every = 100
    config.checkpoint_every = 100

    config.model.max_wavelength = 500_000.0
    config.data.seq_len = 131_072
    config.mesh.context = 4  # devices that share a sequence

    config.optimizer.learning_rate = 3e-5
    config.optimizer.final_learning_rate = 3e-6
    config.optimizer.warmup_steps = 50

    config.eval.batch_size = 16
    config.eval.max_windows = 64  # 8.4 M tokens
    return shrink_for_laptop(config, size)
