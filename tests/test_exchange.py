"""Export to and import from the form of transformers' Gemma: the same logits, the same bytes."""

import functools
import importlib.util
import json
import operator
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from makers import GEMMA_2B, GEMMA_7B, SIZES, articles, edit, make_run, same, save, stored
from safetensors.numpy import save_file

from prope import model
from prope.config import default_config
from prope.cost.flops import num_parameters
from prope.data.tokenizer import load_tokenizer
from prope.encodings import rotated_pairs
from prope.hf import exporter as export_hf
from prope.hf import gemma as gemma_hf
from prope.hf import importer as import_hf
from prope.hf import tensors as tensor_files
from prope.hf.layout import list_tensors
from prope.workdir.hashes import hash_arrays
from prope.workdir.run import open_run

# --- Beside transformers ----------------------------------------------------------------------------------------


@pytest.fixture
def gemma():
    """transformers' class, which computes what it computes in float32."""
    pytest.importorskip("torch", reason="the hf extra is not installed")
    return pytest.importorskip(
        "transformers", reason="the hf extra is not installed"
    ).GemmaForCausalLM


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("p", [0, 0.25, 0.75, 1])
def test_transformers_computes_the_same_logits(gemma, tmp_path, p, kv_heads):
    import torch

    def exact(x, position_ids):
        pair = torch.arange(32, dtype=torch.float64)
        frequencies = torch.where(pair < int(p * 32), 10_000 ** (-2 * pair / 64), 0.0)
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos().float(), angles.sin().float()

    config, params = make_run(tmp_path / "run", p, num_kv_heads=kv_heads)
    export_hf.export(tmp_path / "run", tmp_path / "hf")
    theirs, report = gemma.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    tokens = np.random.default_rng(1).integers(0, config.model.vocab_size, (1, 2048))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    hidden = model.hidden_states(config.model, params, jnp.asarray(tokens), jnp.arange(2048)[None])
    ours = np.asarray(model.logits(params, hidden))
    assert ours.dtype == expected.dtype == np.float32
    assert expected.std() > 1
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
    theirs.model.rotary_emb.forward = exact  # most of the difference is in their angles
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
    assert theirs.generation_config.eos_token_id == 1
    # And back: what transformers saves is what was exported, byte for byte.
    theirs.save_pretrained(tmp_path / "saved")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "saved")]
    assert files[0] == files[1]
    import_hf.import_run(tmp_path / "saved", tmp_path / "back")
    back = open_run(tmp_path / "back")
    assert back.config.model.to_dict() == config.model.to_dict()
    assert same(back.params(), params)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_p_floors_to_the_same_pairs_in_transformers(gemma, d):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = default_config()
    config.model.update(SIZES | {"head_dim": d})
    for p in np.arange(0, 101) / 100:
        config.model.rope_percentage = float(p)
        theirs = transformers.GemmaConfig(**gemma_hf.to_hf(config, "float32"))
        turned = ROPE_INIT_FUNCTIONS["proportional"](theirs, device=None)[0].numpy() > 0
        assert turned.sum() == rotated_pairs(config.model), p


@pytest.mark.parametrize("fields", [{}, {"use_qk_norm": True}])
def test_transformers_reads_the_tokenizer_with_its_bos(
    gemma, tmp_path, sentencepiece_model, fields
):
    """Gemma's, beside another class, too."""
    import transformers

    make_run(tmp_path / "run", tokenizer=sentencepiece_model, **fields)
    export_hf.export(tmp_path / "run", tmp_path / "hf")
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"),
        load_tokenizer(sentencepiece_model),
    )
    for text in articles(20):
        assert theirs(text)["input_ids"] == [2, *ours.encode(text.encode())]
        assert theirs.decode(ours.encode(text.encode())) == text
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.bos_token_id) == (0, 1, 2)


