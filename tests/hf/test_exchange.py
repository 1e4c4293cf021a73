"""Export to and import from the format of transformers' Gemma: the same logits, the same bytes."""

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
from safetensors.numpy import save_file
from support.exchange import GEMMA_2B, GEMMA_7B, edit, save, stored
from support.models import forward, same
from support.runs import SIZES, make_run
from support.text import articles

from prope import model
from prope.config import default_config
from prope.cost.flops import num_parameters
from prope.data.tokenizer import load_tokenizer
from prope.encodings import rotated_pairs
from prope.hf import config_json
from prope.hf import exporter as export_hf
from prope.hf import importer as import_hf
from prope.hf import tensors as tensor_files
from prope.hf.families import FAMILIES
from prope.hf.layout import list_tensors
from prope.workdir.hashes import hash_arrays
from prope.workdir.run import open_run


def parameter(tree, tensor_path, layer):
    """The parameter at a path, or its row for a layer."""
    leaf = functools.reduce(operator.getitem, tensor_path, tree)
    return leaf if layer is None else leaf[layer]


def encoding_of(directory):
    config, _ = config_json.from_hf(directory / "config.json")
    return config.model.rope_percentage, config.model.max_wavelength


def export_run(tmp_path, p=0.75, dtype="float32", **sizes):
    """Exports a run to hf/: (config, params, path of hf)."""
    config, params = make_run(tmp_path / "run", p, **sizes)
    export_hf.export(tmp_path / "run", tmp_path / "hf", dtype=dtype)
    return config, params, tmp_path / "hf"


def import_back(tmp_path, directory):
    """Imports into back/: (result, run)."""
    result = import_hf.import_run(directory, tmp_path / "back")
    return result, open_run(tmp_path / "back")


def load_in_transformers(directory):
    """Its model of a directory; fails where it lacks or adds a tensor."""
    from transformers import GemmaForCausalLM

    theirs, report = GemmaForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    return theirs


# --- Beside transformers ------------------------------------------------------------------------


@pytest.fixture
def transformers():
    """The library, with torch, which computes in float32."""
    pytest.importorskip("torch", reason="the hf extra is not installed")
    return pytest.importorskip("transformers", reason="the hf extra is not installed")


def exact_angles(p):
    """A forward pass of their rotation in float64: most of the difference is in their angles."""
    import torch

    pair = torch.arange(32, dtype=torch.float64)
    freqs = 10_000 ** (-2 * pair / 64)
    freqs = freqs * (pair < int(p * 32))

    def forward(x, position_ids):
        angles = position_ids[..., None] * freqs
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().float(), angles.sin().float()

    return forward


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("p", [0, 0.25, 0.75, 1])
def test_transformers_computes_the_same_logits(transformers, tmp_path, p, kv_heads):
    import torch

    config, params, hf = export_run(tmp_path, p, num_kv_heads=kv_heads)
    theirs = load_in_transformers(hf)
    tokens = np.random.default_rng(1).integers(0, config.model.vocab_size, (1, 2048))
    positions = jnp.arange(2048)[None]
    ours = np.asarray(forward(config.model, params, jnp.asarray(tokens), positions))
    with torch.no_grad():
        rounded = theirs(torch.tensor(tokens)).logits.numpy()
        theirs.model.rotary_emb.forward = exact_angles(p)
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    assert ours.dtype == expected.dtype == np.float32
    assert expected.std() > 1
    np.testing.assert_allclose(ours, rounded, rtol=0, atol=1e-4)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
    assert theirs.generation_config.eos_token_id == 1
    # And back: what transformers saves is what was exported, byte for byte.
    saved = tmp_path / "saved"
    theirs.save_pretrained(saved)
    name = "model.safetensors"
    assert (saved / name).read_bytes() == (hf / name).read_bytes()
    _, run = import_back(tmp_path, saved)
    assert run.config.model.to_dict() == config.model.to_dict()
    assert same(run.params(), params)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_p_floors_to_the_same_pairs_in_transformers(transformers, d):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = default_config()
    config.model.update(SIZES | {"head_dim": d})
    for p in np.arange(0, 101) / 100:
        config.model.rope_percentage = float(p)
        theirs = transformers.GemmaConfig(**config_json.to_hf(config, "float32"))
        freqs = ROPE_INIT_FUNCTIONS["proportional"](theirs, device=None)[0].numpy()
        assert np.count_nonzero(freqs > 0) == rotated_pairs(config.model), p


