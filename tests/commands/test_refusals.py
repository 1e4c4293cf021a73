"""What cannot be used ends a command with one line that names it, before anything is begun."""

import errno
import importlib.util
import json
import math
import os
import pwd
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
import tensorstore as ts
from absl import flags
from etils import epath
from ml_collections import config_flags
from support.commands import CONFIG, ROOT, refusal
from support.launchers import launch, refused
from support.runs import make_run

from prope import command
from prope.config import default_config, flat, from_dict, resolve, set_layer_percentages
from prope.errors import to_user_error
from prope.runtime.files import append_jsonl, as_path, local_cache, read_bytes, read_json, read_text
from prope.sharding import check_devices
from prope.spec.run import Spec
from prope.step import resolve_attention
from prope.workdir.records import read_jsonl
from prope.workdir.run import open_run, read_config, write_config
from prope.workdir.source import recorded_init_from

# --- Flags of commands, arguments of scripts --------------------------------------------------

QUICKSTART = f"--config={ROOT}/configs/quickstart.py"
COMMANDS = [
    ("train", ["--num_steps=5"], "--config.num_steps"),
    ("train", ["--model.head_dim=8"], "--config.model.head_dim"),
    ("train", ["--wrokdir=W"], "--workdir"),
    ("train", ["--config.seed=1", QUICKSTART], "--config.seed"),
    ("train", ["--config", "none.py", "--workdir=W"], "none.py"),
    ("evaluate", ["--workdir=W", "--config.seed=1"], "--config.seed"),
    ("evaluate", ["--workdir="], "--workdir=: must be"),
    ("evaluate", ["--workdir=hf://a/b"], "--workdir=hf://a/b: must be"),
    ("sample", ["--workdir=W", "--top_k=few"], "--top_k=few"),
    ("bench", ["--rope", "--rope_percentage=nan"], "--rope_percentage=nan"),
]


@pytest.mark.parametrize(("module", "arguments", "named"), COMMANDS)
def test_a_flag_that_cannot_be_used_is_named(start_command, module, arguments, named):
    code, stdout, stderr = start_command(f"prope.{module}", *arguments).wait()
    assert (code, stdout) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", stderr) and named in stderr


@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        ("quickstart.sh", ["runs/a", "runs/b"], "runs/b"),
        ("setup.sh", ["gpus"], "gpus"),
        ("run.sh", [], "platform"),
        ("run.sh", ["tpu9", "true"], "tpu9"),
        ("local_pod.sh", ["--processes", "3", "--", "true"], "--processes"),
        ("local_pod.sh", ["--dry-run=yes", "--", "true"], "--dry-run=yes"),
        ("local_pod.sh", ["--processes=two", "--", "true"], "--processes=two"),
        ("local_pod.sh", ["--"], "command"),
        ("tpu_vm.sh", [], "action"),
        ("tpu_vm.sh", ["install"], "--name="),
        ("tpu_vm.sh", ["stop", "--name=a", "--", "y"], "y"),
        ("slurm.sbatch", ["--max_restarts=no", "--", "x"], "--max_restarts=no"),
    ],
)
def test_an_argument_of_a_script_that_cannot_be_used_is_named(script, arguments, named):
    assert named in refused(launch(script, *arguments))


LOADS = pytest.mark.filterwarnings("ignore:the load_module")  # by which ml_collections loads a file


def parse(monkeypatch, *arguments):
    """The config that the command line of a command gives."""
    defined = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", defined)
    monkeypatch.setattr(sys, "argv", ["train", *arguments])  # which ml_collections reads, too
    config_flags.DEFINE_config_file("config", flag_values=defined)
    command._parse_flags(sys.argv, ["config"])
    return defined.config


@LOADS
def test_a_field_may_be_set_back_to_none(monkeypatch):
    optional = ["eval.max_windows", "mesh.data", "model.sliding_window", "model.rope_cutoff"]
    unset = [f"--config.{name}=None" for name in optional]
    values = flat(parse(monkeypatch, CONFIG, "--config.eval.max_windows=3", *unset))
    assert [values[name] for name in optional] == [None] * 4
    assert flat(parse(monkeypatch, CONFIG, "--config.eval.max_windows=3"))["eval.max_windows"] == 3
    wrong = "--config.eval.max_windows=none"
    assert wrong in refusal(lambda: parse(monkeypatch, CONFIG, wrong))


