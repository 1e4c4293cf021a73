"""SmolLM2 135M from RoPE to p-RoPE: its slow pairs stop, then 0.4 M tokens of training.

What       Four values of p, three orders of the text; p = 1 is the control: the same steps, nothing
           stopped. 76 articles to train on, 30 others to evaluate.
Command    python -m prope.import_hf --input=HuggingFaceTB/SmolLM2-135M-Instruct --workdir=W0
           python launch/sweep.py --config=configs/conversion_smollm2.py --workdir=W \\
               --init_from=W0 --config.data.tokenizer=W0/tokenizer --config.data.data_dir=DATA
           python -m prope.report --sweep=W
Hardware   One GPU: 4 GB a run. Or one CPU core a run: 10 GB.
Hours      0.03 on one H100, all 12 runs at once. On a CPU about 80 minutes a run, 8 hours for all
           on two cores; 40 minutes by matmuls arranged for AMX, which left (dfe6f76 has them).
Expected   After 0.41 M tokens p = 0.75 is 0.002 above the control, 0.5 0.035, 0.25 0.26; in
           windows of 8192 tokens 0.37, 1.2 and 3.0 (2026-11-27, configs/results/real_models.md).
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

smollm2 = runpy.run_path(str(pathlib.Path(__file__).with_name("smollm2_135m.py")))


def get_config(size: str = "full"):
    config = smollm2["get_config"]()
    config.num_steps = 200
    config.batch_size = 2  # windows, so 2048 tokens
    config.accumulation = 1
    config.log_every = 5
    config.eval_every = 25
    config.checkpoint_every = 50
    config.model.remat = "none"
    config.model.scan_layers = False
    config.data.seq_len = 1024
    config.data.validation_fraction = 0.3
    config.optimizer.learning_rate = 1e-4
    config.optimizer.final_learning_rate = 1e-5
    config.optimizer.warmup_steps = 20
    config.eval.batch_size = 2
    config.eval.max_windows = 16
    return shrink_for_laptop(config, size)


def get_sweep(size: str = "full"):
    return {"seed": (0, 1, 2), "model.rope_percentage": (1.0, 0.75, 0.5, 0.25)}
