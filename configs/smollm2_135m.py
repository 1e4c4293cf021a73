"""SmolLM2 135M on English Wikipedia: onwards from Hugging Face's checkpoint, or from scratch.

What       The decoder of HuggingFaceTB/SmolLM2-135M, 134,515,008 parameters, with the training of
           gemma_300m_wiki.py: windows of 2048 tokens. Its own: 8192.
Command    python -m prope.import_hf --input=HuggingFaceTB/SmolLM2-135M --workdir=W0
           python -m prope.train --config=configs/smollm2_135m.py --workdir=W --init_from=W0 \\
               --config.data.data_dir=DATA --config.data.tokenizer=W0/tokenizer
           DATA as in gemma_2b_wiki.py; from scratch without --init_from,
           with the same tokenizer.
Hardware   One H100 with 80 GB: 47 GB, measured.
Hours      3.9 billion tokens, about 4.0e18 FLOPs: 4.2 on one H100 for the steps alone, by 5
           measured at 27 % of its peak, with the flags for several GPUs (2026-11-27).
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
    families["llama"](config)
    config.model.max_wavelength = 1e5
    config.model.num_layers = 30
    config.model.embed_dim = 576
    config.model.num_heads = 9
    config.model.num_kv_heads = 3
    config.model.head_dim = 64
    config.model.hidden_dim = 1536
    config.model.vocab_size = 49_152
    return shrink_for_laptop(config, size)
