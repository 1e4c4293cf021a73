"""Configs: what a field may hold; every config of the project builds, and trains when small."""

import importlib.util
import json
import math
import re
import runpy
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import ROOT, logged, refusal
from support.models import ALL_SWITCHES, frequencies_of, num_parameters

from prope import parameters
from prope.config import (
    default_config,
    flat,
    from_dict,
    resolve,
    set_layer_percentages,
    shrink_for_laptop,
)
from prope.data.tasks.tasks import TASKS
from prope.encodings import FIELDS, LOGIT_SCALES, SCALINGS, TYPES
from prope.hf.families import FAMILIES
from prope.optimizer import make_optimizer
from prope.runtime.interrupts import Request
from prope.runtime.xla_flags import PLATFORMS
from prope.spec.data import EMBEDDED, DataSpec, override_dataset
from prope.spec.model import REMAT
from prope.spec.run import FIELDS as ALL_FIELDS
from prope.spec.run import Spec, differences
from prope.step import init_state, resolve_attention, resolve_scan

FILES = sorted(set((ROOT / "configs").glob("*.py")) - {ROOT / "configs/families.py"})
# The tiny runs of these are like those of other pages, which are trained.
ALIKE = (
    *("table2", "gemma_2b_128k", "gemma_2b_1m", "gemma_300m_wiki", "gemma2_like", "gemma3_like"),
    *("gemma3_1b", "gemma4_like", "rnope_swa", "smollm3_like", "p_star"),
    "unrotated_or_fast",
)
TRAINED = [
    path for path in FILES if path.stem not in ALIKE and not path.stem.startswith("encodings_")
]


def load(path, *arguments):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(*arguments)


def load_spec(path, *arguments):
    return resolve(load(path, *arguments))


