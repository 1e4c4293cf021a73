"""Local paths and URLs alike; the URLs are on a real server of Cloud Storage's protocol."""

import functools
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import urllib.parse

import pytest
from absl import flags
from etils import epath
from ml_collections import config_flags
from support.commands import CONFIG, ROOT, refusal
from support.models import same
from support.runs import make_run
from support.text import data_config, write_text

from prope import command
from prope.config import default_config, resolve
from prope.data.store.build import open_store
from prope.data.tokenizer import load_tokenizer
from prope.errors import UsageError
from prope.runtime import files
from prope.runtime.files import (
    append_jsonl,
    as_path,
    files_below,
    local_cache,
    local_copy,
    new_directory,
    read_json,
    write_atomic,
)
from prope.workdir.reader import CheckpointReader

ODD = "a[b]*c?#%20 {d}'~ü$x;&::e"  # the name of a folder, every character of which is one
ACCEPTED = [
    ("runs/x/", "runs/x"),
    ("~/x", "HOME/x"),
    ("~", "HOME"),
    ("./~x", "CWD/~x"),
    ("./a:/b", "CWD/a:/b"),
    ("file:///tmp/a%20%5Bb", "/tmp/a [b"),
    ("file://localhost/x", "/x"),
    ("file:/x", "/x"),
    (f"/tmp/{ODD}", f"/tmp/{ODD}"),
    ("gs://bucket/a/p=0.25,seed=0/", "gs://bucket/a/p=0.25,seed=0"),
]
REFUSED = [
    "",
    "a\nb",
    "a\0b",
    "\udcff",
    "file:///a%0Ab",
    "file://host/x",
    "file://x",
    "~nobody-has-this-name/x",
    "https://host/x",
    "hf://owner/name",
    "GS://bucket/x",
    "gs:/bucket/x",
    "simplecache::gs://bucket/x",
    "a/gs://b",
    "gs://",
    "gs://bucket/a[b]",
    "gs://bucket/a%20b",
    "gs://bucket/a#1",
    "gs://bucket/../x",
    "s3://bucket/x::gs://b",
    "gs://bucket/{seed}",
    "s3://bucket/x",
    "gs:///x",
]
PLACES = [
    ("prope.train", ("workdir", "init_from")),
    ("prope.evaluate", ("workdir", "data_dir", "output")),
    ("prope.ask", ("workdir", "output")),
    ("prope.sample", ("workdir", "prompts")),
    ("prope.analyze", ("workdir", "data_dir", "text", "output")),
    ("prope.choose", ("workdir", "data_dir", "text", "output")),
    ("prope.report", ("workdir", "sweep", "output")),
    ("prope.export_hf", ("workdir", "output")),
    ("prope.export_gguf", ("workdir", "output")),
    ("prope.import_hf", ("input", "workdir", "tokenizer")),
    ("prope.check_port", ("values",)),
    ("prope.data.train_tokenizer", ("output",)),
    ("launch.sweep", ("workdir", "init_from")),
]
FIELDS = ("data_dir", "cache_dir", "store", "tokenizer")