# --- There and back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "sizes"),
    [
        (0, {}),
        (0.1, {"head_dim": 256}),
        (0.75, {"num_layers": 11}),
        (1, {"num_kv_heads": 4}),
        ((0.5, 0.5), {"num_kv_heads": 2, "max_wavelength": 1e6}),
    ],
)
def test_a_run_comes_back_from_its_export(tmp_path, p, sizes):
    config, params = make_run(tmp_path / "run", p, **sizes)
    out = export_hf.export(tmp_path / "run", tmp_path / "hf")
    assert (
        out["parameters"]
        == num_parameters(params)
        == sum(x.size for x in stored(tmp_path / "hf").values())
    )
    back = import_hf.import_run(tmp_path / "hf", tmp_path / "back")
    assert (back["parameters"], back["rotated_pairs"]) == (
        out["parameters"],
        np.max(out["rotated_pairs"]),
    )
    run = open_run(tmp_path / "back")
    p = 0.5 if isinstance(p, tuple) else p
    assert run.config.model.to_dict() == config.model.to_dict() | {"rope_percentage": p}
    assert (run.config.data.seq_len, run.config.data.tokenizer, run.step) == (128, "byte", 0)
    assert run.init_hash == back["init_hash"] == hash_arrays(params), (
        "of the same parameters, as training has it"
    )
    assert same(run.params(), params)
    export_hf.export(tmp_path / "back", tmp_path / "again")
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_file_is_the_librarys_own(tmp_path, dtype):
    _, params = make_run(tmp_path / "run", num_layers=11)
    export_hf.export(tmp_path / "run", tmp_path / "hf", dtype=dtype)
    ours = (tmp_path / "hf" / "model.safetensors").read_bytes()
    tensors = stored(tmp_path / "hf")
    save(tmp_path / "hf", tensors)
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == ours
    table = np.asarray(params["embedder"]["input_embedding"].astype(dtype))
    assert tensors["model.embed_tokens.weight"].tobytes() == table.tobytes()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_shards_are_read(tmp_path, exported, dtype):
    tensors = {name: value.astype(jnp.dtype(dtype)) for name, value in stored(exported).items()}
    (exported / "model.safetensors").unlink()
    files = [f"model-{i}-of-3.safetensors" for i in range(3)]
    where = {name: files[i % 3] for i, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if where[name] == file}, exported / file)
    (exported / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    import_hf.import_run(exported, tmp_path / "back")
    params, read = open_run(tmp_path / "run").params(), open_run(tmp_path / "back").params()
    assert same(read, jax.tree.map(lambda leaf: leaf.astype(dtype).astype(jnp.float32), params))


def test_an_export_in_shards_is_read_back(tmp_path, monkeypatch, exported):
    """And by transformers, where it is installed."""
    whole = stored(exported)
    monkeypatch.setattr(tensor_files, "_MAX_SHARD", 100_000)
    export_hf.export(tmp_path / "run", tmp_path / "shards")
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert (
        files[0] == f"model-00001-of-{len(files):05}.safetensors"
        and len(files) == len(set(files)) > 2
    )
    assert max((tmp_path / "shards" / name).stat().st_size for name in files) < 110_000
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    assert index["weight_map"].keys() == whole.keys() and set(index["weight_map"].values()) == set(
        files
    )
    import_hf.import_run(tmp_path / "shards", tmp_path / "back")
    assert same(open_run(tmp_path / "back").params(), open_run(tmp_path / "run").params())
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        from transformers import GemmaForCausalLM

        theirs, report = GemmaForCausalLM.from_pretrained(
            tmp_path / "shards", output_loading_info=True
        )
        assert not any(report.values()), report
        assert all(
            (theirs.state_dict()[name].numpy() == value).all() for name, value in whole.items()
        )


@pytest.mark.parametrize(
    ("released", "parameters"), [(GEMMA_2B, 2_506_172_416), (GEMMA_7B, 8_537_680_896)]
)
def test_the_released_configs_are_full_rope(tmp_path, released, parameters):
    """The numbers of parameters are those that the Hub shows."""
    (tmp_path / "config.json").write_text(json.dumps(released))
    config, _ = gemma_hf.from_hf(tmp_path / "config.json")
    assert (config.model.rope_percentage, config.model.max_wavelength) == (1.0, 10_000.0)
    assert (config.model.dtype, config.data.seq_len, config.eval.batch_size) == (
        "bfloat16",
        8192,
        1,
    )
    tensors = {tensor.name: tensor.shape for tensor in list_tensors(config.model)}
    assert sum(np.prod(shape) for shape in tensors.values()) == parameters
    heads, width = released["num_attention_heads"], released["hidden_size"]
    assert tensors["model.layers.17.self_attn.o_proj.weight"] == (width, heads * 256)
    shapes = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))
    assert num_parameters(shapes) == parameters