@pytest.mark.parametrize("fields", [{}, {"use_qk_norm": True}])
def test_transformers_reads_the_tokenizer_with_its_bos(
    transformers, tmp_path, sentencepiece_model, fields
):
    """Gemma's, beside another class, too."""
    _, _, hf = export_run(tmp_path, tokenizer=sentencepiece_model, **fields)
    theirs = transformers.AutoTokenizer.from_pretrained(hf)
    ours = load_tokenizer(sentencepiece_model)
    for text in articles(20):
        ids = ours.encode(text.encode())
        assert theirs(text)["input_ids"] == [2, *ids]
        assert theirs.decode(ids) == text
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.bos_token_id) == (0, 1, 2)


# --- There and back -----------------------------------------------------------------------------


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
    config, params, hf = export_run(tmp_path, p, **sizes)
    number = sum(tensor.size for tensor in stored(hf).values())
    assert number == num_parameters(params)
    result, run = import_back(tmp_path, hf)
    assert result["parameters"] == number
    expected = config.model.to_dict() | {"rope_percentage": np.max(p)}
    assert run.config.model.to_dict() == expected
    assert result["rotated_pairs"] == rotated_pairs(run.config.model)
    assert (run.config.data.seq_len, run.config.data.tokenizer, run.step) == (128, "byte", 0)
    assert run.init_hash == result["init_hash"] == hash_arrays(params), "as training has it"
    assert same(run.params(), params)
    again = tmp_path / "again"
    out = export_hf.export(tmp_path / "back", again)
    assert out["parameters"] == number
    assert out["rotated_pairs"] == result["rotated_pairs"]
    names = sorted(path.name for path in hf.iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    for name in names:
        assert (again / name).read_bytes() == (hf / name).read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_file_is_as_the_library_writes_it(tmp_path, dtype):
    _, params, hf = export_run(tmp_path, num_layers=11, dtype=dtype)
    file = hf / "model.safetensors"
    ours = file.read_bytes()
    tensors = stored(hf)
    save(hf, tensors)
    assert file.read_bytes() == ours
    table = np.asarray(params["embedder"]["input_embedding"].astype(dtype))
    assert tensors["model.embed_tokens.weight"].tobytes() == table.tobytes()
    assert json.loads((hf / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_shards_are_read(tmp_path, exported, dtype):
    tensors = {name: value.astype(jnp.dtype(dtype)) for name, value in stored(exported).items()}
    (exported / "model.safetensors").unlink()
    where = {}
    for i in range(3):
        file = f"model-{i}-of-3.safetensors"
        shard = dict(list(tensors.items())[i::3])
        where |= dict.fromkeys(shard, file)
        save_file(shard, exported / file)
    index = json.dumps({"metadata": {}, "weight_map": where})
    (exported / "model.safetensors.index.json").write_text(index)
    _, run = import_back(tmp_path, exported)
    params = open_run(tmp_path / "run").params()
    rounded = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(jnp.float32), params)
    assert same(run.params(), rounded)


def test_an_export_in_shards_is_read_back(tmp_path, monkeypatch, exported):
    """And by transformers, where it is installed."""
    whole = stored(exported)
    monkeypatch.setattr(tensor_files, "_MAX_SHARD", 100_000)
    shards = tmp_path / "shards"
    export_hf.export(tmp_path / "run", shards)
    files = {path.name: path.stat().st_size for path in shards.glob("*.safetensors")}
    assert min(files) == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2
    assert max(files.values()) < 110_000
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    assert index["weight_map"].keys() == whole.keys()
    assert set(index["weight_map"].values()) == files.keys()
    _, run = import_back(tmp_path, shards)
    assert same(run.params(), open_run(tmp_path / "run").params())
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        theirs = load_in_transformers(shards).state_dict()
        for name, value in whole.items():
            np.testing.assert_array_equal(theirs[name], value)


@pytest.mark.parametrize(
    ("released", "parameters"), [(GEMMA_2B, 2_506_172_416), (GEMMA_7B, 8_537_680_896)]
)
def test_the_released_configs_are_full_rope(tmp_path, released, parameters):
    """The numbers of parameters are those that the Hub shows."""
    (tmp_path / "config.json").write_text(json.dumps(released))
    assert encoding_of(tmp_path) == (1.0, 10_000.0)
    config, _ = config_json.from_hf(tmp_path / "config.json")
    assert config.model.dtype == "bfloat16"
    assert (config.data.seq_len, config.eval.batch_size) == (8192, 1)
    tensors = {
        tensor.name: tensor.shape for tensor in list_tensors(config.model, FAMILIES["gemma"])
    }
    assert sum(np.prod(shape) for shape in tensors.values()) == parameters
    heads = released["num_attention_heads"]
    output = tensors["model.layers.17.self_attn.o_proj.weight"]
    assert output == (released["hidden_size"], heads * 256)
    shapes = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))
    assert num_parameters(shapes) == parameters


