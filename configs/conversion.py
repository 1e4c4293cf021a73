"""From RoPE to p-RoPE at the sizes that people run: Gemma 3 4B and Llama 3.1 8B, 1 B tokens each.

What       The slow pairs of a published model stop, and it trains on. Gemma's full layers keep a
           quarter of their pairs, as Gemma 4's, Llama's layers three quarters.
Command    python -m prope.import_hf --input=google/gemma-3-4b-pt --workdir=W0
           python -m prope.train --config=configs/conversion.py:gemma3_4b --workdir=W \\
               --init_from=W0 --config.data.data_dir=DATA --config.data.tokenizer=W0/tokenizer
           :llama31_8b the same with meta-llama/Llama-3.1-8B; :tiny converts nothing. Memory:
           python -m prope.plan --config=configs/conversion.py:gemma3_4b --topology=h100:8
Hardware   8 H100: at most 55 (Gemma) and 52 (Llama) of the 78 GB of each; compiled on 2026-11-26
           with the model as it was beside it, which dfe6f76 was the last to keep. Not run.
Hours      At most 3.1 and 5.8 at 40 % of their peak, computed likewise.
Expected   Not yet run.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

families = runpy.run_path(str(pathlib.Path(__file__).with_name("families.py")))


def gemma3_4b(config):
    families["gemma3"](config)
    config.model.rope_percentage = 0.25
    config.model.local_rope_percentage = 1.0
    config.model.rope_scaling_type = "linear"
    config.model.rope_scaling_factor = 8.0
    config.model.sliding_window = 1024
    config.model.num_layers = 34
    config.model.embed_dim = 2560
    config.model.num_heads = 8
    config.model.num_kv_heads = 4
    config.model.head_dim = 256
    config.model.hidden_dim = 10_240
    config.model.vocab_size = 262_208


def llama31_8b(config):
    families["llama"](config)
    config.model.rope_percentage = 0.75
    config.model.max_wavelength = 5e5
    config.model.rope_scaling_type = "llama3"
    config.model.rope_scaling_factor = 8.0
    config.model.original_seq_len = 8192
    config.model.tied = False
    config.model.num_layers = 32
    config.model.embed_dim = 4096
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.head_dim = 128
    config.model.hidden_dim = 14_336
    config.model.vocab_size = 128_256


MODELS = {"gemma3_4b": gemma3_4b, "llama31_8b": llama31_8b}


def get_config(argument: str = "gemma3_4b"):
    name, _, size = argument.partition("-")
    if argument in ("full", "tiny"):
        name = "gemma3_4b"
        size = argument
    if name not in MODELS:
        raise ValueError(f"{argument}: must be tiny or one of {', '.join(MODELS)}")
    config = families["on_wikipedia"]()
    config.data.bos_every_window = True  # as the checkpoint was trained
    config.data.seq_len = 4096
    config.batch_size = 64  # sequences, so 262,144 tokens
    config.accumulation = 8  # one sequence at a time on each of 8 GPUs
    config.num_steps = 3815  # 1.0 B tokens
    config.optimizer.learning_rate = 2e-5
    config.optimizer.final_learning_rate = 2e-6
    config.optimizer.warmup_steps = 100
    config.model.remat = "minimal"
    MODELS[name](config)
    return shrink_for_laptop(config, size or "full")