def module_of(name):
    return runpy.run_path(str(ROOT / "configs" / f"{name}.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_is_whole_and_builds_at_full_size(path):
    config = load(path)
    assert flat(config).keys() == flat(default_config()).keys()
    spec = resolve(config)
    if path.stem in ALIKE:
        load_spec(path, "tiny")
    params = jax.eval_shape(lambda: init_state(spec, make_optimizer(spec))[0])
    sizes = {f"gemma_2b_{page}": 2_506_434_560 for page in ("128k", "1m", "flan", "wiki")}
    sizes["gemma_300m_wiki"] = 298_175_232
    assert num_parameters(params) == sizes.get(path.stem, num_parameters(params))
    assert path.stem in sizes or not path.stem.startswith("gemma_")
    page = importlib.util.spec_from_file_location(path.stem, path).loader.get_source(path.stem)
    for heading in ("What ", "Command ", "Hardware ", "Hours ", "Expected "):
        assert f"\n{heading}" in page, f"the page of {path.name} lacks {heading}"


# Checkpoints as they were published: family, sizes, further fields, parameters as transformers
# counts them and Gemma 4's layer_scalar, page.
SIZES = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "hidden_dim")
BIAS = {"qkv_bias": True}
UNTIED = {"tied": False}
K_IS_V = {"global_key_is_value": True, "num_global_kv_heads": 1}
E4B = {"num_kv_shared_layers": 18, "per_layer_input_dim": 256}
E2B = {
    "num_kv_shared_layers": 20,
    "per_layer_input_dim": 256,
    "use_double_wide_mlp": True,
    "layer_types": ("sliding_attention",) * 4 + ("full_attention",),
}
RELEASED = [
    ("gemma2", (26, 2304, 8, 4, 256, 9216), 256_000, {}, 2_614_341_888, None),
    ("gemma3", (18, 640, 4, 1, 256, 2048), 262_144, {}, 268_098_176, "gemma3_270m"),
    ("gemma3", (26, 1152, 4, 1, 256, 6912), 262_144, {}, 999_885_952, "gemma3_1b"),
    ("gemma4", (35, 1536, 8, 1, 256, 6144), 262_144, E2B, 4_628_569_344 + 35, "gemma4_e2b"),
    ("gemma4", (42, 2560, 8, 2, 256, 10240), 262_144, E4B, 7_463_013_376 + 42, None),
    ("gemma4", (48, 3840, 16, 8, 256, 15360), 262_144, K_IS_V, 11_907_350_272 + 48, "gemma4_12b"),
    (
        *("gemma4", (60, 5376, 32, 16, 256, 21504), 262_144),
        *(K_IS_V | {"num_global_kv_heads": 4}, 30_697_345_280 + 60, None),
    ),
    ("llama", (16, 2048, 32, 8, 64, 8192), 128_256, {}, 1_235_814_400, "llama32_1b"),
    ("llama", (32, 4096, 32, 8, 128, 14336), 128_256, UNTIED, 8_030_261_248, None),
    ("llama", (30, 576, 9, 3, 64, 1536), 49_152, {}, 134_515_008, "smollm2_135m"),
    ("smollm3", (36, 2048, 16, 4, 128, 11008), 128_256, {}, 3_075_098_624, None),
    ("llama", (24, 896, 14, 2, 64, 4864), 151_936, BIAS, 494_032_768, None),
    ("qwen3", (28, 1024, 16, 8, 128, 3072), 151_936, {}, 596_049_920, "qwen3_0_6b"),
]


@pytest.mark.parametrize("released", RELEASED, ids=lambda released: f"{released[0]}-{released[4]}")
def test_a_family_at_published_sizes_has_the_parameters_of_its_checkpoint(released):
    family, sizes, vocab_size, fields, count, page = released
    config = default_config()
    config.model.update(dict(zip(SIZES, sizes, strict=True)) | {"vocab_size": vocab_size})
    module_of("families")[family](config)
    config.model.update(fields)
    assert parameters.count(resolve(config).model) == count
    if page is not None:
        spec = load_spec(ROOT / "configs" / f"{page}.py")
        assert spec.optimizer.learning_rate == 3e-4, "of a checkpoint that is trained on"
        assert [getattr(spec.model, size) for size in SIZES] == list(sizes)
        assert parameters.count(spec.model) == count


@pytest.mark.parametrize(
    ("name", "count"),
    # Gemma's files have 64 entries more than its tokenizer.
    [("gemma3_4b", 3_880_099_328 + 64 * 2560), ("llama31_8b", 8_030_261_248)],
)
def test_a_conversion_has_the_size_of_its_checkpoint(name, count):
    assert parameters.count(load_spec(ROOT / "configs/conversion.py", name).model) == count


def test_a_run_takes_text_rate_and_log_from_one_file_of_the_users(run_command, tmp_path):
    """Copied to where the command starts. The rate: 3e-3 sqrt(2 / step), after 2 steps."""
    text = (ROOT / "configs/custom.py").read_text().replace("configs.custom", "my_config")
    (tmp_path / "my_config.py").write_text(text)
    arguments = ["--config=my_config.py:tiny", "--workdir=W", "--config.log_every=1"]
    go = {"patch": f"import os\nos.chdir({str(tmp_path)!r})"}
    done = run_command("prope.train", *arguments, "--stop_at_step=3", **go)
    assert done.code == 0, done.stderr
    assert "windows of 64 tokens of my_config:documents" in done.stderr
    assert re.search(r"^step 3: \d\.\d{3} bits$", done.stderr, re.MULTILINE)
    rates = [3e-3 * rate for rate in (1 / 2, 1, math.sqrt(2 / 3))]
    assert list(logged(tmp_path / "W", "learning_rate").values()) == pytest.approx(rates)
    assert (tmp_path / "W/metrics.csv").read_text().count("\n") == 4
    (tmp_path / "my_config.py").write_text(f"{text}\n# another line\n")
    error = run_command("prope.train", *arguments, **go).error
    assert re.search(r"\(optimizer.schedule: my_config:schedule@\w+, not my_\S+:schedule@", error)


HALF = 0.5  # the same number in all dtypes
NUMBERS = [
    lambda P: np.full(P, HALF),
    lambda P: np.full((1, P), HALF, np.float16),
    lambda P: jnp.full(P, HALF, jnp.bfloat16),
    lambda P: [jnp.float32(HALF)] * P,
    lambda P: [np.full(P, np.float32(HALF))],
]
NO_NUMBERS = [
    *(lambda P: None, lambda P: HALF, lambda P: {0: HALF}, lambda P: (HALF for _ in range(P))),
    *(lambda P: [HALF] * (P - 1), lambda P: [str(HALF)] * P, lambda P: np.full(P, HALF + 0j)),
    *(lambda P: [np.nan] * P, lambda P: [7] * P, lambda P: [-HALF] * P, lambda P: HALF / 0),
    *(lambda P: sys.exit(3), lambda P: np.full((1, 1, P), HALF), lambda P: [[HALF] * P, [HALF]]),
]


def test_numbers_of_a_users_function_are_taken_in_any_form_or_refused(tmp_path, monkeypatch):
    text = "def frequencies(head_dim, layer):\n    return answer(head_dim // 2)\n"
    (tmp_path / "given_numbers.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("given_numbers")
    config = default_config()
    config.model.rope_type = "given_numbers:frequencies"
    for module.answer in NUMBERS:
        spec = resolve(config)
        for layer in spec.model.layers:
            np.testing.assert_array_equal(layer.frequencies, np.full((1, 32), HALF))
        assert resolve(from_dict(json.loads(json.dumps(spec.to_dict())))) == spec
    for module.answer in NO_NUMBERS:
        error = refusal(resolve, config)
        assert re.fullmatch(f"config.model.rope_type={config.model.rope_type}: layer 0: .*", error)


@pytest.mark.slow
@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_every_config_trains_at_a_small_size_with_nothing_brought_along(
    path, run_command, tmp_path
):
    trained = run_command("prope.train", f"--config={path}:tiny", f"--workdir={tmp_path}/run")
    assert trained.code == 0 and trained.result["step"] == 20, trained.stderr
    replaced = "tiny: python_docs replaces " in trained.stderr
    offline = (*EMBEDDED, "synthetic/mix", "longcontext/mix", "configs.custom:documents")
    assert replaced == (load(path).data.dataset not in offline)


# Rotated pairs of every method, by hand from the periods 2 pi b^(2k/d).
WIKI = {
    "rope": 32,
    "nope": 0,
    "p_rope_0.25": 8,
    "p_rope_0.5": 16,
    "p_rope_0.75": 24,
    "partial_0.25": 8,
    "partial_0.5": 16,
    "partial_0.75": 24,
    "cutoff_1": 16,
    "cutoff_0.5": 13,
    "cope": 31,
    "rope_id": 16,
    "base_length": 32,
    "base_bound": 32,
    "rnope_swa": [32, 32, 32, 0],
    "p_rope_swa": [32, 32, 32, 8],
    "swa_only": [32, 32, 32, 32],
}
OF_TASKS = {
    "rope": 16,
    "nope": 0,
    "p_rope_0.25": 4,
    "p_rope_0.5": 8,
    "p_rope_0.75": 12,
    "partial_0.25": 4,
    "partial_0.5": 8,
    "partial_0.75": 12,
    "cutoff_1": 11,
    "cutoff_0.5": 9,
    "cope": 15,
    "rope_id": 8,
    "base_length": 16,
    "base_bound": 16,
}


OF_LONGCONTEXT = OF_TASKS | {
    "rnope_swa": [16, 16, 16, 0],
    "p_rope_swa": [16, 16, 16, 4],
    "swa_only": [16, 16, 16, 16],
}


@pytest.mark.parametrize(
    ("name", "pairs"),
    [("encodings_wiki", WIKI), ("encodings_synthetic", OF_TASKS), ("longcontext", OF_LONGCONTEXT)],
)
def test_the_encodings_of_a_page_differ_in_nothing_else(name, pairs):
    page = module_of(name)
    specs = {method: resolve(page["get_config"](method)) for method in page["METHODS"]}
    assert {method: spec.model.rotated_pairs for method, spec in specs.items()} == pairs
    for spec in specs.values():
        lines = differences(spec.flat(), specs["rope"].flat())
        assert {line.partition(":")[0] for line in lines} <= {f"model.{name}" for name in FIELDS}
    for method in set(pairs) - {"base_bound"}:
        resolve(page["get_config"](f"{method}-tiny"))
    grid = page["get_sweep"]("rates")
    assert len(grid["config"]) == len(pairs) and len(grid["optimizer.learning_rate"]) == 3
    assert page["get_sweep"]("cope-tiny")["config"] == (f"{ROOT}/configs/{name}.py:cope-tiny",)
    for wrong in ("cape", "rope-huge"):
        with pytest.raises(ValueError, match=f"^{wrong}: "):
            page["get_config"](wrong)


def test_the_encodings_go_by_the_length():
    """CoPE: 32 pairs, of which 18 turn once in 1024 tokens, leave 14; 69 % of them are 9.66."""
    page = module_of("encodings_wiki")
    short, long = (
        {method: resolve(page["get_config"](method + size)).model for method in WIKI}
        for size in ("", "-long")
    )
    assert (short["cope"].clip_low_n, long["cope"].clip_low_n) == (11, 10)
    assert (short["base_length"].max_wavelength, long["base_length"].max_wavelength) == (512, 1024)
    for method in page["WITH_WINDOWS"]:
        assert (short[method].sliding_window, long[method].sliding_window) == (128, 256)
    assert (short["base_bound"].max_wavelength, long["base_bound"].max_wavelength) == (
        pytest.approx(3440.5, abs=0.1),
        pytest.approx(7757.8, abs=0.1),
    )
    assert long["cutoff_1"].rotated_pairs == 18 and long["p_rope_0.5"].rotated_pairs == 16
    cutoff, p_rope = (frequencies_of(short[method]) for method in ("cutoff_1", "p_rope_0.5"))
    np.testing.assert_array_equal(cutoff, p_rope)
    assert long["rope_id"].original_seq_len == 1024


def test_the_controlled_encodings_are_those_of_the_other_page():
    """QK-norm of the method without rotation alone is another change."""
    page = module_of("encodings_controlled")
    wiki = module_of("encodings_wiki")
    for method in page["METHODS"]:
        spec = resolve(page["get_config"](method))
        known = resolve(wiki["get_config"](method.removesuffix("_qk_norm")))
        names = {line.partition(":")[0] for line in differences(spec.flat(), known.flat())}
        allowed = {"data.validation_fraction", "optimizer.learning_rate"}
        if method == "nope_qk_norm":
            allowed.add("model.use_qk_norm")
            assert spec.model.use_qk_norm
        assert names <= allowed
        assert spec.optimizer.learning_rate in page["RATES"]
    chosen = {*page["SEEDS"]["rates"]}
    assert chosen.isdisjoint(page["SEEDS"]["full"]), "rates are chosen on other seeds"
    assert page["get_config"]("rope-python").data.dataset == "python_source"


def test_slow_pairs_turn_as_often_as_they_say():
    """Periods by the formula 2 pi wavelength^(2 k / head_dim)."""
    page = module_of("slow_pairs")
    pairs = np.arange(32)
    for argument in page["GRID"]:
        method, wavelength, length = argument.split("-")
        spec = resolve(page["get_config"](argument))
        cutoff = float(method.removeprefix("cutoff_")) if method != "rope" else math.inf
        periods = 2 * math.pi * float(wavelength) ** (2 * pairs / 64)
        expected = (periods <= cutoff * int(length)).sum()
        assert spec.model.rotated_pairs == expected, argument
        assert spec.batch_size * spec.data.seq_len == 2048
    assert len(page["GRID"]) == 23, "wavelengths, lengths and cutoffs, without the one that is RoPE"

    def frequencies(argument):
        return resolve(page["get_config"](argument)).model.layers[0].frequencies[0]

    kept = frequencies("cutoff_1-10000-512")
    rotated = kept[kept > 0]
    for name in ("narrow", "narrow_4"):
        np.testing.assert_allclose(frequencies(f"{name}-10000-512"), rotated, rtol=1e-6)
    with pytest.raises(ValueError, match="^cutoff_2-100-512: "):
        page["get_config"]("cutoff_2-100-512")


def test_the_slowest_pair_of_each_stage_turns_once_in_a_window():
    for page, period in (("wiki", 5847), ("128k", 106_631), ("1m", 985_127)):
        spec = load_spec(ROOT / "configs" / f"gemma_2b_{page}.py")
        freqs = np.concatenate(frequencies_of(spec.model))
        assert round(2 * math.pi / freqs[freqs > 0].min()) == period <= spec.data.seq_len
        assert spec.batch_size * spec.data.seq_len == 2**22 and spec.model.rope_percentage == 0.75


def test_a_small_size_brings_its_own_text():
    data = load(ROOT / "configs/gemma_2b_wiki.py", "tiny").data
    assert (data.dataset, data.tokenizer) == ("python_docs", "byte")
    config = load(ROOT / "configs/gemma_2b_flan.py", "tiny")
    assert (config.data.mixture, config.data.template, config.data.loss_on) == ((), "", "all")
    config.data.update({"dataset": "files", "data_dir": "elsewhere"})
    assert resolve(config).data.data_dir == "elsewhere"


def test_p_may_be_a_number_per_layer():
    config = default_config()
    set_layer_percentages(config, (1.0, 1.0, 1.0, 0.25))
    spec = resolve(config)
    again = from_dict(json.loads(json.dumps(spec.to_dict())))
    assert resolve(again) == spec and spec.model.rope_percentage == (1.0, 1.0, 1.0, 0.25)
    assert len(differences(spec.flat(), Spec().flat())) == 1
    assert resolve(shrink_for_laptop(again, "tiny")).model.rope_percentage == (1.0, 0.25)


@pytest.mark.parametrize(
    ("platform", "requested", "expected"),
    [
        ("cpu", None, ("xla", None)),
        ("cpu", "auto", ("xla", None)),
        ("gpu", None, ("cudnn", "xla")),  # which takes heads of 256, and none of 512
        ("gpu", "auto", ("cudnn", "xla")),
        ("tpu", "auto", ("splash", None)),
        ("tpu", "xla", ("splash", "xla")),
    ],
)
def test_attention_is_chosen_for_each_kind_of_layer(platform, requested, expected):
    spec = load_spec(ROOT / "configs" / "gemma4_12b.py")
    spec = spec.replace({"model.global_attention": requested})
    device = SimpleNamespace(platform=platform, compute_capability="9.0")
    model = resolve_attention(spec, device).model
    assert (model.attention, model.global_attention) == expected


@pytest.mark.parametrize(("platform", "expected"), [("tpu", "splash"), ("gpu", "xla")])
def test_attention_that_masks_documents_is_chosen_for_the_device(platform, expected):
    fields = {"model.dtype": "bfloat16", "model.head_dim": 128, "data.mask_documents": True}
    device = SimpleNamespace(platform=platform, compute_capability="9.0")
    assert resolve_attention(Spec().replace(fields), device).model.attention == expected


@pytest.mark.parametrize(
    ("platforms", "asked", "scanned"),
    [
        (["gpu"], None, False),
        (["gpu", "gpu"], None, True),
        (["tpu"], None, True),
        (["cpu"], None, True),
        (["gpu"], True, True),
        (["cpu"], False, False),
    ],
)
def test_a_step_on_one_gpu_is_unrolled(platforms, asked, scanned):
    devices = [SimpleNamespace(platform=platform) for platform in platforms]
    spec = Spec().replace({"model.scan_layers": asked})
    assert resolve_scan(spec, devices).model.scan_layers is scanned


# Fields with which a run is resumed that was begun with others: how it is executed.
MAY_CHANGE = {
    *("accumulation", "on_nonfinite", "log_every", "eval_every", "checkpoint_every"),
    *("watchdog_minutes", "profile", "log_to"),
    *(f"model.{name}" for name in ("attention", "global_attention", "remat", "scan_layers")),
    *(
        f"data.{name}"
        for name in ("data_dir", "cache_dir", "store", "num_workers", "stop_ids", "max_bad_rows")
    ),
    *(f"checkpoint.{name}" for name in ("max_to_keep", "keep_every", "every_minutes")),
    *("eval.batch_size", "eval.max_windows"),
    *(f"mesh.{name}" for name in ("data", "context", "tensor", "gather")),
}


@pytest.mark.parametrize("name", ALL_FIELDS)
def test_what_makes_another_run(name):
    """Every field but these; of each another value than the default."""
    default = ALL_FIELDS[name].default
    value = ({"weight": 1.0},) if name == "data.mixture" else "another"
    fields = Spec().flat()
    assert fields[name] == default
    lines = differences(fields, fields | {name: value})
    assert [line.partition(":")[0] for line in lines] == [name] * (name not in MAY_CHANGE)


# What other tests go through, member by member.
TABLES = [
    (TYPES, "proportional partial reversed cutoff hard_clip cope rope_id custom"),
    (SCALINGS, "none linear ntk dynamic yarn llama3 stop remove interpolate"),
    (LOGIT_SCALES, "none yarn drope"),
    (
        FAMILIES,
        "gemma gemma2 gemma3_text gemma4_text gemma4_unified_text "
        "llama mistral qwen2 qwen3 smollm3",
    ),
    (TASKS, "passkey niah lookup chain offset index flipflop duplicate"),
    (EMBEDDED, "python_docs python_source"),
    (REMAT, "none minimal save_qkv full"),
    (PLATFORMS, "v5e v5p v6e gpu cpu"),
    (Request.__members__, "NONE SAVE STOP INTERRUPT"),
]


def test_tables_have_the_members_that_tests_go_through():
    for table, names in TABLES:
        assert sorted(table) == sorted(names.split())


def test_the_switches_of_the_model_are_those_that_tests_set():
    """Beside its sizes and its encoding, and how it is executed."""
    sizes = {"vocab_size", *SIZES}
    execution = {"dtype", "attention", "global_attention", "scan_layers", "remat"}
    others = {*sizes, *execution, *FIELDS}
    assert set(default_config().model) - others == ALL_SWITCHES.keys() - others


@pytest.mark.parametrize("asked", [("files", "texts"), ("python_docs", None), (None, "texts")])
def test_another_text_takes_nothing_along_that_belongs_to_the_first(asked):
    """A store, a template or a share of targets of a run would be read with the other text."""
    source = {"dataset": "files", "data_dir": "first", "store": "first"}
    of_first = [DataSpec(**source, seq_len=99)]
    if asked[0]:
        of_targets = {"template": "Q: {a}", "loss_on": "targets"}
        mixture = (source | of_targets | {"weight": 1.0},)
        of_first = [
            DataSpec(**source, **of_targets, seq_len=99),
            DataSpec(dataset="mixture", mixture=mixture, seq_len=99),
        ]
    for data in of_first:
        found = override_dataset(data, *asked)
        assert found == DataSpec(dataset=asked[0] or "files", data_dir=asked[1] or "", seq_len=99)
