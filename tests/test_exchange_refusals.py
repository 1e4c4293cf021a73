"""What neither export nor import does, and what it says: one line, and nothing is left behind."""

import json
import re
import shutil

import numpy as np
import pytest
from exchange import edit, save, stored

from prope.errors import UsageError
from prope.hf import exporter as export_hf
from prope.hf import gemma as gemma_hf
from prope.hf import importer as import_hf


def refused(tmp_path, says, source=None, workdir="back", **arguments):
    """The import ends in one line that matches, and leaves nothing."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match=says) as error:
        import_hf.import_run(source or tmp_path / "hf", tmp_path / workdir, **arguments)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.iterdir()) == before


def rope(**fields):
    return {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4} | fields, "rope_scaling": None}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "gemma2"}, 'model_type="gemma2": only "gemma" can be imported'),
        ({"model_type": None}, "model_type=null: only"),
        ({"hidden_act": "silu"}, 'hidden_act="silu": only "gelu_pytorch_tanh"'),
        ({"hidden_activation": "gelu"}, 'hidden_activation="gelu": only null or "gelu_pytorch_tanh"'),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05: only 1e-06"),
        ({"attention_bias": True}, "attention_bias=true: only false"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=false: only true"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=true: only null or false"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config={"bits": 4}: only null'),
        ({"head_dim": None}, "head_dim=null: must be a positive integer"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers=2.0: must be a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be a positive integer"),
        ({"head_dim": 63}, "head_dim=63: must be even"),
        (rope(rope_type="longrope", factor=2.0), '"rope_type": "longrope".*only rope_type default, proportional with'),
        (rope(rope_type="yarn"), '"rope_type": "yarn".*only rope_type default'),
        (rope(factor=8.0), '"factor": 8.0.*only .*proportional with factor 1'),
        (rope(full_attention={}), "full_attention.*only rope_type default"),
        (rope(partial_rotary_factor=1.5), r"partial_rotary_factor=1.5: must be a fraction in \[0, 1\]"),
        (rope(partial_rotary_factor="all"), 'partial_rotary_factor="all": must be a fraction'),
        (rope(rope_type="default", partial_rotary_factor=0.5), "partial_rotary_factor=0.5: .* and 1 with default"),
        (rope(rope_theta=None), "rope_theta=null: must be a number"),
        (rope(rope_theta=1.0), "max_wavelength=1.0: must be greater than 1"),
        ({"rope_scaling": {"rope_type": "default"}}, "rope_scaling=.* and rope_parameters=.* differ"),
        ({"vocab_size": 200}, "vocab_size=200, but the tokenizer byte has 260 ids; give --tokenizer=PATH"),
        ({"bos_token_id": 1}, "bos_token_id=1, but the tokenizer byte has 2; give --tokenizer=PATH"),
        ({"eos_token_id": [5, 6]}, r"eos_token_id=\[5, 6\], but the tokenizer byte has 1"),
        ({"hidden_size": 50}, r"has shape \(300, 48\); config.json leads to \(300, 50\)"),
        ({"num_hidden_layers": 3}, "missing tensors: model.layers.2.input_layernorm.weight, .* and 6 more"),
        ({"num_hidden_layers": 1}, "unknown tensors: model.layers.1.input_layernorm.weight, .* and 6 more"),
    ],
)
def test_a_config_that_would_be_loaded_wrongly(tmp_path, exported, fields, says):
    if "vocab_size" in fields:  # the tensors agree, the tokenizer does not
        save(exported, stored(exported) | {"model.embed_tokens.weight": np.zeros((200, 48), np.float32)})
    edit(exported, **fields)
    refused(tmp_path, re.escape(str(exported)) + ".*" + says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.norm.weight": None}, "missing tensors: model.norm.weight;"),
        ({"model.layers.0.self_attn.q_proj.bias": np.zeros(256)}, "unknown tensors: .*q_proj.bias;"),
        ({"lm_head.weight": np.zeros((300, 48), np.float32)}, "lm_head.weight differs from model.embed_tokens.weight"),
        ({"lm_head.weight": np.zeros((48, 300), np.float32)}, r"lm_head.weight has shape \(48, 300\)"),
        ({"model.norm.weight": np.zeros(47, np.float32)}, r"norm.weight has shape \(47,\); .* leads to \(48,\)"),
        ({"model.norm.weight": np.zeros(48)}, "norm.weight has dtype F64; only F32, BF16, F16 can be read"),
        ({"model.norm.weight": np.zeros(48, np.int8)}, "norm.weight has dtype I8; only F32, BF16, F16"),
    ],
)
def test_tensors_that_would_be_loaded_wrongly(tmp_path, exported, change, says):
    tensors = stored(exported) | change
    save(exported, {name: value for name, value in tensors.items() if value is not None})
    refused(tmp_path, says)


def test_files_that_are_not_whole(tmp_path, exported, monkeypatch):
    weights, index = exported / "model.safetensors", exported / "model.safetensors.index.json"
    whole = weights.read_bytes()
    for part in (whole[:-1], whole[:100], b""):
        weights.write_bytes(part)
        refused(tmp_path, "model.safetensors: not a whole safetensors file .*; download it again")
    weights.unlink()
    refused(tmp_path, "has neither model.safetensors nor model.safetensors.index.json; .*save_pretrained")
    (exported / "a.safetensors").write_bytes(whole)
    names = list(json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")]))[1:]
    for where, says in (
        (dict.fromkeys(names, "b.safetensors"), "names the shard b.safetensors, which is not there"),
        (dict.fromkeys(names[1:], "a.safetensors"), "its tensors are others: model.embed_tokens.weight;"),
        (dict.fromkeys([*names, "more"], "a.safetensors"), "its tensors are others: more;"),
        (None, "has no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": where}))
        refused(tmp_path, says)
    index.write_text("{")
    refused(tmp_path, "index.json: not readable as JSON")
    (exported / "config.json").write_text("[]")
    refused(tmp_path, "config.json: holds no JSON object")
    (exported / "config.json").unlink()
    refused(tmp_path, "config.json: cannot be read: No such file")
    refused(tmp_path, "--input=google/gemma-2b: no such directory; .*hf download", source="google/gemma-2b")


def test_tokenizers_of_an_import(tmp_path, exported, sentencepiece_model, caplog):
    (exported / "tokenizer.json").write_text("{}")
    refused(tmp_path, "has no tokenizer.model, and tokenizer.json is not read; give --tokenizer=PATH")
    refused(tmp_path, "none.model: cannot be read", tokenizer="none.model")
    assert import_hf.import_run(exported, tmp_path / "bytes", tokenizer="byte")["tokenizer"] == "byte"
    given = import_hf.import_run(exported, tmp_path / "given", tokenizer=sentencepiece_model)
    assert given["tokenizer"] == str(tmp_path / "given" / "tokenizer.model")
    shutil.copy(sentencepiece_model, exported / "tokenizer.model")
    assert import_hf.import_run(exported, tmp_path / "own")["tokenizer"] == str(tmp_path / "own" / "tokenizer.model")
    assert import_hf.import_run(exported, tmp_path / "both", tokenizer=sentencepiece_model)
    refused(tmp_path, "--tokenizer=byte: .*tokenizer.model is there and is another one", tokenizer="byte")


def test_what_is_there_is_left_alone(tmp_path, exported):
    before = {path: path.read_bytes() for path in exported.iterdir()}
    with pytest.raises(UsageError, match="--output=.*hf: is there already, and is not overwritten"):
        export_hf.export(tmp_path / "run", exported)
    refused(tmp_path, "--workdir=.*run: is there already", workdir="run")
    assert {path: path.read_bytes() for path in exported.iterdir()} == before
    (tmp_path / "file").write_text("")
    refused(tmp_path, "--workdir=.*file/back: cannot be made: Not a directory", workdir="file/back")
    (tmp_path / "empty").mkdir()
    export_hf.export(tmp_path / "run", tmp_path / "empty")
    assert {(tmp_path / "empty" / path.name).read_bytes() for path in before} == set(before.values())
    (tmp_path / "new.part").mkdir()
    with pytest.raises(UsageError, match="new.part: another process writes there, or one was killed"):
        export_hf.export(tmp_path / "run", tmp_path / "new")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_half_written_output_goes_away(tmp_path, exported, monkeypatch, error):
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(gemma_hf.Tensor, "read", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)):
        export_hf.export(tmp_path / "run", tmp_path / "new")
    monkeypatch.setattr(import_hf, "save_imported", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)):
        import_hf.import_run(exported, tmp_path / "back")
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_is_found_first(tmp_path, exported, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="the disk is full: the tensors need .* choose another --output"):
        export_hf.export(tmp_path / "run", tmp_path / "new")
    with pytest.raises(UsageError, match="the disk is full: a checkpoint needs .* choose another --workdir"):
        import_hf.import_run(exported, tmp_path / "back")
    assert sorted(tmp_path.iterdir()) == before
