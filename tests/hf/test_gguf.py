"""GGUF files in llama.cpp itself: every class and p computes the same there, or is refused."""

import importlib.util

import numpy as np
import pytest
from support.exports import CASES, LLAMA, YARN, distance, export_case
from support.text import articles

from prope.data.tokenizer import load_tokenizer
from prope.errors import RunFailed, UsageError
from prope.hf import engines, gguf_file

slow = pytest.mark.slow
pytest.importorskip("gguf", reason="source launch/setup.sh engines")
needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="source launch/setup.sh engines"
)
QUICK = ("Llama, p=0.25", "Gemma 3, p=0.75", "Qwen 3, p=0.75", "SmolLM3", "Qwen 3, windows, p=1")


def by_name(names):
    return [name if name in QUICK else pytest.param(name, marks=slow) for name in names]


@needs_llama_cpp
@pytest.mark.parametrize("name", by_name(CASES))
def test_llama_cpp_computes_the_same_or_the_run_is_refused(tmp_path, name):
    p, fields, architecture = CASES[name]
    if " " in architecture:
        with pytest.raises(UsageError, match=f"^config.model: .*{architecture}.*; export it for"):
            export_case(tmp_path, "llama.cpp", p, fields)
        assert not (tmp_path / "m.gguf").exists()
        return
    spec, params, result = export_case(tmp_path, "llama.cpp", p, fields)
    assert result["architecture"] == architecture
    # GELU is a table of float16 there; Gemma 4's scores are sharper.
    bound = {"gelu": 1e-2, "silu": 2e-5}[spec.activation] * (10 if architecture == "gemma4" else 1)
    assert distance("llama.cpp", spec, params, tmp_path / "m.gguf") < bound


@needs_llama_cpp
@pytest.mark.parametrize(
    ("planted", "p", "dtype"),
    [("_STOPPED", 0.25, "float32"), ("_STOPPED", 0.75, "q8_0"), (None, 0.25, "float32")],
)
def test_a_file_that_llama_cpp_computes_otherwise_does_not_appear(
    tmp_path, monkeypatch, planted, p, dtype
):
    """As where pairs that stand still are divided by 1; p = 0.75 is below q8_0's own bound."""
    if planted is None:
        _, _, result = export_case(tmp_path, "llama.cpp", 0.25, LLAMA, check="llama.cpp")
        assert result["checked"].startswith("llama.cpp (xllamacpp 20")
        return
    monkeypatch.setattr(gguf_file, planted, 1.0)
    with pytest.raises(RunFailed, match="differ from the run's by .*nothing was written") as caught:
        export_case(tmp_path, "llama.cpp", p, LLAMA, dtype=dtype, check="llama.cpp")
    assert caught.value.code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@needs_llama_cpp
@pytest.mark.parametrize(("dtype", "bits"), [("float16", 16), ("bfloat16", 16), ("q8_0", 8.5)])
def test_a_smaller_type_is_near(tmp_path, dtype, bits):
    import gguf

    fields = LLAMA | {"num_layers": 1}
    spec, params, result = export_case(
        tmp_path, "llama.cpp", 0.75, fields, dtype=dtype, check="llama.cpp"
    )
    assert result["checked"].startswith("llama.cpp")
    file = tmp_path / "m.gguf"
    assert 1e-4 < distance("llama.cpp", spec, params, file) < 0.2
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
    export_case(tmp_path, "llama.cpp", 1, LLAMA | {"vocab_size": 1200}, tokenizer=tokenizer)
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
        export_case(tmp_path, "llama.cpp", 1, fields)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_tokenizer_that_llama_cpp_has_not_is_refused(tmp_path):
    folder = write_json(tmp_path, ("bytes",))
    with pytest.raises(UsageError, match="^config.data.tokenizer=.* llama.cpp has no such tok"):
        export_case(tmp_path, "llama.cpp", 1, LLAMA | {"vocab_size": 1200}, tokenizer=folder)


def test_a_file_that_is_there_is_kept_and_without_the_engine_nothing_is_checked(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _, _, result = export_case(tmp_path, "llama.cpp", 1, LLAMA, check="llama.cpp", pairs="0-2,5")
    assert result["checked"] == "not checked there: pip install -e '.[engines]'"
    assert result["rotated_pairs"] == 4
    before = (tmp_path / "m.gguf").read_bytes()
    with pytest.raises(UsageError, match="--output=.*/m.gguf: is there already"):
        gguf_file.export(str(tmp_path / "run"), str(tmp_path / "m.gguf"))
    assert (tmp_path / "m.gguf").read_bytes() == before
