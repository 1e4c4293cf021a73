"""Files of transformers, written and read without it: the same bytes, or one line and no trace."""

import dataclasses
import functools
import json
import operator
import os
import shutil
import stat
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import refusal
from support.exchange import edit, save, stored
from support.models import num_parameters, same
from support.runs import SIZES, make_run
from support.text import articles

from prope import model
from prope.errors import UsageError
from prope.hf import exporter, importer, layout
from prope.hf import tensors as tensor_files
from prope.hf.families import FAMILIES
from prope.hf.layout import EMBEDDING, HEAD, INDEX, WEIGHTS, list_tensors
from prope.spec.model import ModelSpec
from prope.workdir.hashes import hash_arrays
from prope.workdir.run import open_run
from prope.workdir.source import open_source


def import_back(tmp_path, directory):
    """Imports into back/: (result, run)."""
    result = importer.import_run(directory, tmp_path / "back")
    return result, open_run(tmp_path / "back")


def params_of_run(tmp_path):
    """The parameters of the run that `exported` is made from."""
    return open_run(tmp_path / "run").params()


# --- There and back -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "sizes"),
    [(0.1, {"num_layers": 11}), ((0.5, 0.5), {"num_kv_heads": 2, "max_wavelength": 1e6})],
)
def test_a_run_comes_back_from_its_export(tmp_path, p, sizes):
    spec, params = make_run(tmp_path / "run", p, **sizes)
    out = exporter.export(tmp_path / "run", tmp_path / "hf")
    result, run = import_back(tmp_path, tmp_path / "hf")
    assert out["parameters"] == result["parameters"] == num_parameters(params)
    assert sum(tensor.size for tensor in stored(tmp_path / "hf").values()) == out["parameters"]
    assert run.spec.model == dataclasses.replace(spec.model, rope_percentage=np.max(p))
    assert result["rotated_pairs"] == run.spec.model.rotated_pairs
    assert (run.spec.data.seq_len, run.spec.data.tokenizer, run.step) == (128, "byte", 0)
    assert run.init_hash == result["init_hash"] == hash_arrays(params), "as training has it"
    assert same(run.params(), params)
    exporter.export(tmp_path / "back", tmp_path / "again")
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert names == ["README.md", "config.json", "generation_config.json", WEIGHTS]
    for name in names[1:]:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_an_export_in_bfloat16(tmp_path, exported):
    exporter.export(tmp_path / "run", tmp_path / "file", dtype="bfloat16")
    table = np.asarray(model.embedding(params_of_run(tmp_path)).astype("bfloat16"))
    assert stored(tmp_path / "file")[EMBEDDING].tobytes() == table.tobytes()
    assert json.loads((tmp_path / "file/config.json").read_text())["dtype"] == "bfloat16"


def test_an_export_in_shards_is_read_back(tmp_path, monkeypatch, exported):
    whole = stored(exported)
    monkeypatch.setattr(tensor_files, "_MAX_SHARD", 100_000)
    shards = tmp_path / "shards"
    exporter.export(tmp_path / "run", shards)
    files = {path.name: path.stat().st_size for path in shards.glob("*.safetensors")}
    assert min(files) == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2 and max(files.values()) < 110_000
    index = json.loads((shards / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    _, run = import_back(tmp_path, shards)
    assert same(run.params(), params_of_run(tmp_path))


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_files_of_an_export_have_the_mode_of_the_umask(tmp_path, monkeypatch, exported, umask):
    """Whole and in shards; the library alone would let only the owner read the weights."""
    before = os.umask(umask)
    try:
        exporter.export(tmp_path / "run", tmp_path / "whole")
        monkeypatch.setattr(tensor_files, "_MAX_SHARD", 100_000)
        exporter.export(tmp_path / "run", tmp_path / "shards")
    finally:
        os.umask(before)
    for folder in ("whole", "shards"):
        modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / folder).iterdir()}
        assert modes == {0o666 & ~umask}