def test_the_released_form_is_read(tmp_path, exported):
    """Fields as in the releases, a wavelength that is not said, and the embedding a second time."""
    edit(exported, hidden_act="gelu", rope_parameters=None, rope_scaling=None, rope_theta=None)
    save(
        exported,
        (tensors := stored(exported)) | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
    )
    assert import_hf.import_run(exported, tmp_path / "back")["rope_percentage"] == 1
    run = open_run(tmp_path / "back")
    assert run.config.model.max_wavelength == 1e4
    assert same(run.params(), open_run(tmp_path / "run").params())


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_p_is_read_from_either_field(exported, field):
    rope = {"type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    edit(exported, **({"rope_parameters": None, "rope_scaling": None} | {field: rope}))
    config, _ = gemma_hf.from_hf(exported / "config.json")
    assert (config.model.rope_percentage, config.model.max_wavelength) == (0.25, 1e6)
    edit(exported, **{field: {"rope_type": "default", "rope_theta": 1e5}})
    config, _ = gemma_hf.from_hf(exported / "config.json")
    assert (config.model.rope_percentage, config.model.max_wavelength) == (1.0, 1e5)


@pytest.mark.slow
def test_the_commands_need_neither_torch_nor_transformers(
    run_command, tmp_path, sentencepiece_model
):
    """Export and import as a user runs them, where an import of either would end the process; then what reads runs."""
    for name in ("torch", "transformers"):
        (tmp_path / "fake" / name).mkdir(parents=True)
        (tmp_path / "fake" / name / "__init__.py").write_text(
            f"raise SystemExit('{name} was imported')"
        )

    def run(command, path="", **flags):
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        outcome = run_command(f"prope.{command}", *arguments, PYTHONPATH=str(path))
        assert outcome.code == 0, outcome.stderr
        return outcome.result

    _, params = make_run(tmp_path / "run", tokenizer=sentencepiece_model)
    out = run(
        "export_hf", tmp_path / "fake", workdir=tmp_path / "run", output=tmp_path / "hf", step=7
    )
    assert (out["output"], out["parameters"]) == (str(tmp_path / "hf"), num_parameters(params))
    back = run("import_hf", tmp_path / "fake", input=tmp_path / "hf", workdir=tmp_path / "back")
    assert (back["workdir"], back["parameters"]) == (str(tmp_path / "back"), num_parameters(params))
    shutil.rmtree(tmp_path / "hf")  # the run stands alone
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in articles()))
    other = {"dataset": "files", "data_dir": text, "batch_size": 4}
    evaluated = [run("evaluate", workdir=tmp_path / name, **other) for name in ("run", "back")]
    assert evaluated[0]["loss"] == evaluated[1]["loss"]
    assert (evaluated[1]["step"], evaluated[1]["rotated_pairs"]) == (0, 24)
    assert run("sample", workdir=tmp_path / "back", prompt="turn", length=5)["step"] == 0


# --- Memory -----------------------------------------------------------------------------------------------------


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
    config = default_config()
    config.model.update(
        SIZES | {"num_layers": 12, "embed_dim": 512, "hidden_dim": 1024, "vocab_size": 1024}
    )
    expected = list_tensors(config.model)
    shapes = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = 1024 * 512 * 4
    assert whole > 20 * largest

    def read(path, layer):
        parameter = functools.reduce(operator.getitem, path, params)
        return parameter if layer is None else parameter[layer]

    monkeypatch.setattr(tensor_files, "_MAX_SHARD", 2 * largest)
    assert peak(lambda: tensor_files.write_tensors(tmp_path, expected, read, dtype)) < 3.1 * largest
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    found = tensor_files.open_tensors(tmp_path)
    assert peak(lambda: import_hf.read_params(config, found, expected)) < whole + 1.1 * largest
