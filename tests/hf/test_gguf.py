"""GGUF files in llama.cpp itself: every class and p computes the same there, or is refused."""

import importlib.util

import numpy as np
import pytest
from support.models import DENSE4, E4, forward
from support.runs import make_run
from support.text import articles

from prope.data.tokenizer import load_tokenizer
from prope.errors import RunFailed, UsageError
from prope.hf import engines, gguf_file

slow = pytest.mark.slow
pytest.importorskip("gguf", reason="source launch/setup.sh engines")
needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="source launch/setup.sh engines"
)
SIZES = {"embed_dim": 64, "num_layers": 4, "head_dim": 32, "num_kv_heads": 2}
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 17}
LLAMA = {"activation": "silu", "scale_embedding": False, "norm_epsilon": 1e-5}
GEMMA_2 = {"post_norms": True, "attention_softcap": 20.0, "final_softcap": 10.0, **WINDOWS}
GEMMA_3 = {"post_norms": True, "use_qk_norm": True, "max_wavelength": 1e6, **WINDOWS}
GEMMA_3 |= {"local_max_wavelength": 1e4, "attention_scale": 0.1}
GEMMA_4 = {"attention_scale": 1.0, "norm_epsilon": 1e-6, "head_dim": 16}
QK_NORM = {"use_qk_norm": True, "qkv_bias": False}
YARN = {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "original_seq_len": 32}
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
    "Qwen 2": (LLAMA | {"qkv_bias": True}, "llama", {}),
    "Qwen 2, windows": (LLAMA | {"qkv_bias": True} | WINDOWS, "granite_swa", {}),
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
    "linear": (1, {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0}, "gemma"),
}
CASES = ENCODINGS | {
    f"{name}, p={p}": (p, fields, others.get(p, architecture))
    for name, (fields, architecture, others) in CLASSES.items()
    for p in ALL
}
QUICK = ("Llama, p=0.25", "Gemma 3, p=0.75", "Qwen 3, p=0.75", "SmolLM3", "Qwen 3, windows, p=1")


def by_name(names):
    return [name if name in QUICK else pytest.param(name, marks=slow) for name in names]


def export(tmp_path, p, fields, tokenizer="byte", **options):
    """Exports a run to m.gguf: (spec, params, result)."""
    spec, params = make_run(tmp_path / "run", p, tokenizer, **SIZES | fields)
    result = gguf_file.export(str(tmp_path / "run"), str(tmp_path / "m.gguf"), **options)
    return spec.model, params, result


def distance(spec, params, file):
    """How far log-probabilities after prompts of 1 to 120 tokens are from prope's."""
    tokens = np.random.default_rng(1).integers(4, 260, 120)
    logits = np.asarray(forward(spec, params, tokens[None], np.arange(120)[None])[0], np.float64)
    ours = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    lengths = (1, 2, 16, 18, 60, 120)
    prompts = [tokens[:length].tolist() for length in lengths]
    answers = engines.ask("llama.cpp", file, prompts, [])
    rows = zip(lengths, answers["tokens"], answers["scores"], strict=True)
    return max(np.abs(ours[length - 1, ids] - scores).max() for length, ids, scores in rows)


@needs_llama_cpp
@pytest.mark.parametrize("name", by_name(CASES))
def test_llama_cpp_computes_the_same_or_the_run_is_refused(tmp_path, name):
    p, fields, architecture = CASES[name]
    if " " in architecture:
        with pytest.raises(UsageError, match=f"^config.model: .*{architecture}.*; export it for"):
            export(tmp_path, p, fields)
        assert not (tmp_path / "m.gguf").exists()
        return
    spec, params, result = export(tmp_path, p, fields)
    assert result["architecture"] == architecture
    # GELU is a table of float16 there; Gemma 4's scores are sharper.
    bound = {"gelu": 1e-2, "silu": 2e-5}[spec.activation] * (10 if architecture == "gemma4" else 1)
    assert distance(spec, params, tmp_path / "m.gguf") < bound


@needs_llama_cpp
@pytest.mark.parametrize("planted", ["_STOPPED", None])
def test_a_file_that_llama_cpp_computes_otherwise_does_not_appear(tmp_path, monkeypatch, planted):
    """As where pairs that stand still are divided by 1."""
    if planted is None:
        _, _, result = export(tmp_path, 0.25, LLAMA, check="llama.cpp")
        assert result["checked"].startswith("llama.cpp (xllamacpp 20")
        return
    monkeypatch.setattr(gguf_file, planted, 1.0)
    with pytest.raises(RunFailed, match="differ from the run's by .*nothing was written") as caught:
        export(tmp_path, 0.25, LLAMA, check="llama.cpp")
    assert caught.value.code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@needs_llama_cpp
