"""Writes the models of prope/golden/engines.md, which engines compute otherwise than transformers.

    python tests/support/write_engines.py FOLDER [ENGINE]

A model is a folder: config.json, weights by a formula, a tokenizer of bytes, and expected.json, the
log-probabilities [V] of the token after PROMPT, from float64. It needs torch, transformers 5 and
sentencepiece. With ENGINE, mlx or llama.cpp, that engine is asked instead; llama.cpp reads
FOLDER/MODEL.gguf, which its converter has made.
"""

import json
import pathlib
import sys

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PROMPT = [2, *(37 * t % 256 + 4 for t in range(1, 48))]
SHOWN = slice(100, 103)  # the ids that are printed
SIZES = {
    "vocab_size": 5 + len(BYTES),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
P_ROPE = {"rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
KINDS = ["sliding_attention", "full_attention"]
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": KINDS}


def rotate(rope: dict) -> dict:
    """Returns the fields of a rotation that transformers 5 reads, and that of older programs."""
    return {"rope_parameters": rope, "rope_scaling": rope}


# By name, which begins with the model_type: what config.json has besides SIZES.
MODELS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "smollm3", "gemma"), rotate(P_ROPE)),
    "llama-new_fields": {"rope_parameters": P_ROPE},
    "llama-p0": rotate(P_ROPE | {"partial_rotary_factor": 0.0}),
    "llama-odd": rotate(P_ROPE | {"partial_rotary_factor": 0.2}),
    "mistral": rotate(ROPE) | {"sliding_window": 8},
    "gemma2": rotate(P_ROPE) | GEMMA | {"sliding_window": 128},
    "gemma2-window": rotate(ROPE) | GEMMA,
    "gemma3_text": rotate(P_ROPE)
    | GEMMA
    | {"rope_parameters": dict.fromkeys(KINDS, P_ROPE), "sliding_window_pattern": 2},
    "gemma3_text-pattern": GEMMA
    | {"rope_parameters": dict.fromkeys(KINDS, ROPE)}
    | {"num_hidden_layers": 6, "layer_types": KINDS * 3},
}


def write_model(folder: pathlib.Path, name: str) -> list[float]:
    """Writes one of MODELS; returns its log-probabilities."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"model_type": name.partition("-")[0], **SIZES, **MODELS[name]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    parameters = dict(sorted(model.named_parameters()))
    start = 0
    for path, tensor in parameters.items():
        k = torch.arange(start, start + tensor.numel(), dtype=torch.float64)
        start += len(k)
        values = torch.sin(k * k).reshape(tensor.shape)
        is_norm = path.endswith("norm.weight")
        values = 1 + values / 2 if is_norm else values * (3 / tensor.shape[-1]) ** 0.5
        tensor.data = values.float()
    folder.mkdir(parents=True)
    fields["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    save_file(parameters, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder / "tokenizer.model")
    logits = model.double()(torch.tensor([PROMPT])).logits[0, -1]
    scores = torch.log_softmax(logits, dim=-1).tolist()
    (folder / "expected.json").write_text(json.dumps(scores))
    return scores


def write_tokenizer(file: pathlib.Path) -> None:
    """Writes a SentencePiece model of bytes and the space, which llama.cpp's converter reads."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model = ModelProto()
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = True
    types = model.SentencePiece
    pieces = dict.fromkeys(["<pad>", "</s>", "<s>"], types.CONTROL) | {"<unk>": types.UNKNOWN}
    pieces |= dict.fromkeys(BYTES, types.BYTE) | {"\N{LOWER ONE EIGHTH BLOCK}": types.NORMAL}
    for piece, kind in pieces.items():
        model.pieces.add(piece=piece, type=kind)
    file.write_bytes(model.SerializeToString())


def ask(engine: str, folder: pathlib.Path) -> list[float]:
    """Returns the log-probabilities by an engine."""
    from prope.hf import engines

    export = f"{folder}.gguf" if engine == "llama.cpp" else folder
    answers = engines.ask(engine, export, [PROMPT], [])
    scores = dict(zip(answers["tokens"][0], answers["scores"][0], strict=True))
    return [scores[token] for token in range(len(scores))]


def show(scores: list[float]) -> str:
    """Formats the log-probabilities of SHOWN."""
    return " ".join(f"{score:.3f}" for score in scores[SHOWN])


def main(root: str, engine: str | None = None) -> None:
    """Writes all models, or asks an engine; prints a row for each."""
    for name in MODELS:
        folder = pathlib.Path(root, name)
        scores = ask(engine, folder) if engine else write_model(folder, name)
        print(f"| {name} | {show(scores)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