@LOADS
@pytest.mark.parametrize("form", [["--config={}"], ["-config={}"], ["--config", "{}"]])
def test_a_run_s_config_is_a_config_file(monkeypatch, tmp_path, form):
    spec = Spec().replace({"model.num_layers": 7, "eval.max_windows": 5})
    write_config(epath.Path(tmp_path), spec)
    file = tmp_path / "config.json"
    arguments = [part.format(file) for part in form]
    read = parse(monkeypatch, *arguments, "--config.seed=3")
    assert resolve(read) == spec.replace({"seed": 3})
    file.write_text("[" * 100_000)
    assert str(file) in refusal(lambda: parse(monkeypatch, *arguments))
    file.unlink()
    assert str(file) in refusal(lambda: parse(monkeypatch, *arguments))


PATTERN = ("sliding_attention", "full_attention")


@LOADS
@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        ("model.layer_types", "sliding_attention,full_attention", PATTERN),
        ("model.layer_types", "('sliding_attention', 'full_attention')", PATTERN),
        ("model.layer_types", "[sliding_attention,full_attention]", PATTERN),
        ("model.layer_types", "", ()),
        ("model.scaled_pairs", "0,3", (0, 3)),
        ("model.scaled_pairs", "0-3@full,4-5", ("0-3@full", "4-5")),
        ("data.stop_ids", "106,107", (106, 107)),
        ("profile", "10,12", (10, 12)),
        ("log_to", "csv,my_module:on_log", ("csv", "my_module:on_log")),
        ("data.mixture", "({'weight': 1, 'dataset': 'a'},)", ({"weight": 1, "dataset": "a"},)),
    ],
)
def test_a_tuple_may_be_written_as_words(monkeypatch, field, text, expected):
    assert flat(parse(monkeypatch, CONFIG, f"--config.{field}={text}"))[field] == expected


@LOADS
@pytest.mark.parametrize(
    ("field", "text", "named"),
    [
        ("model.layer_types", "a,b", "sliding_attention,full_attention"),
        ("model.layer_types", "full_atention", "did you mean full_attention"),
        ("model.layer_types", "0,1", "there is no 0"),
        ("data.stop_ids", "a,b", "(106,)"),
        ("profile", "a,b", "first and last"),
        ("data.mixture", "3", "must be a dict"),
    ],
)
def test_a_tuple_that_cannot_be_used_names_a_form_that_works(monkeypatch, field, text, named):
    config = parse(monkeypatch, CONFIG, f"--config.{field}={text}")
    if field == "data.mixture":
        config.data.dataset = "mixture"
    line = refusal(resolve, config)
    assert line.startswith(f"config.{field}") and named in line


# JAX that says that it was imported.
NO_JAX = "raise SystemExit('JAX was imported')\n"
EARLY = [
    ("train", [CONFIG, "--workdir=W", "--config.batch_size=0"], "config.batch_size=0"),
    ("train", [CONFIG, "--workdir=W", "--config.data.data_dir=text"], "config.data.data_dir=text"),
    ("train", [CONFIG, "--workdir=W", "--config.data.loss_on=targets"], "config.data.loss_on"),
    ("plan", [CONFIG, "--topology=v5e:2x2", "--config.mesh.tensor=3"], "mesh.tensor=3"),
    ("data.inspect", [CONFIG, "--config.model.head_dim=3"], "config.model.head_dim=3"),
    ("evaluate", ["--workdir=W"], "JAX_PLATFORMS=gpus"),
]


@pytest.mark.parametrize(("module", "arguments", "named"), EARLY)
def test_what_needs_no_jax_is_checked_before_jax_is_imported(tmp_path, module, arguments, named):
    (tmp_path / "jax.py").write_text(NO_JAX)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    if "JAX_PLATFORMS" in named:
        env["JAX_PLATFORMS"] = named.partition("=")[2]
        if importlib.util.find_spec("jax_plugins"):
            pytest.skip("JAX has plugins here, and knows which platforms they bring")
    done = subprocess.run(
        [sys.executable, "-m", f"prope.{module}", *arguments],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr) and named in done.stderr
    assert not (tmp_path / "W").exists()


# --- Fields of a config -----------------------------------------------------------------------

# Every field is to be named with its value.
FIELDS = [
    {"model.rope_percentage": 1.5},
    {"model.rope_percentage": math.nan},
    {"model.head_dim": 63},
    {"model.num_heads": 4, "model.num_kv_heads": 3},
    {"model.max_wavelength": 1.0},
    {"model.remat": "some"},
    {"mesh.tensor": 0},
    {"mesh.data": 0},
    {"mesh.context": 2, "data.seq_len": 768},
    {"mesh.context": 3, "data.seq_len": 1024},
    {"model.num_heads": 6, "mesh.tensor": 4},
    {"model.hidden_dim": 1023, "mesh.tensor": 2},
    {"model.num_kv_heads": 2, "mesh.tensor": 4},
    {"batch_size": 16, "accumulation": 3},
    {"num_steps": 0},
    {"seed": 2**32},
    {"seed": -1},
    {"num_steps": 20, "profile": (0, 2)},
    {"num_steps": 20, "profile": (5, 4)},
    {"num_steps": 20, "profile": (1, 21)},
    {"optimizer.warmup_steps": -1},
    {"optimizer.learning_rate": 0.001, "optimizer.final_learning_rate": 1.0},
    {"optimizer.learning_rate": math.inf},
    {"data.validation_fraction": 0.0},
    {"data.data_dir": "/data"},
    {"data.tokenizer": ""},
    {"model.rope_type": "cape"},
    {"data.dataset": "wikipedia/20230601.en"},
    {"eval.max_windows": 0},
]