# --- Other forms --------------------------------------------------------------------------------


def write_released(directory, tensors):
    """Fields as in the releases, no wavelength, and the embedding a second time."""
    edit(directory, hidden_act="gelu", rope_theta=None)
    save(directory, tensors | {HEAD: tensors[EMBEDDING]})


def write_base_model(directory, tensors):
    """As GemmaModel saves itself, without a head."""
    bare = {name.removeprefix("model."): values for name, values in tensors.items()}
    name = "layers.0.self_attn.rotary_emb.inv_freq"  # as releases before 2024 have it
    save(directory, bare | {name: np.ones(4, np.float32)})


def write_untied(directory, tensors):
    edit(directory, tie_word_embeddings=False)
    save(directory, tensors | {HEAD: tensors[EMBEDDING]})


def write_shards(directory, tensors, head=None):
    """In three files; the index may name a tied head, which save_pretrained has dropped."""
    from safetensors.numpy import save_file

    (directory / WEIGHTS).unlink()
    weight_map = {} if head is None else {HEAD: head}
    for i in range(3):
        shard = dict(list(tensors.items())[i::3])
        weight_map |= dict.fromkeys(shard, f"{i}.safetensors")
        save_file(shard, directory / f"{i}.safetensors")
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    "write",
    [
        write_released,
        write_base_model,
        write_untied,
        write_shards,
        functools.partial(write_shards, head="0.safetensors"),
        functools.partial(write_shards, head="lost.safetensors"),
    ],
)
def test_what_transformers_loads_is_read(tmp_path, exported, write):
    write(exported, stored(exported))
    _, run = import_back(tmp_path, exported)
    assert same(run.params(), params_of_run(tmp_path))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_are_read_exactly(tmp_path, exported, dtype):
    tensors = {name: value.astype(jnp.dtype(dtype)) for name, value in stored(exported).items()}
    save(exported, tensors)
    _, run = import_back(tmp_path, exported)
    params = jax.tree.map(np.asarray, params_of_run(tmp_path))
    rounded = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)).astype(np.float32), params)
    assert same(run.params(), rounded)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(1, None, ()), ([1, 107], None, (107,)), (1, [1, 107, 106], (106, 107)), ([1, 107], 1, ())],
)
def test_ids_that_end_a_text_are_kept(tmp_path, exported, in_config, in_generation, expected):
    """Generation's file goes before config.json, as in transformers."""
    edit(exported, eos_token_id=in_config)
    generation = exported / "generation_config.json"
    generation.unlink()
    if in_generation is not None:
        generation.write_text(json.dumps({"eos_token_id": in_generation}))
    _, run = import_back(tmp_path, exported)
    assert run.spec.data.stop_ids == expected
    exporter.export(tmp_path / "back", tmp_path / "again")
    for name in ("generation_config.json", "config.json"):
        written = json.loads((tmp_path / "again" / name).read_text())
        assert written["eos_token_id"] == ([1, *expected] if expected else 1), name


def test_weights_that_are_not_finite_are_read_with_a_warning(tmp_path, exported, caplog):
    tensors = stored(exported)
    tensors[EMBEDDING][3, 5] = np.nan
    save(exported, tensors | {HEAD: tensors[EMBEDDING]})
    _, run = import_back(tmp_path, exported)
    np.testing.assert_array_equal(model.embedding(run.params()), tensors[EMBEDDING])
    assert [EMBEDDING in line for line in caplog.messages if "nan" in line] == [True]


