"""Gemma 2B from scratch on FlanV2: the other run of Barbero et al. (ICLR 2025), section 6 and appendix C.

What       One row of the paper's Table 2 for each value of rope_percentage. Validation perplexity there, on its own
           copy and split of FlanV2 (Longpre et al., 2023), 8192 tokens, wavelength 10 000:
               NoPE (p = 0) 6.6429   p = 0.25: 6.5111   p = 0.75: 6.4422   RoPE (p = 1) 6.4429
Command    python -m prope.train --config=configs/gemma_2b_flan.py --workdir=W --config.data.tokenizer=tokenizer.model
           from the folder that holds data/flan_v2; tokenizer.model is Gemma's own. --config.data.loss_on=targets
           predicts the answers only. To try the plumbing on a laptop first: --config=configs/gemma_2b_flan.py:tiny
Data       FlanV2 is not in TFDS. Its five parts are on the Hugging Face hub, as the README of google-research/FLAN,
           flan/v2, says; program synthesis was left out there for legal reasons. With pip install datasets, this
           brings them, dozens of GB, a record with the texts `inputs` and `targets` per line:
               import datasets, json, pathlib
               for part in ("flan2021", "t0", "niv2", "cot", "dialog"):
                   name = f"DataProvenanceInitiative/{part}_submix_original"
                   folder = pathlib.Path("data/flan_v2", part)
                   folder.mkdir(parents=True, exist_ok=True)
                   with open(folder / "train.jsonl", "w") as out:
                       for row in datasets.load_dataset(name, split="train", streaming=True):
                           out.write(json.dumps({key: row[key] for key in ("inputs", "targets")}) + "\\n")
           python -m prope.data.prepare --config=configs/gemma_2b_flan.py then makes the token stores, once.
Hardware   As gemma_2b_wiki.py: a slice of 64 TPU v5p or, with the flags there, of 256 v5e or 64 H100.
Hours      42 billion tokens, about 7.1e20 FLOPs: 12 hours on 64 v5p at 55 % of their peak. Computed, not measured.
Expected   Not yet run. Assumed, because the paper does not say: the steps, the batch and the share of validation
           documents, as in gemma_2b_wiki.py; the template; that every token is predicted; and the weights of the parts,
           which are those of the Flan 2022 collection. There they are shares of the examples, here of the tokens: a
           part with long examples has fewer of them here. The paper does not say which it means. Validation weighs
           the parts as training does; eval.jsonl also has the loss of each.
"""

from prope.config import default_config, sized

WEIGHTS = {"flan2021": 0.40, "t0": 0.32, "niv2": 0.20, "cot": 0.05, "dialog": 0.03}


def get_config(size: str = "full"):
    config = default_config()
    config.num_steps = 10_000  # assumed
    config.batch_size = 512  # assumed; sequences, so 4.2 M tokens
    config.accumulation = 2
    config.seed = 0
    config.log_every = 10
    config.eval_every = 500
    config.checkpoint_every = 500

    config.model.num_layers = 18
    config.model.embed_dim = 2048
    config.model.num_heads = 8
    config.model.num_kv_heads = 1
    config.model.head_dim = 256
    config.model.hidden_dim = 16_384
    config.model.vocab_size = 256_128  # Gemma's 256,000 and padding that divides well
    config.model.max_wavelength = 10_000.0
    config.model.rope_percentage = 0.75  # the paper's best
    config.model.dtype = "bfloat16"
    config.model.remat = "minimal"

    config.data.dataset = "mixture"
    config.data.mixture = tuple(
        {"weight": weight, "dataset": "files", "data_dir": f"data/flan_v2/{part}"}
        for part, weight in WEIGHTS.items()
    )
    config.data.template = "{inputs}\n{targets}"  # assumed
    config.data.loss_on = "all"  # assumed
    config.data.tokenizer = "tokenizer.model"
    config.data.seq_len = 8192
    config.data.mask_documents = False
    config.data.validation_fraction = 0.1  # assumed

    config.optimizer.learning_rate = 3e-4
    config.optimizer.final_learning_rate = 3e-5
    config.optimizer.warmup_steps = 500
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0

    config.eval.batch_size = 64
    config.eval.max_windows = 1024  # 8.4 M tokens while training; prope.evaluate takes all
    return sized(config, size)