def config_of(fields: dict):
    config = default_config()
    config.update_from_flattened_dict(fields)
    return config


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_value_out_of_range_is_named(fields):
    line = refusal(resolve, config_of(fields))
    assert line.startswith("config.")
    for name, value in fields.items():
        assert f"{name}={value}" in line


@pytest.mark.parametrize("p", [(1.0, 0.5), (1.0, 0.5, math.nan, 0.0)])
def test_a_percentage_of_a_layer_that_cannot_be_used_is_named(p):
    config = default_config()
    set_layer_percentages(config, p)
    assert f"model.rope_percentage={p}" in refusal(resolve, config)


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer.b1": 0.0, "optimizer.b2": 0.0, "optimizer.weight_decay": 0.0},
        {"optimizer.warmup_steps": 0, "optimizer.final_learning_rate": 0.0, "seed": 0},
        {"watchdog_minutes": 0.0, "checkpoint.every_minutes": 0.0, "num_steps": 1, "log_every": 1},
        {"eval.max_windows": 1, "data.position_range": 2**31},
        {"model.num_kv_heads": 1, "mesh.tensor": 4},
        {"model.num_kv_heads": 4, "mesh.tensor": 4},
        {"model.rope_percentage": 0, "seed": 2**32 - 1},
    ],
    ids=str,
)
def test_the_ends_of_ranges_are_values(fields):
    spec = resolve(config_of(fields))
    assert resolve(from_dict(spec.to_dict())) == spec
    assert {name: spec.flat()[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("devices", "slices", "fields", "named"),
    [
        (8, 1, {}, None),
        (32, 1, {}, "batch_size=16"),
        (8, 1, {"accumulation": 4}, "batch_size=16"),
        (8, 1, {"mesh.data": 3}, "mesh.data=3"),
        (6, 1, {"mesh.tensor": 4}, "mesh.tensor=4"),
        (8, 1, {"mesh.data": 8, "mesh.tensor": 2}, "mesh.data=8"),
        (8, 1, {"mesh.context": 8, "mesh.tensor": 2}, "mesh.context=8"),
        (8, 1, {"mesh.context": 4, "batch_size": 3}, "batch_size=3"),
        (8, 2, {"mesh.data": 1}, "mesh.data=1"),
    ],
)
def test_devices_must_divide_the_batch(devices, slices, fields, named):
    of_slices = [SimpleNamespace(platform="tpu", slice_index=n % slices) for n in range(devices)]
    spec = Spec().replace({"data.seq_len": 256 * 8 * 3} | fields)
    if named is None:
        return check_devices(spec, of_slices)
    assert refusal(check_devices, spec, of_slices).startswith(f"config.{named}: ")
    return None


def test_attention_that_a_device_cannot_run_is_refused():
    splash = Spec().replace({"model.attention": "splash", "data.seq_len": 200})
    tpu = SimpleNamespace(platform="tpu")
    for device in (tpu, jax.devices()[0]):
        assert "model.attention=splash" in refusal(lambda d=device: resolve_attention(splash, d))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model": {"rope_percentag": 1.0}}, "model.rope_percentage"),
        ([1], "saved config"),
        ({"model.num_layers": 4}, "model.num_layers"),
        ({"seed": "a"}, "seed"),
    ],
)
def test_a_saved_config_from_elsewhere_is_refused(values, named):
    assert named in refusal(lambda: from_dict(values))


# --- What the world does ----------------------------------------------------------------------


def raises(kind, *arguments):
    def call():
        raise kind(*arguments)

    return call


def of_tensorstore():
    ts.open({"driver": "zarr", "kvstore": "file:///no/such/place/"}).result()


def of_fsspec():
    from fsspec.exceptions import BlocksizeMismatchError

    raise BlocksizeMismatchError("cut")


def of_http():
    from gcsfs.retry import HttpError

    raise HttpError({"code": 418, "message": "teapot"})


