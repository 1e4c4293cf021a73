"""What start-up, writing and parsing raise ends a command with one line."""

import errno
import json
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import zipfile
import zlib

import pytest
import tensorstore as ts
from absl import flags
from etils import epath
from ml_collections import config_flags
from support.commands import CONFIG, ROOT
from support.heads import analysis_options
from support.runs import evaluate_run, make_run
from support.text import write_lines

from prope import command
from prope.analysis import analysis
from prope.config import default_config, flat
from prope.data.tokenizer import load_tokenizer
from prope.errors import UsageError, to_user_error
from prope.inference.asking import AskOptions, answers
from prope.runtime.files import append_jsonl, as_path, local_cache, read_bytes, read_json, read_text
from prope.runtime.interrupts import Interrupts, Request
from prope.runtime.startup import Startup
from prope.sweep.run_page import report_run
from prope.workdir.lease import Lease
from prope.workdir.records import read_jsonl
from prope.workdir.run import open_run, read_config, write_config
from prope.workdir.source import recorded_init_from


def of_tensorstore():
    ts.open({"driver": "zarr", "kvstore": "file:///no/such/place/"}).result()


def of_fsspec():
    from fsspec.exceptions import BlocksizeMismatchError

    raise BlocksizeMismatchError("cut")


def of_http():
    from gcsfs.retry import HttpError

    raise HttpError({"code": 418, "message": "teapot"})


def raises(kind, *arguments):
    def call():
        raise kind(*arguments)

    return call


ONE_LINE = [
    (lambda: os.open("/etc/no/such", 0), "/etc/no/such: FileNotFoundError: No such file"),
    (lambda: os.open("/", os.O_WRONLY), "/: IsADirectoryError: Is a directory"),
    (lambda: os.open("/etc/passwd/x", 0), "/etc/passwd/x: NotADirectoryError: "),
    (lambda: os.open("/" + "a" * 300, 0), "OSError: File name too long"),
    (raises(PermissionError, errno.EACCES, "Permission denied", "W"), "--output=DIR"),
    (raises(OSError, errno.EROFS, "Read-only file system", "W"), "--output=DIR"),
    (raises(OSError, errno.ENOSPC, "No space left on device", "W"), "free some space"),
    (raises(OSError, errno.EIO, "Input/output error", "W"), "W: OSError: Input/output error"),
    (raises(TimeoutError, "slow"), "TimeoutError: slow"),
    (lambda: json.loads("{"), "JSONDecodeError: Expecting property name"),
    (lambda: b"\xff".decode(), "UnicodeDecodeError: "),
    (lambda: zipfile.ZipFile(__file__), "BadZipFile: File is not a zip file"),
    (lambda: zlib.decompress(b"no"), "error: Error -3"),
    (raises(EOFError, "ended early"), "EOFError: ended early"),
    (raises(ModuleNotFoundError, "No module named 's3fs'"), "package s3fs is not installed"),
    (of_tensorstore, "ValueError: NOT_FOUND: "),
    (of_fsspec, "cut"),
    (of_http, "teapot"),
]
TRACEBACKS = [KeyError, IndexError, TypeError, ValueError, AttributeError, AssertionError]


@pytest.mark.parametrize(("call", "says"), ONE_LINE)
def test_what_the_world_does_ends_with_one_line(call, says):
    with pytest.raises(Exception) as caught:
        call()
    text, code = command._describe_error(caught.value)
    assert says in text and "\n" not in text and code != 0
    assert text.startswith(("stopped: ", "error: "))


@pytest.mark.parametrize("kind", [*TRACEBACKS, RecursionError, NotImplementedError])
def test_a_mistake_of_the_program_keeps_its_traceback(kind):
    with pytest.raises(kind) as caught:
        raise kind("INTERNAL error of ours")
    assert to_user_error(caught.value) is None
    assert "Traceback" in command._describe_error(caught.value)[0]


# --- Files that are not what they seem ---------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def pipe(tmp_path):
    path = epath.Path(tmp_path) / "pipe"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("content", [DEEP, '{"a":' * 100_000, "[" * 100_000])
def test_json_that_is_nested_too_deep_is_refused(tmp_path, content, caplog):
    path = epath.Path(tmp_path) / "config.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"config\.json: not readable as JSON"):
        read_config(path.parent)
    assert read_json(path) is None, "a cache may be damaged"
    assert read_jsonl(path) == []
    assert "is not JSON and is skipped" in caplog.text