@pytest.mark.parametrize(("dtype", "bits"), [("float16", 16), ("bfloat16", 16), ("q8_0", 8.5)])
def test_a_smaller_type_is_near(tmp_path, dtype, bits):
    import gguf

    fields = LLAMA | {"num_layers": 1}
    spec, params, result = export(tmp_path, 0.75, fields, dtype=dtype, check="llama.cpp")
    assert result["checked"].startswith("llama.cpp")
    file = tmp_path / "m.gguf"
    assert 1e-4 < distance(spec, params, file) < 0.2
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    table = tensors["token_embd.weight"]
    assert table.n_bytes * 8 == table.n_elements * bits
    expected = np.asarray(params["embedder"]["input_embedding"])
    steps = {"float16": 2**-11, "bfloat16": 2**-8}
    found = gguf.quants.dequantize(table.data, table.tensor_type)
    step = np.abs(expected).max() / 200 if dtype == "q8_0" else steps[dtype] * np.abs(expected)
    assert (np.abs(found - expected) <= step).all()
    assert tensors["output_norm.weight"].tensor_type.name == "F32"


# --- Vocabularies -------------------------------------------------------------------------------


def write_json(folder, cuts, fallback=False, prefix=False):
    """Trains a tokenizer.json of BPE on some text."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    steps = []
    tokenizer = Tokenizer(
        models.BPE(byte_fallback=fallback, unk_token="<unk>" if fallback else None)
    )
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    alphabet = []
    if fallback:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        steps = [normalizers.Prepend("▁")] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        kinds = {
            "words": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
            "digits": lambda: pre_tokenizers.Digits(individual_digits=True),
            "bytes": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        }
        made = [
            kinds[cut]() if cut in kinds else pre_tokenizers.Split(Regex(cut), "isolated")
            for cut in cuts
        ]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(made) if len(made) > 1 else made[0]
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(articles(20), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCABULARIES = {
    "GPT-2": (("words",), {}),
    "SmolLM": (("digits", "words"), {}),
    "Llama 3": ((_LLAMA_3, "bytes"), {}),
    "Qwen 2": ((_LLAMA_3.replace("{1,3}", ""), "bytes"), {}),
    "Gemma": ((), {"fallback": True}),
    "Mistral": ((), {"fallback": True, "prefix": True}),
    "SentencePiece": None,
    "byte": None,
}


@needs_llama_cpp
@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpp_gives_the_same_ids(tmp_path, name, sentencepiece_model):
    cuts = VOCABULARIES[name]
    tokenizer = {"byte": "byte", "SentencePiece": sentencepiece_model}.get(name)
    tokenizer = tokenizer or write_json(tmp_path, cuts[0], **cuts[1])
    export(tmp_path, 1, LLAMA | {"vocab_size": 1200}, tokenizer=tokenizer)
    ours = load_tokenizer(tokenizer)
    texts = [*articles(20), "a  b\n\n c 1234567 it's", "\u00e9\u4e2d\U0001f600 \tx"]
    answers = engines.ask("llama.cpp", tmp_path / "m.gguf", [[5]], texts)
    assert answers["ids"] == [ours.encode(text.encode()).tolist() for text in texts]


# --- Refusals -----------------------------------------------------------------------------------

REFUSED = {
    "gelu": (LLAMA | {"activation": "gelu"}, "llama has activation=silu, granite_swa has"),
    "silu": ({"activation": "silu"}, "gemma has activation=gelu"),
    "a head of its own": ({"tied": False}, "gemma has tied=True"),
    "dynamic": (
        LLAMA | YARN | {"rope_scaling_type": "dynamic", "rope_percentage": 1.0},
        "none has rope_scaling_type=dynamic",
    ),
    "pairs by head": (LLAMA | {"rope_pairs": "0-3 4-7"}, "the same pairs in every head"),
    "no class": ({"use_qk_norm": True}, "no class of transformers computes this"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(tmp_path, name):
    fields, why = REFUSED[name]
    with pytest.raises(UsageError, match=f"^config.model.*{why}") as caught:
        export(tmp_path, 1, fields)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_tokenizer_that_llama_cpp_has_not_is_refused(tmp_path):
    folder = write_json(tmp_path, ("bytes",))
    with pytest.raises(UsageError, match="^config.data.tokenizer=.* llama.cpp has no such tok"):
        export(tmp_path, 1, LLAMA | {"vocab_size": 1200}, tokenizer=folder)


def test_a_file_that_is_there_is_kept_and_without_the_engine_nothing_is_checked(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _, _, result = export(tmp_path, 1, LLAMA, check="llama.cpp")
    assert result["checked"] == "not checked there: pip install -e '.[engines]'"
    before = (tmp_path / "m.gguf").read_bytes()
    with pytest.raises(UsageError, match="--output=.*/m.gguf: is there already"):
        gguf_file.export(str(tmp_path / "run"), str(tmp_path / "m.gguf"))
    assert (tmp_path / "m.gguf").read_bytes() == before
