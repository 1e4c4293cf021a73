"""Writes the model card of an export: what it is, and which engines compute it."""

import contextlib
import json

from prope import parameters
from prope.data.tokenizer import SentencePieceTokenizer, Tokenizer
from prope.errors import UsageError
from prope.hf.gguf_file import choose_architecture
from prope.hf.gguf_vocabulary import list_vocabulary
from prope.spec.kinds import FULL, SLIDING
from prope.spec.model import ModelSpec
from prope.spec.run import Spec

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [p-rope]
---

# {name}

{parameters:,} parameters of `{hf_class}`, {origin}. {rotation}{share}.

```python
from transformers import {classes}

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
{tokenizer}
```

| engine | |
|---|---|
| transformers 5 | computes it |
| vLLM | {vllm} |
| MLX (mlx-lm) | {mlx} |
| llama.cpp | {llama_cpp} |

Mean difference of log-probabilities from the run's, before this was written: {checked}.
"""


def write_card(
    name: str, step: int, spec: Spec, hf_config: dict, tokenizer: Tokenizer, checked: str | None
) -> str:
    """Returns the text of README.md for an export of this name; `checked` is that of a check."""
    model = spec.model
    is_custom = hf_config["model_type"] == "prope"
    problem = mlx_problem(model, hf_config)
    datasets = ", ".join(source.dataset for _, source in spec.data.weighted_sources())
    windows = f"in windows of {spec.data.seq_len:,} tokens"
    trained = f"step {step} of a run of prope on {datasets}, {windows}"
    is_p = model.rope_type == "proportional" and not model.rope_pairs
    is_new = hf_config["model_type"] in ("qwen2", "qwen3", "smollm3") and SLIDING in model.kinds
    is_new |= "longrope" in json.dumps(hf_config["rope_parameters"])
    classes = ["AutoModelForCausalLM"]
    tokenizer_line = "# The ids of a text are 2, then 4 more than each of its bytes."
    if spec.data.tokenizer != "byte":
        classes.append(tokenizer_class(hf_config["model_type"], tokenizer))
        tokenizer_line = f'tokenizer = {classes[-1]}.from_pretrained("{name}")'
    llama_cpp = "does not; its own converter may not say so"
    with contextlib.suppress(UsageError):
        choose_architecture(model)
        list_vocabulary(spec, tokenizer)
        llama_cpp = "computes the file of `prope.export_gguf`; its own converter may leave p out"
    return _CARD.format(
        name=name,
        parameters=parameters.count(model),
        hf_class=hf_config["architectures"][0],
        origin=trained if step else "imported by prope",
        rotation=model.describe_rotation(),
        share=f", p = {model.rope_percentage}" if is_p else "",
        classes=", ".join(classes),
        tokenizer=tokenizer_line,
        trust=", trust_remote_code=True" if is_custom else "",
        vllm="does not" if is_custom else "not tried" if is_new else "computes it",
        mlx=f"does not: it {problem}" if problem else "computes it",
        llama_cpp="does not" if is_custom else llama_cpp,
        checked=checked or "not measured",
    )


def tokenizer_class(model_type: str, tokenizer: Tokenizer) -> str:
    """Returns the class of transformers that gives a tokenizer's ids."""
    # AutoTokenizer takes Qwen2Tokenizer for every qwen2.
    is_other = model_type == "qwen2" and isinstance(tokenizer, SentencePieceTokenizer)
    return "PreTrainedTokenizerFast" if is_other else "AutoTokenizer"


def mlx_problem(model: ModelSpec, hf_config: dict) -> str:
    """Says why MLX (mlx-lm 0.32) does not compute an export; empty where it does."""
    model_type = hf_config["model_type"]
    rope = hf_config["rope_parameters"]
    kinds = {each["rope_type"]: each for each in (rope.values() if FULL in rope else [rope])}
    reads_windows = model_type in ("gemma3_text", "gemma4_text")
    reads_windows |= model_type == "smollm3" and FULL in model.kinds
    is_early_gemma = model_type in ("gemma", "gemma2")
    caps = (model.attention_softcap, model.final_softcap)
    problems = {
        "has no model_type prope": model_type == "prope",
        "reads no rotation but RoPE": is_early_gemma and "rope_scaling" in hf_config,
        "has no head of its own": is_early_gemma and not model.tied,
        "needs both caps": model_type == "gemma2" and None in caps,
        "has no caps": model_type == "gemma3_text" and any(caps),
        "reads no windows": SLIDING in model.kinds and not reads_windows,
        "rotates all pairs of sliding layers, and takes every nth layer as full": (
            hf_config.get("sliding_window_pattern", 0) > model.num_layers
        ),
        "has head_dim = hidden_size / num_attention_heads": (
            model_type == "qwen2" and model.head_dim * model.num_heads != model.embed_dim
        ),
        "has another longrope": "longrope" in kinds,
        "reads no attention_factor": "attention_factor" in kinds.get("yarn", ()),
    }
    return ", ".join(problem for problem, applies in problems.items() if applies)