@pytest.mark.parametrize("error", [OSError("Forbidden: b/o"), ValueError("Bad Request: b/o")])
def test_a_text_that_the_storage_refuses_is_one_line(tmp_path, monkeypatch, error):
    """gcsfs's errors have no number."""
    monkeypatch.setattr(type(epath.Path()), "read_bytes", lambda _: (_ for _ in ()).throw(error))
    says = f"--text={tmp_path}/a: cannot be read: {error}; give a file"
    with pytest.raises(UsageError, match=f"^{re.escape(says)}$"):
        read_text("text", f"{tmp_path}/a", "give a file")


def test_a_config_that_is_nested_is_refused(tmp_path):
    values = deep = {}
    for _ in range(400):
        deep["a"] = {}
        deep = deep["a"]
    path = epath.Path(tmp_path) / "config.json"
    path.write_text(json.dumps({"format": 3, "model": values}))
    with pytest.raises(UsageError, match="saved config"):
        read_config(path.parent)


@pytest.mark.parametrize("line", ["[1]", "7", "null", '"x"', DEEP])
def test_a_line_that_is_no_record_is_skipped(tmp_path, line):
    path = epath.Path(tmp_path) / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_pipe_is_not_waited_for(pipe, tmp_path):
    reads = [
        lambda: read_bytes(pipe),
        lambda: read_json(pipe),
        lambda: read_jsonl(pipe),
        lambda: read_text("prompts", str(pipe), "give a file"),
        lambda: command._open_configs(["train", f"--config={pipe}"]),
        lambda: command._open_configs(["train", "--config", "/dev/zero"]),
    ]
    for read in reads:
        with pytest.raises(UsageError, match="is a pipe or a device|is not a file"):
            read()
    make_run(tmp_path / "run")
    hashes = tmp_path / "run/checkpoints/7/hashes.json"
    hashes.unlink()
    os.mkfifo(hashes)
    with pytest.raises(UsageError, match="is a pipe or a device"):
        open_run(tmp_path / "run")


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "longcontext.jsonl"])
def test_records_are_not_written_through_a_link(tmp_path, name):
    target = tmp_path / "target"
    target.write_text("of another\n")
    for path in (tmp_path / name, tmp_path / f"dangling-{name}"):
        path.symlink_to(target if path.name == name else tmp_path / "none")
        with pytest.raises(UsageError, match=rf"{path.name}: is a link, and is not written"):
            append_jsonl(epath.Path(path), {"step": 1})
    assert target.read_text() == "of another\n"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link"])
def test_what_a_run_writes_is_a_file(tmp_path, kind):
    def put(path):
        make = {
            "pipe": lambda: os.mkfifo(path),
            "device": lambda: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5)),
            "folder": path.mkdir,
            "link": lambda: path.symlink_to("none"),
        }
        try:
            make[kind]()
        except PermissionError:
            pytest.skip("only root makes devices")

    put(tmp_path / "metrics.jsonl")
    put(tmp_path / "lease.json")
    refused = f"is {'a link' if kind == 'link' else 'not a file'}, and is not written; put a file"
    with pytest.raises(UsageError, match=f"metrics.jsonl: {refused}"):
        append_jsonl(epath.Path(tmp_path / "metrics.jsonl"), {"step": 1})
    with pytest.raises(UsageError, match=f"lease.json: {refused}"):
        Lease(epath.Path(tmp_path)).acquire(lambda: None)


def test_a_pipe_that_tells_what_a_run_was_begun_from_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "init_from")
    with pytest.raises(UsageError, match="is a pipe or a device"):
        recorded_init_from(epath.Path(tmp_path), None)


# --- Flags of a config -------------------------------------------------------------------------


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
    with pytest.raises(UsageError, match="invalid literal for int"):
        parse(monkeypatch, CONFIG, "--config.eval.max_windows=none")


@LOADS
@pytest.mark.parametrize("form", [["--config={}"], ["-config={}"], ["--config", "{}"]])
def test_a_run_s_config_is_a_config_file(monkeypatch, tmp_path, form):
    config = default_config()
    config.update_from_flattened_dict({"model.num_layers": 7, "eval.max_windows": 5})
    write_config(epath.Path(tmp_path), config)
    arguments = [part.format(tmp_path / "config.json") for part in form]
    read = parse(monkeypatch, *arguments, "--config.seed=3")
    config.seed = 3
    assert read == config
    (tmp_path / "config.json").write_text(DEEP)
    with pytest.raises(UsageError, match="not readable as JSON"):
        parse(monkeypatch, *arguments)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UsageError, match="there is no such file"):
        parse(monkeypatch, *arguments)


# --- Runs of somebody else -----------------------------------------------------------------------