ONE_LINE = [
    (lambda: os.open("/etc/no/such", 0), "/etc/no/such"),
    (lambda: os.open("/", os.O_WRONLY), "/: "),
    (lambda: os.open("/" + "a" * 300, 0), "File name too long"),
    (raises(PermissionError, errno.EACCES, "Permission denied", "W"), "--output"),
    (raises(OSError, errno.ENOSPC, "No space left on device", "W"), "space"),
    (raises(OSError, errno.EFBIG, "File too large", "W"), "ulimit -f"),
    (
        raises(ValueError, "OUT_OF_RANGE: Error writing: File too large [os_error_code='27']"),
        "ulimit",
    ),
    (lambda: json.loads("{"), "JSONDecodeError"),
    (raises(OSError, errno.EDQUOT, "Disk quota exceeded", "W"), "quota is used up"),
    (raises(EOFError, "ended early"), "ended early"),
    (raises(BrokenPipeError, errno.EPIPE, "Broken pipe"), "what reads the output has ended"),
    (raises(ModuleNotFoundError, "No module named 's3fs'"), "s3fs"),
    (of_tensorstore, "NOT_FOUND"),
    (of_fsspec, "cut"),
    (of_http, "teapot"),
]


@pytest.mark.parametrize(("call", "named"), ONE_LINE)
def test_what_the_world_does_ends_with_one_line(call, named):
    with pytest.raises(Exception) as caught:
        call()
    known = to_user_error(caught.value)
    assert named in str(known) and "\n" not in str(known) and known.code != 0


@pytest.mark.parametrize("kind", [KeyError, ValueError, RecursionError])
def test_a_mistake_of_the_program_keeps_its_traceback(kind):
    assert to_user_error(kind("INTERNAL error of ours")) is None


# --- Files that are not what they seem --------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000


def test_json_that_is_nested_too_deep_is_refused(tmp_path):
    path = epath.Path(tmp_path) / "config.json"
    path.write_text(DEEP)
    assert str(path) in refusal(lambda: read_config(path.parent))
    assert read_json(path) is None, "a cache may be damaged"
    assert read_jsonl(path) == []


def test_a_config_that_is_nested_is_refused(tmp_path):
    values = deep = {}
    for _ in range(400):
        deep["a"] = {}
        deep = deep["a"]
    path = epath.Path(tmp_path) / "config.json"
    path.write_text(json.dumps({"format": 3, "model": values}))
    assert ": model.a (" in refusal(lambda: read_config(path.parent))


@pytest.mark.parametrize("line", ["[1]", "null", DEEP])
def test_a_line_that_is_no_record_is_skipped(tmp_path, line):
    path = epath.Path(tmp_path) / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_pipe_is_not_waited_for(start_command, tmp_path):
    pipe = epath.Path(tmp_path) / "pipe"
    os.mkfifo(pipe)
    for read in (read_bytes, read_json, read_jsonl):
        assert str(pipe) in refusal(lambda read=read: read(pipe))
    assert str(pipe) in refusal(lambda: read_text("prompts", str(pipe), "give a file"))
    for config in (pipe, "/dev/zero"):
        code, _, stderr = start_command("prope.train", "--config", str(config)).wait()
        assert code == 2 and str(config) in stderr
    make_run(tmp_path / "run")
    hashes = tmp_path / "run/checkpoints/7/hashes.json"
    hashes.unlink()
    os.mkfifo(hashes)
    assert "hashes.json" in refusal(lambda: open_run(tmp_path / "run"))
    os.mkfifo(tmp_path / "init_from")
    assert "init_from" in refusal(lambda: recorded_init_from(epath.Path(tmp_path), None))


# What lies in the place of a file, and how a refusal names it.
NO_FILES = {
    "pipe": (os.mkfifo, "not a file"),
    "link": (lambda path: os.symlink("target", path), "a link"),
    "dangling link": (lambda path: os.symlink("none", path), "a link"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_records_are_written_to_a_file_only(tmp_path, kind):
    make, named = NO_FILES[kind]
    path = epath.Path(tmp_path) / "metrics.jsonl"
    (tmp_path / "target").write_text("of another\n")
    make(path)
    line = refusal(lambda: append_jsonl(path, {"step": 1}))
    assert line.startswith(f"{path}: is {named}, and is not written")
    assert (tmp_path / "target").read_text() == "of another\n"
    assert not (tmp_path / "none").exists()


# --- Unusual surroundings ---------------------------------------------------------------------


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "PROPE_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert "XDG_CACHE_HOME" in refusal(local_cache)
    assert "--workdir" in refusal(lambda: as_path("--workdir", "~/run"))


def test_a_program_without_docstrings_answers_help():
    command_line = [sys.executable, "-OO", "-m", "prope.train", "--help"]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "--workdir" in done.stdout, done.stderr