@pytest.mark.slow
def test_the_commands_need_neither_torch_nor_transformers(
    run_command, tmp_path, sentencepiece_model
):
    """Export and import as a user runs them, where importing either would end the process."""
    for name in ("torch", "transformers"):
        package = tmp_path / "fake" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"raise SystemExit('{name} was imported')")

    def run(command, path="", **flags):
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        outcome = run_command(f"prope.{command}", *arguments, PYTHONPATH=str(path))
        assert outcome.code == 0, outcome.stderr
        return outcome.result

    fake = tmp_path / "fake"
    hf = tmp_path / "hf"
    back = tmp_path / "back"
    _, params = make_run(tmp_path / "run", tokenizer=sentencepiece_model)
    result = run("export_hf", fake, workdir=tmp_path / "run", output=hf, step=7)
    assert (result["output"], result["parameters"]) == (str(hf), num_parameters(params))
    result = run("import_hf", fake, input=hf, workdir=back)
    assert (result["workdir"], result["parameters"]) == (str(back), num_parameters(params))
    shutil.rmtree(hf)  # the run stands alone
    text = tmp_path / "text"
    text.mkdir()
    lines = [json.dumps({"text": article}) + "\n" for article in articles()]
    (text / "a.jsonl").write_text("".join(lines))
    data = {"dataset": "files", "data_dir": text, "batch_size": 4}
    before = run("evaluate", workdir=tmp_path / "run", bos_every_window=True, **data)
    after = run("evaluate", workdir=back, **data)
    assert after["loss"] == before["loss"]
    assert (after["step"], after["rotated_pairs"]) == (0, 24)


# --- What is refused ----------------------------------------------------------------------------


def refused(tmp_path, *names, source=None, workdir="back", **arguments):
    """The import ends in one line with these names, and leaves nothing."""
    before = sorted(tmp_path.iterdir())
    source = source or tmp_path / "hf"
    line = refusal(lambda: importer.import_run(source, tmp_path / workdir, **arguments))
    assert all(name in line for name in names), line
    assert sorted(tmp_path.iterdir()) == before


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


NORM = "model.norm.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
# (Fields that are edited in config.json, tensors that are changed, what the line names).
EDITED = [
    ({"tie_word_embeddings": False}, {}, "tie_word_embeddings=false", HEAD),
    ({"hidden_size": 50}, {}, "(300, 48)", "(300, 50)"),
    ({"num_hidden_layers": 3}, {}, "missing", "model.layers.2.input_layernorm.weight"),
    ({"num_hidden_layers": 1}, {}, "unknown", "model.layers.1.input_layernorm.weight"),
    ({"vocab_size": 200}, {EMBEDDING: zeros(200, 48)}, "vocab_size=200", "260", "--tokenizer"),
    ({"bos_token_id": 1}, {}, "bos_token_id=1", "--tokenizer"),
    ({"eos_token_id": [5, 6]}, {}, "eos_token_id=[5, 6]", "--tokenizer"),
    ({}, {"model.layers.0.self_attn.q_proj.bias": zeros(256)}, "unknown", "q_proj.bias"),
    ({}, {HEAD: zeros(300, 48)}, f"{HEAD} differs", "tie_word_embeddings"),
    ({}, {HEAD: zeros(48, 300)}, HEAD, "(48, 300)"),
    ({}, {NORM: zeros(47)}, NORM, "(47,)", "(48,)"),
    ({}, {DOWN: zeros(48, 96, dtype=jnp.float8_e4m3fn)}, DOWN, "F8_E4M3"),
    ({}, {"language_model.model.norm.weight": zeros(48)}, "norm.weight", "twice"),
]


@pytest.mark.parametrize("case", EDITED, ids=lambda case: case[2] + " " + case[-1])
def test_what_would_be_loaded_wrongly(tmp_path, exported, case):
    fields, changes, *names = case
    tensors = stored(exported) | changes
    save(exported, {name: value for name, value in tensors.items() if value is not None})
    edit(exported, **fields)
    refused(tmp_path, str(exported), *names)