def test_the_released_form_is_read(tmp_path, exported):
    """Fields as in the releases, no wavelength, and the embedding a second time."""
    edit(exported, hidden_act="gelu", rope_parameters=None, rope_scaling=None, rope_theta=None)
    tensors = stored(exported)
    save(exported, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    result, run = import_back(tmp_path, exported)
    assert result["rope_percentage"] == 1
    assert run.config.model.max_wavelength == 1e4
    assert same(run.params(), open_run(tmp_path / "run").params())


EMBEDDING = "model.embed_tokens.weight"
FREQUENCIES = np.ones(4, np.float32)


def write_frequencies(directory, tensors):
    """As releases before 2024 have them: a buffer of each layer."""
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    save(directory, tensors | {name.format(i): FREQUENCIES for i in range(2)})


def write_one_buffer(directory, tensors):
    save(directory, tensors | {"model.rotary_emb.inv_freq": FREQUENCIES})


def write_base_model(directory, tensors):
    """As GemmaModel saves itself, without a head."""
    bare = {name.removeprefix("model."): values for name, values in tensors.items()}
    save(directory, bare | {"rotary_emb.inv_freq": FREQUENCIES})


def write_untied(directory, tensors):
    edit(directory, tie_word_embeddings=False)
    save(directory, tensors | {"lm_head.weight": tensors[EMBEDDING]})


def write_wide(directory, tensors):
    save(directory, {name: values.astype(np.float64) for name, values in tensors.items()})


def write_index_with_head(directory, tensors, file="a.safetensors"):
    """The index names a tied head, which save_pretrained has dropped."""
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {"lm_head.weight": file}
    index = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)


def write_index_with_lost_head(directory, tensors):
    write_index_with_head(directory, tensors, "b.safetensors")


@pytest.mark.parametrize(
    "write",
    [
        write_frequencies,
        write_one_buffer,
        write_base_model,
        write_untied,
        write_wide,
        write_index_with_head,
        write_index_with_lost_head,
    ],
)
def test_what_transformers_loads_is_read(tmp_path, exported, write):
    write(exported, stored(exported))
    _, run = import_back(tmp_path, exported)
    assert same(run.params(), open_run(tmp_path / "run").params())


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
    assert tuple(run.config.data.stop_ids) == expected
    export_hf.export(tmp_path / "back", tmp_path / "again")
    for name in ("generation_config.json", "config.json"):
        written = json.loads((tmp_path / "again" / name).read_text())
        assert written["eos_token_id"] == ([1, *expected] if expected else 1), name


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_read_with_a_warning(tmp_path, exported, caplog, value):
    tensors = stored(exported)
    tensors[EMBEDDING][3, 5] = value
    save(exported, tensors | {"lm_head.weight": tensors[EMBEDDING]})
    _, run = import_back(tmp_path, exported)
    embedding = model.embedding(run.params())
    np.testing.assert_array_equal(embedding, tensors[EMBEDDING])
    assert f"{EMBEDDING} has values that are nan or infinite" in caplog.text
    assert caplog.text.count("nan or infinite") == 1


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_p_is_read_from_either_field(exported, field):
    edit(exported, rope_parameters=None, rope_scaling=None)
    rope = {"type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    edit(exported, **{field: rope})
    assert encoding_of(exported) == (0.25, 1e6)
    edit(exported, **{field: {"rope_type": "default", "rope_theta": 1e5}})
    assert encoding_of(exported) == (1.0, 1e5)


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
    before = run("evaluate", workdir=tmp_path / "run", **data)
    after = run("evaluate", workdir=back, **data)
    assert after["loss"] == before["loss"]
    assert (after["step"], after["rotated_pairs"]) == (0, 24)
    assert run("sample", workdir=back, prompt="turn", length=5)["step"] == 0


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
    config = default_config()
    sizes = {"num_layers": 12, "embed_dim": 512, "hidden_dim": 1024, "vocab_size": 1024}
    config.model.update(SIZES | sizes)
    expected = list_tensors(config.model, FAMILIES["gemma"])
    shapes = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = 1024 * 512 * 4
    assert whole > 20 * largest
    monkeypatch.setattr(tensor_files, "_MAX_SHARD", 2 * largest)
    read = functools.partial(parameter, params)
    written = peak(lambda: tensor_files.write_tensors(tmp_path, expected, read, dtype))
    assert written < 3.1 * largest
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    found = tensor_files.open_tensors(tmp_path)
    assert peak(lambda: import_hf.read_params(config, found, expected)) < whole + 1.1 * largest
