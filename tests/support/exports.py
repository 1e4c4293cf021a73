"""Every class that is exported, at several p, and how far an engine's answers are from the run's.

Numbers are random, each of which matters; logits have a standard deviation of about 1.6.
"""

import numpy as np

from prope.hf import engine_process, engines, exporter, gguf_file
from support.models import DENSE4, E4, forward
from support.runs import make_run

SIZES = {"embed_dim": 64, "num_layers": 4, "head_dim": 32, "num_kv_heads": 2}
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 17}
LLAMA = {"activation": "silu", "scale_embedding": False, "norm_epsilon": 1e-5}
GEMMA_2 = {"post_norms": True, "attention_softcap": 20.0, "final_softcap": 10.0, **WINDOWS}
GEMMA_3 = {"post_norms": True, "use_qk_norm": True, "max_wavelength": 1e6, **WINDOWS}
GEMMA_3 |= {"local_max_wavelength": 1e4, "attention_scale": 0.1}
GEMMA_4 = {"attention_scale": 1.0, "norm_epsilon": 1e-6, "head_dim": 16}
QWEN_2 = {"qkv_bias": True, "embed_dim": 128}  # MLX has no other head_dim than D / N
QK_NORM = {"use_qk_norm": True, "qkv_bias": False}
YARN = {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "original_seq_len": 32}
NTK = {"rope_scaling_type": "ntk", "rope_scaling_factor": 4.0}
ALL = dict.fromkeys((0, 0.25, 0.75, 1))  # p: an architecture of its own, or why it is refused
# By name: fields of the model, the architecture, and for some p another, or why there is none.
CLASSES = {
    "Gemma": ({}, "gemma", {}),
    "Gemma 2": (GEMMA_2 | {"attention_scale": 0.1}, "gemma2", {}),
    "Gemma 2, no caps": ({"post_norms": True}, "gemma2", {}),
    "Gemma 3": (GEMMA_3, "gemma3", {0: "gemma3 has the same rotated pairs"}),
    "Gemma 3, local RoPE": (
        GEMMA_3 | {"local_rope_percentage": 1.0},
        *("gemma3", dict.fromkeys((0.25, 0.75), "gemma3 has the same rotated pairs")),
    ),
    "Gemma 4": (DENSE4 | GEMMA_4, "gemma4", {}),
    "Gemma 4 E": (E4 | GEMMA_4, "gemma4", {}),
    "Llama": (LLAMA | {"tied": False}, "llama", {}),
    "Qwen 2": (LLAMA | QWEN_2, "llama", {}),
    "Qwen 2, windows": (LLAMA | QWEN_2 | WINDOWS, "granite_swa", {}),
    "Qwen 3": (LLAMA | QK_NORM, "qwen3", dict.fromkeys((0.25, 0.75), "qwen3vl")),
    "Qwen 3, windows": (LLAMA | QK_NORM | WINDOWS, "", dict.fromkeys(ALL, "qwen3 has no windows")),
    "Mistral": (
        LLAMA | {"layer_types": ("sliding_attention",), "sliding_window": 17},
        *("granite_swa", {}),
    ),
}
# Other rotations: p, fields, architecture.
ENCODINGS = {
    "SmolLM3": ((0.75, 0.75, 0.75, 0), LLAMA, "granite_swa"),
    "chosen pairs": (1, LLAMA | {"rope_pairs": "0-2,5,9"}, "llama"),
    "reversed": (0.5, LLAMA | {"rope_type": "reversed"}, "llama"),
    "yarn": (1, LLAMA | YARN | {"logit_scale": "yarn"}, "llama"),
    "yarn of p-RoPE": (0.5, LLAMA | YARN, "llama"),
    "yarn, logits as they are": (1, LLAMA | YARN, "llama"),
    "an odd share": (0.1, LLAMA, "llama"),  # int(H p) is 3
    "SmolLM3, windows": (0.75, LLAMA | WINDOWS, "granite_swa"),
    "Gemma 3, ntk": (1, GEMMA_3 | NTK | {"local_rope_percentage": 1.0}, "gemma3 rotates the first"),
    "Gemma 3, a cap": (1, GEMMA_3 | {"final_softcap": 10.0}, "gemma3"),
    "Gemma, a head of its own": (1, {"tied": False}, "gemma has tied=True"),
    "linear": (1, {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0}, "gemma"),
}
CASES = ENCODINGS | {
    f"{name}, p={p}": (p, fields, others.get(p, architecture))
    for name, (fields, architecture, others) in CLASSES.items()
    for p in ALL
}


def export_case(folder, engine, p, fields, tokenizer="byte", **options):
    """Exports a run in the form that an engine reads: (spec, params, result)."""
    spec, params = make_run(folder / "run", p, tokenizer, **SIZES | fields)
    module, name = (gguf_file, "m.gguf") if engine == "llama.cpp" else (exporter, "hf")
    result = module.export(str(folder / "run"), str(folder / name), **options)
    return spec.model, params, result


def distance(engine, spec, params, export, here=False):
    """How far log-probabilities after prompts of 1 to 120 tokens are from prope's.

    With `here`, the engine runs in this process.
    """
    tokens = np.random.default_rng(1).integers(4, 260, 120)
    logits = np.asarray(forward(spec, params, tokens[None], np.arange(120)[None])[0], np.float64)
    ours = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    lengths = (1, 2, 16, 18, 60, 120)
    prompts = [tokens[:length].tolist() for length in lengths]
    if here:
        answers = engine_process.ENGINES[engine](str(export), prompts, [])
    else:
        answers = engines.ask(engine, export, prompts, [])
    rows = zip(lengths, answers["tokens"], answers["scores"], strict=True)
    return max(np.abs(ours[length - 1, ids] - scores).max() for length, ids, scores in rows)