def test_unknown_tensors_have_the_names_of_their_file(tmp_path, exported):
    tensors = {name.removeprefix("model."): values for name, values in stored(exported).items()}
    names = ["layers.0.self_attn.q_proj.lora_A.weight", "layers.1._orig_mod.mlp.up_proj.weight"]
    save(exported, tensors | dict.fromkeys(names, zeros(4, 4)))
    refused(tmp_path, f"unknown tensors: {names[0]}, {names[1]};")
    # A program has wrapped the model.
    save(exported, {f"module.{name}": values for name, values in tensors.items()})
    refused(tmp_path, "missing tensors: model.embed_tokens.weight", "module.embed_tokens.weight")


@pytest.mark.parametrize("row", [0, -1])
def test_a_head_of_its_own_is_read_where_config_json_says_so(tmp_path, exported, monkeypatch, row):
    """It differs in one row; the two matrices are compared part by part."""
    monkeypatch.setattr(importer, "_ROWS", 128)
    head = stored(exported)[EMBEDDING]
    head[row] += 1
    save(exported, stored(exported) | {HEAD: head})
    edit(exported, tie_word_embeddings=False)
    _, run = import_back(tmp_path, exported)
    np.testing.assert_array_equal(model.head(run.params()), head)


def test_files_that_are_not_whole(tmp_path, exported):
    weights = exported / WEIGHTS
    whole = weights.read_bytes()
    for content in (whole[:-1], whole[:100], b""):
        weights.write_bytes(content)
        refused(tmp_path, WEIGHTS, "not a whole")
    weights.unlink()
    refused(tmp_path, WEIGHTS, INDEX)
    (exported / "config.json").write_text("[]")
    refused(tmp_path, "config.json", "JSON")
    (exported / "config.json").unlink()
    refused(tmp_path, "config.json", "missing")
    (exported / "tiny.gguf").write_bytes(b"GGUF")
    for source in (exported, exported / "tiny.gguf"):
        refused(tmp_path, f"--input={source}", "GGUF", source=source)


