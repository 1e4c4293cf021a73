"""Gemma 2B at 131,072 tokens: the run of gemma_2b_wiki.py, trained further on 16 times longer windows.

What       A second stage, from the parameters of a run of gemma_2b_wiki.py at 8192 tokens, with a new optimizer.
           Wavelength 500,000 and p = 0.75, by one rule: the slowest pair that rotates turns once within a window.
               8,192 tokens   wavelength 10,000    its period 5,847   (gemma_2b_wiki.py)
             131,072 tokens   wavelength 500,000            106,631   (here)
           1,048,576 tokens   wavelength 10,000,000         985,127   (gemma_2b_1m.py)
           With p = 1 it turns once in 2.8 M tokens. --config.model.max_wavelength=10000 changes the length alone: the
           pairs of p = 0.75 meet no angle that they did not meet in 8192 tokens. --config.model.rope_percentage=1 is
           RoPE, from a run with p = 1. train logs each field in which the two runs differ. Practice, all with RoPE:
             Llama 3 (2407.21783)      wavelength 500,000 from the start; 8K to 128K in six stages, about 800 B tokens
             Gemma 3 (2503.19786)      global layers 10,000 to 1 M, local ones stay; 32K, at last 128K, slowed by 8
             Qwen2.5-1M (2501.15383)   10,000 to 10 M; 4K to 256K in stages
             ProLong (2410.02660)      from Llama 3: 20 B tokens at 64K, 20 B at 512K; books and code beside short text
             Fu et al. (2402.10171)    0.5 to 5 B tokens, of the domains as before, to retrieve from all of 128K
Command    python -m prope.train --config=configs/gemma_2b_128k.py --workdir=W --init_from=W8K \
               --config.data.data_dir=gs://tfds-data/datasets \
               --config.data.tokenizer=gs://gemma-data/tokenizers/tokenizer_gemma2.model
           W8K is the workdir of gemma_2b_wiki.py. To try the plumbing on a laptop: configs/gemma_2b_128k.py:tiny
Data       Wikipedia, as in the first stage, so that length alone differs. A window holds many short articles, so
           little in it needs 131,072 tokens. For a model to use, take long documents too: config.data.dataset=mixture.
Hardware   A slice of 64 TPU v5p. Four chips share a sequence (config.mesh.context): 32,768 tokens a chip and part.
           python -m prope.plan --config=configs/gemma_2b_128k.py --topology=v5p:4x4x4
           76 GB of 103 (compiled, not run); on 64 H100 or H200 give --config.mesh.context=8 --config.accumulation=4: 39
           GB of 78; on 256 v5e --config.mesh.context=8 --config.accumulation=1 --config.model.remat=save_qkv: 11 of 17.
Hours      4.2 billion tokens, about 1.85e20 FLOPs, two thirds of them attention: 3.2 hours on 64 v5p at 55 % of their
           peak. Computed, not measured.
Expected   Not yet run. Then: the loss by position (prope.evaluate --seq_len), the tasks of prope/longcontext by length.
           The tokens are as many as Fu et al. found enough. The learning rate, which begins where the first stage
           ended, is ours.
"""

import pathlib
import runpy

from prope.config import sized

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
    return sized(config, size)