@pytest.mark.parametrize(("text", "path"), ACCEPTED)
def test_a_place_becomes_a_path(text, path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    path = path.replace("HOME", "/home/me").replace("CWD", os.getcwd())
    found = as_path("--input", text)
    assert str(found) == path
    assert as_path("--input", str(found)) == found, "of a path it makes the same path"


@pytest.mark.parametrize("text", REFUSED, ids=ascii)
def test_a_place_that_a_library_would_misread_is_refused(text):
    with pytest.raises(UsageError, match="^--input=") as caught:
        as_path("--input", text)
    assert str(caught.value).isprintable()


WRITTEN = ("--workdir", "--output", "--sweep", "config.data.cache_dir")


@pytest.mark.parametrize("character", "[]*?")
def test_no_place_to_write_to_is_a_pattern(character, tmp_path, monkeypatch, run_command):
    """Orbax and etils would read it as one; from there data are read."""
    odd = tmp_path / f"a{character}b"
    for field in WRITTEN:
        with pytest.raises(UsageError, match=f"^{field}={re.escape(str(odd))}/run: "):
            as_path(field, f"{odd}/run")
    for field in ("config.data.data_dir", "config.data.store"):
        assert as_path(field, f"{odd}/run") == epath.Path(f"{odd}/run")
    odd.mkdir()
    monkeypatch.chdir(odd)
    with pytest.raises(UsageError, match="^--workdir="):
        as_path("--workdir", "run")
    if character == "[":
        outcome = run_command("prope.train", CONFIG, f"--workdir={odd}/run")
        assert outcome.code == 2 and f"--workdir={odd}/run: " in outcome.error
    assert not list(odd.iterdir())


def test_every_command_that_takes_a_place_is_above():
    modules = {"prope.ask"}  # whose places are those of prope.inference.options
    for top in ("prope", "launch"):
        for file in (ROOT / top).rglob("*.py"):
            if "command.define_place(" in file.read_text():
                modules.add(".".join(file.relative_to(ROOT).with_suffix("").parts))
    assert modules == {"prope.inference.options", *dict(PLACES)}


@pytest.mark.parametrize(("module", "names"), PLACES)
def test_every_flag_of_a_place_is_checked_before_anything_else(module, names, monkeypatch):
    defined = flags.FlagValues()
    define = functools.partial(flags.DEFINE, flag_values=defined)
    monkeypatch.setattr(flags, "DEFINE", define)
    monkeypatch.setattr(flags, "FLAGS", defined)
    for kind in ("string", "integer", "boolean", "enum", "float", "multi_string"):
        monkeypatch.setattr(flags, f"DEFINE_{kind}", lambda *_, **__: None)
    for rule in ("mark_flags_as_required", "register_validator"):
        monkeypatch.setattr(flags, rule, lambda *_: None)
    monkeypatch.setattr(config_flags, "DEFINE_config_file", lambda *_: None)
    runpy.run_path(str(ROOT / f"{module.replace('.', '/')}.py"))["define_flags"]()
    assert sorted(defined) == sorted(names)
    for name in names:
        for text in ("", "hf://a/b"):
            with pytest.raises(UsageError, match=rf"^--{name}={text}: must be"):
                command._parse_flags([module, f"--{name}={text}"], list(names))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("is_mixture", [False, True])
def test_every_config_field_of_a_place_is_checked(field, is_mixture):
    config = default_config()
    config.data.update({"dataset": "files", "data_dir": "text"})
    name = field
    if is_mixture and field in ("data_dir", "store"):
        source = {"weight": 1.0, "dataset": "files", "data_dir": "text"} | {field: "https://x/y"}
        config.data.update({"dataset": "mixture", "mixture": (source,), "data_dir": ""})
        name = f"mixture[0].{field}"
    else:
        config.data[field] = "https://x/y"
    says = refusal(resolve, config)
    assert says.startswith(f"config.data.{name}=https://x/y: must be a local path")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"PROPE_CACHE": "~/x"}, "HOME/x"),
        ({"PROPE_CACHE": "gs://b/x"}, "PROPE_CACHE=gs://b/x: must be a local folder"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/prope"),
        ({"XDG_CACHE_HOME": "https://x"}, "XDG_CACHE_HOME=https://x: must be a local path"),
        ({}, "HOME/.cache/prope"),
    ],
)
def test_the_cache_is_a_local_folder(variables, says, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("PROPE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        found = str(local_cache())
    except UsageError as error:
        found = str(error)
    assert found.startswith(says.replace("HOME/", "/home/me/") if "XDG" not in says else says)


def test_every_place_that_is_read_may_have_any_character(tmp_path, sentencepiece_model):
    odd = tmp_path / ODD
    _, params = make_run(tmp_path / "run")
    odd.mkdir()
    (tmp_path / "run").rename(odd / "run")
    assert same(CheckpointReader(odd / "run/checkpoints/7").read(()), params)
    write_text(odd / "text", ["one text", "two texts", "three", *("more " * n for n in range(9))])
    tokenizer = odd / "tok.model"
    tokenizer.write_bytes(pathlib.Path(sentencepiece_model).read_bytes())
    data = data_config(tmp_path, "files", odd / "text", tokenizer=str(tokenizer))
    store = open_store(data, 300)
    url = f"file://{urllib.parse.quote(str(tokenizer))}"
    data = data_config(tmp_path, "files", store=store.path, tokenizer=url)
    assert open_store(data, 300).fingerprint == store.fingerprint
    assert load_tokenizer(str(tokenizer)).vocab_size == 300


@pytest.fixture(params=["local", "url"])
def place(request, tmp_path):
    return epath.Path(tmp_path if request.param == "local" else request.getfixturevalue("bucket"))


def test_a_file_is_written_replaced_and_read(place):
    write_atomic(place / "a.json", '{"a": 1}')
    write_atomic(place / "a.json", '{"a": 2}')
    assert read_json(place / "a.json", "remedy") == {"a": 2}
    assert [path.name for path in place.iterdir()] == ["a.json"]
    assert read_json(place / "b.json", "remedy") is None


def test_what_is_no_file_is_missing_at_once(place, monkeypatch):
    monkeypatch.setattr(files.time, "sleep", lambda seconds: pytest.fail("waited"))
    write_atomic(place / "a", "{}")
    (place / "folder" / "config.json").mkdir(parents=True, exist_ok=True)
    for path in (
        place / "none.json",
        place / "a" / "config.json",
        place / "folder" / "config.json",
    ):
        assert read_json(path, "remedy") is None


def test_lines_are_appended_after_one_that_was_cut_short(place):
    append_jsonl(place / "lines", {"a": 1})
    append_jsonl(place / "lines", {"a": 2}, {"a": 3})
    (place / "lines").write_text((place / "lines").read_text() + '{"a"')
    append_jsonl(place / "lines", {"a": 4})
    assert (place / "lines").read_text() == '{"a": 1}\n{"a": 2}\n{"a": 3}\n{"a"\n{"a": 4}\n'


def test_a_new_directory_is_there_whole_or_not_at_all(place):
    with pytest.raises(KeyError), new_directory("output", place / "new") as folder:
        (folder / "one").write_text("1")
        raise KeyError
    assert not (place / "new").exists()
    with new_directory("output", place / "new") as folder:
        (folder / "below").mkdir()
        (folder / "below" / "two").write_text("2")
        assert not (place / "new").exists()
    assert (place / "new" / "below" / "two").read_text() == "2"


def test_a_local_copy_has_the_same_files(place):
    (place / "folder" / "below").mkdir(parents=True, exist_ok=True)
    (place / "folder" / "one").write_text("1")
    (place / "folder" / "below" / "two").write_text("2")
    with local_copy(place / "folder") as folder:
        assert (folder / "one").read_text() == "1"
        assert (folder / "below" / "two").read_text() == "2"
        assert folder.name == "folder"
        assert pathlib.Path(folder / "one").is_file()  # local
    assert files_below(place / "folder") == {"below/two": 1, "one": 1}
    with local_copy(place / "folder" / "one") as file:
        assert (file.name, pathlib.Path(file).read_text()) == ("one", "1")


def test_two_processes_append_to_one_object(bucket, tmp_path):
    (tmp_path / "appends.py").write_text(
        "import sys\nfrom etils import epath\nfrom prope.runtime.files import append_jsonl\n"
        "for number in range(10):\n    append_jsonl(epath.Path(sys.argv[1]), {'number': number})\n"
    )
    command = [sys.executable, str(tmp_path / "appends.py"), f"{bucket}/lines"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    for process in [subprocess.Popen(command, env=environment) for _ in range(2)]:
        assert process.wait(120) == 0
    numbers = [
        json.loads(line)["number"]
        for line in epath.Path(f"{bucket}/lines").read_text().splitlines()
    ]
    assert sorted(numbers) == sorted(2 * [*range(10)])
