"""Writes the model card of an export: what it is, and which engines compute it."""

import math

from prope.errors import UsageError
from prope.hf.gguf_file import choose_architecture
from prope.hf.layout import Tensor
from prope.spec.kinds import FULL, SLIDING
from prope.spec.model import ModelSpec
from prope.spec.run import Spec

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [p-rope]
---

# {name}

{parameters:,} parameters of `{hf_class}`, step {step} of a run of prope, on {datasets},
in windows of {seq_len:,} tokens. {rotation}{share}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
{tokenizer}
```

| engine | |
|---|---|
| transformers 5 | computes it |
| vLLM | {vllm} |
| MLX (mlx-lm) | {mlx} |
| llama.cpp | {llama_cpp} |

Compared with the run, before it was written: {checked}.
"""


def write_card(
    name: str, step: int, spec: Spec, hf_config: dict, tensors: list[Tensor], checked: str | None
) -> str:
    """Returns the text of README.md for an export of this name."""
    model = spec.model
    is_custom = hf_config["model_type"] == "prope"
    problem = mlx_problem(model, hf_config)
    try:
        choose_architecture(model)
        llama_cpp = "computes the file of `prope.export_gguf`; its own converter may leave p out"
    except UsageError:
        llama_cpp = "does not; its own converter does not say so"
    return _CARD.format(
        name=name,
        parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        hf_class=hf_config["architectures"][0],
        step=step,
        datasets=", ".join(source.dataset for _, source in spec.data.weighted_sources()),
        seq_len=spec.data.seq_len,
        rotation=model.describe_rotation(),
        share=f" (p = {model.rope_percentage})" if model.rope_type == "proportional" else "",
        tokenizer=(
            "# The ids of a text are 2, then 4 more than each of its bytes."
            if spec.data.tokenizer == "byte"
            else f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
        ),
        trust=", trust_remote_code=True" if is_custom else "",
        vllm="does not load it" if is_custom else "computes it",
        mlx=f"does not: it has {problem}" if problem else "computes it",
        llama_cpp=llama_cpp,
        checked=checked or "in no engine",
    )


def mlx_problem(model: ModelSpec, hf_config: dict) -> str:
    """Says what MLX has instead of an export's class or rotation; empty where it computes it."""
    model_type = hf_config["model_type"]
    rope = hf_config["rope_parameters"]
    kinds = [each["rope_type"] for each in (rope.values() if FULL in rope else [rope])]
    problems = {
        "all pairs rotate": model_type in ("gemma", "gemma2") and "rope_scaling" in hf_config,
        "no windows": SLIDING in model.kinds and model_type not in ("gemma3_text", "gemma4_text"),
        "only caps": model_type == "gemma2" and not model.attention_softcap,
        "one full layer in so many, all pairs rotating in the others": (
            hf_config.get("sliding_window_pattern", 0) > model.num_layers
        ),
        "head_dim hidden_size / num_attention_heads": (
            model_type == "qwen2" and model.head_dim * model.num_heads != model.embed_dim
        ),
        "no rope_type prope": "prope" in kinds,
        "another longrope": "longrope" in kinds,
    }
    return ", ".join(problem for problem, applies in problems.items() if applies)