def test_shards_that_are_not_whole(tmp_path, exported):
    names = list(stored(exported))
    (exported / WEIGHTS).rename(exported / "a.safetensors")
    for weight_map, named in (
        (dict.fromkeys(names, "b.safetensors"), "b.safetensors"),
        (None, "weight_map"),
    ):
        (exported / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        refused(tmp_path, named)
    (exported / INDEX).write_text("{")
    refused(tmp_path, INDEX)


@pytest.mark.parametrize("ids", [[1, 300], [1, "2"]])
def test_an_end_that_is_no_id(tmp_path, exported, ids):
    (exported / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    refused(tmp_path, "eos_token_id=", "vocab_size=300")


@pytest.mark.parametrize(
    ("before_a_text", "add_bos_token", "expected"),
    [(True, None, True), (False, None, False), (False, True, True), (True, False, False)],
    ids=["Llama 3", "SmolLM2 and Qwen", "Mistral", "told not to"],
)
def test_windows_begin_as_the_tokenizer_begins_texts(
    tmp_path, exported, before_a_text, add_bos_token, expected
):
    """Its id is 0 here."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    tokens = ["<|begin|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<|end|>"), AddedToken("<|begin|>")])
    if before_a_text:
        begin = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
        single = "<|begin|> $A"
        tokenizer.post_processor = processors.TemplateProcessing(single, special_tokens=[begin])
    (exported / "tokenizer.json").write_text(tokenizer.to_str())
    values = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "add_bos_token": add_bos_token}
    (exported / "tokenizer_config.json").write_text(json.dumps(values))
    edit(exported, bos_token_id=None, eos_token_id=None)
    result, run = import_back(tmp_path, exported)
    assert run.spec.data.bos_every_window is result["bos_every_window"] is expected


@pytest.mark.parametrize("model_type", ["gemma", "gemma2"])
def test_every_window_of_a_gemma_begins_with_bos(tmp_path, model_type):
    """Where documents are cut, too; training from it holds that, or says what is missing."""
    fields = {"post_norms": True, "attention_softcap": 50.0} if model_type == "gemma2" else {}
    make_run(tmp_path / "run", 1.0, **fields)
    exporter.export(tmp_path / "run", tmp_path / "hf")
    _, run = import_back(tmp_path, tmp_path / "hf")
    assert run.spec.data.bos_every_window
    assert open_source(run.spec, tmp_path / "new", str(tmp_path / "back")).step == 0
    spec = run.spec.replace({"data.bos_every_window": False})
    with pytest.raises(UsageError, match="config.data.bos_every_window=False: .*set it to True"):
        open_source(spec, tmp_path / "new", str(tmp_path / "back"))


def test_tokenizers_of_an_import(tmp_path, exported, sentencepiece_model):
    def tokenizer_of(workdir, **arguments):
        return importer.import_run(exported, tmp_path / workdir, **arguments)["tokenizer"]

    (exported / "vocab.json").write_text("{}")
    refused(tmp_path, "vocab.json", "--tokenizer")
    refused(tmp_path, "none.model", tokenizer="none.model")
    assert tokenizer_of("bytes", tokenizer="byte") == "byte"
    folder = tmp_path / "named" / "tokenizer"
    assert tokenizer_of("named", tokenizer=sentencepiece_model) == str(folder)
    assert [file.name for file in folder.iterdir()] == ["tokenizer.model"]
    shutil.copy(sentencepiece_model, exported / "tokenizer.model")
    assert tokenizer_of("there") == str(tmp_path / "there" / "tokenizer")
    assert tokenizer_of("both", tokenizer=sentencepiece_model)
    refused(tmp_path, "--tokenizer=byte", "tokenizer.model", tokenizer="byte")


def test_pairs_by_key_head_and_layer_need_custom_code(tmp_path, caplog):
    """The refusal names the flag where it helps; and where it is not needed, nothing changes."""
    make_run(tmp_path / "run", p=1.0, num_kv_heads=2, rope_pairs="0-3 4; 5")
    flag = "or export it with --custom_code"
    export_refused(tmp_path, "hf", "config.model.rope_pairs=0-3 4; 5", "key heads of layer 0", flag)
    make_run(tmp_path / "layers", p=1.0, num_kv_heads=2, rope_pairs="0-3; 5")
    line = refusal(lambda: exporter.export(tmp_path / "layers", tmp_path / "hf"))
    assert "config.model.rope_pairs=0-3; 5: no class" in line and "one for all layers" in line
    assert line.endswith(flag)
    out = exporter.export(tmp_path / "layers", tmp_path / "code", custom_code=True)
    values = json.loads((tmp_path / "code/config.json").read_text())
    assert values["architectures"] == [out["class"]] == ["PropeForCausalLM"]
    rotates = np.array(values["rope_frequencies"]) > 0
    expected = [[[0, 1, 2, 3]] * 2, [[5]] * 2]  # of each key head of each layer
    assert [[np.flatnonzero(head).tolist() for head in layer] for layer in rotates] == expected
    (tmp_path / "code/modeling_prope.py").unlink()
    refused(tmp_path, 'model_type="prope"', source=tmp_path / "code")

    make_run(tmp_path / "shared", p=1.0, num_kv_heads=2, rope_pairs="0-3,5")
    exporter.export(tmp_path / "shared", tmp_path / "plain")
    caplog.set_level("INFO")
    exporter.export(tmp_path / "shared", tmp_path / "same", custom_code=True)
    assert "GemmaForCausalLM computes this run without --custom_code" in caplog.text
    make_run(tmp_path / "whole", p=1.0, num_kv_heads=2)
    exporter.export(tmp_path / "whole", tmp_path / "kept", pairs="0-3,5")
    for name in ("config.json", "generation_config.json", WEIGHTS):
        for copy in ("same", "kept"):
            assert (tmp_path / copy / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert len(os.listdir(tmp_path / "same")) == 4
    line = refusal(lambda: exporter.export(tmp_path / "shared", tmp_path / "hf", pairs="1"))
    assert line.startswith("--pairs=1: the run has config.model.rope_pairs=0-3,5 of its own")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling_type": "remove", "scaled_pairs": (0, 3)}, "rope_scaling_type=remove"),
        (
            {"rope_scaling_type": "dynamic", "rope_scaling_factor": 2.0, "original_seq_len": 64},
            "config.model.rope_scaling_type=dynamic",
        ),
        ({"use_qk_norm": True}, "computes use_qk_norm=False"),
    ],
)
def test_what_custom_code_does_not_compute_either(tmp_path, fields, named):
    """The flag is not offered, and does not help."""
    make_run(tmp_path / "run", p=1.0, rope_pairs="0-3; 5", **fields)
    export = functools.partial(refusal, exporter.export, tmp_path / "run", tmp_path / "hf")
    lines = [export(), export(custom_code=True)]
    assert all(named in line for line in lines), lines
    assert "custom_code" not in lines[0]


def export_refused(tmp_path, output, *names):
    line = refusal(lambda: exporter.export(tmp_path / "run", tmp_path / output))
    assert all(name in line for name in names), line


def test_what_is_there_is_left_alone(tmp_path, exported):
    before = {path: path.read_bytes() for path in exported.iterdir()}
    export_refused(tmp_path, "hf", f"--output={exported}")
    refused(tmp_path, f"--workdir={tmp_path}/run", workdir="run")
    assert {path: path.read_bytes() for path in exported.iterdir()} == before
    (tmp_path / "file").write_text("")
    refused(tmp_path, f"--workdir={tmp_path}/file/back", workdir="file/back")
    empty = tmp_path / "empty"
    empty.mkdir()
    exporter.export(tmp_path / "run", empty)
    assert {path.name for path in empty.iterdir()} == {path.name for path in before}
    assert (empty / WEIGHTS).read_bytes() == before[exported / WEIGHTS]
    (tmp_path / "new.part").mkdir()
    export_refused(tmp_path, "new", "new.part")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_half_written_output_goes_away(tmp_path, exported, monkeypatch, error):
    def fail(*_):
        raise error

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(layout.Tensor, "read", fail)
    with pytest.raises(type(error)):
        exporter.export(tmp_path / "run", tmp_path / "new")
    monkeypatch.setattr(importer, "save_imported", fail)
    with pytest.raises(type(error)):
        importer.import_run(exported, tmp_path / "back")
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_is_found_first(tmp_path, exported, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    export_refused(tmp_path, "new", "disk is full", "--output")
    assert not (tmp_path / "new").exists()
    refused(tmp_path, "disk is full", "--workdir")


# --- Memory -------------------------------------------------------------------------------------


def peak(function) -> int:
    """Bytes that the call held at most, beyond those from before it."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_shard_or_tensor_at_a_time_is_in_memory(tmp_path, monkeypatch, dtype):
    sizes = {"num_layers": 12, "embed_dim": 512, "hidden_dim": 1024, "vocab_size": 1024}
    spec = ModelSpec(**SIZES | sizes)
    expected = list_tensors(spec, FAMILIES["gemma"])
    shapes = jax.eval_shape(lambda: model.init(spec, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = 1024 * 512 * 4
    assert whole > 20 * largest
    monkeypatch.setattr(tensor_files, "_MAX_SHARD", 2 * largest)

    def read(path, layer):
        leaf = functools.reduce(operator.getitem, path, params)
        return leaf if layer is None else leaf[layer]

    written = peak(lambda: tensor_files.write_tensors(tmp_path, expected, read, dtype))
    assert written < 3.1 * largest
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    found = tensor_files.open_tensors(tmp_path)
    assert peak(lambda: importer.read_params(spec, found, expected)) < whole + 1.1 * largest