@pytest.fixture
def read_only(base, tmp_path, monkeypatch):
    """A folder of a run that this user may not write, and whether anything was written there."""
    top = tmp_path / "theirs"
    shutil.copytree(base / "runs", top)
    before = sorted((path, path.read_bytes()) for path in top.rglob("*") if path.is_file())
    access = os.access

    def refuse(path, mode, **options):
        return not str(path).startswith(str(top)) and access(path, mode, **options)

    monkeypatch.setattr(os, "access", refuse)  # the tests may run as a user who may do anything
    yield top
    assert sorted((path, path.read_bytes()) for path in top.rglob("*") if path.is_file()) == before


def evaluated(workdir, output=None):
    return evaluate_run(workdir, seq_len="64", max_windows=2, output=output)


def asked(workdir, output=None):
    options = AskOptions(str(workdir), tasks="passkey", trials=1, seq_len="128", output=output)
    return list(answers(options))


def analysed(workdir, output=None):
    options = analysis_options(sequences=1, seq_len=16, channels=0, output=output)
    return [analysis.analyse_all(epath.Path(workdir), options)]


WRITERS = [
    (evaluated, ["eval.jsonl", "eval/9"]),
    (asked, ["longcontext.jsonl"]),
    (analysed, ["analysis/index.html", "analysis/analysis.json"]),
]


@pytest.mark.parametrize(("command_of", "files"), WRITERS)
def test_results_about_runs_of_somebody_else_lie_elsewhere(read_only, tmp_path, command_of, files):
    for workdir in (read_only, read_only / "rope"):
        with pytest.raises(UsageError, match=r"^--workdir=.*cannot be written; give --output"):
            command_of(workdir)
    output = tmp_path / "all of ours"
    assert command_of(read_only, str(output))
    assert all((output / run / name).exists() for name in files for run in ("nope", "rope"))


@pytest.mark.parametrize(
    ("command_of", "files"),
    [WRITERS[0], *(pytest.param(*writer, marks=pytest.mark.slow) for writer in WRITERS[1:])],
)
def test_results_about_a_run_of_somebody_else_lie_elsewhere(read_only, tmp_path, command_of, files):
    output = tmp_path / "ours"
    assert command_of(read_only / "rope", str(output))
    assert all((output / name).exists() for name in files)


def test_a_picture_of_a_run_of_somebody_else_lies_elsewhere(base, tmp_path, monkeypatch):
    theirs = epath.Path(shutil.copytree(base / "runs/rope", tmp_path / "theirs"))
    write_lines(theirs / "metrics.jsonl", [{"step": 7, "loss": 2.0}])
    monkeypatch.setattr(os, "access", lambda path, mode: "theirs" not in str(path))
    with pytest.raises(UsageError, match=r"^--workdir=.*cannot be written; give --output"):
        report_run(theirs)
    assert report_run(theirs, f"{tmp_path}/ours")["output"] == f"{tmp_path}/ours/report/index.html"
    assert (tmp_path / "ours/report/loss.png").stat().st_size > 1000


# --- Unusual surroundings ------------------------------------------------------------------------


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "PROPE_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(UsageError, match="set HOME or XDG_CACHE_HOME"):
        local_cache()
    with pytest.raises(UsageError, match="the home folder is not known"):
        as_path("--workdir", "~/run")
    Startup().use_cache()  # without a place programs are not kept


def test_interrupts_may_be_opened_in_a_thread():
    """Python lets the main thread alone handle signals."""
    polled = []
    before = signal.getsignal(signal.SIGTERM)

    def poll():
        with Interrupts() as interrupts:
            polled.append(interrupts.poll())
            interrupts.ask_to_stop()
            polled.append(interrupts.poll())

    thread = threading.Thread(target=poll)
    thread.start()
    thread.join()
    assert polled == [Request.NONE, Request.STOP]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("old", ["gone", "another"])
def test_a_run_that_was_moved_has_its_tokenizer_with_it(tmp_path, sentencepiece_model, old):
    first = tmp_path / "first"
    make_run(first, tokenizer=first / "tokenizer.model", vocab_size=300)
    shutil.copy(sentencepiece_model, first / "tokenizer.model")
    moved = shutil.copytree(first, tmp_path / "moved")
    if old == "gone":
        shutil.rmtree(first)
    else:
        (first / "tokenizer.model").write_text("another")
    run = open_run(moved)
    assert run.config.data.tokenizer == str(moved / "tokenizer.model")
    assert load_tokenizer(run.config.data.tokenizer).vocab_size == 300


def test_a_program_without_docstrings_answers_help():
    command_line = [sys.executable, "-OO", "-m", "prope.train", "--help"]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "--workdir" in done.stdout, done.stderr
