"""The token store of a run of several processes: the first prepares it, the others open it."""

import signal
import time

import pytest
from support.commands import CONFIG, finish, losses
from support.processes import pod_environments, start_two_patched
from support.text import articles, write_text

from prope.workdir.run import read_config

pytestmark = pytest.mark.slow


def slow(seconds: float, ending: str = "pass") -> str:
    """A patch that has the first process prepare for so long, and the other log every second."""
    return f"""
import time
from prope.data import windows
from prope.runtime import processes
processes._LOG_SECONDS = 1
real = windows.open_store
def open_store(*arguments):
    time.sleep({seconds})
    {ending}
    print('OPENS', file=sys.stderr)
    return real(*arguments)
windows.open_store = open_store
"""


def test_only_the_first_process_reads_the_text(start_command, tmp_path):
    write_text(tmp_path / "text", articles())
    started = []
    for folder, pod in zip(("text", "not on this host"), pod_environments(), strict=True):
        arguments = (
            CONFIG,
            f"--workdir={tmp_path}/run",
            "--config.data.dataset=files",
            f"--config.data.data_dir={tmp_path}/{folder}",
            f"--config.data.cache_dir={tmp_path}/stores",
            "--config.data.seq_len=64",
            "--config.eval.max_windows=2",
            "--config.log_every=1",
            "--stop_at_step=2",
        )
        started.append(start_command("prope.train", *arguments, **pod))
    first, second = map(finish, started)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert "packing" in first.stderr
    assert "no such folder" not in second.stderr
    assert read_config(tmp_path / "run").data.data_dir == f"{tmp_path}/text"
    assert first.result["step"] == 2
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.parametrize("text", ["same", "other"])
def test_hosts_that_share_no_cache_make_a_store_each(tmp_path, cache_dir, text):
    patch = f"""
import dataclasses
from prope.data import windows
real = windows.open_store
def open_store(*arguments):
    store = real(*arguments)
    return store if {text == "same"} else dataclasses.replace(store, fingerprint='0')
if process == '1':
    windows.find_store = lambda *arguments: None
    windows.open_store = open_store
"""
    started = start_two_patched(patch, tmp_path, cache_dir)
    first, second = (process.communicate(timeout=300)[1] for process in started)
    assert "config.data.cache_dir may be a place that hosts share" in second
    code = 0 if text == "same" else 2
    assert [process.returncode for process in started] == [code, code], first + second
    if text == "other":
        for said in (first, second):
            line = said.splitlines()[-1].replace("process 1: ", "")
            assert line.startswith("error: python_docs: is other text here ("), said
            assert ") than in process 0 (" in line
            assert line.endswith("share it")


@pytest.mark.parametrize(
    "cause, code, line",
    [
        ("error", 2, "error: no such text"),
        ("kill", 76, "another process of this run is gone"),
        ("SIGTERM", 75, "SIGTERM before the first step"),
    ],
)
def test_what_ends_the_first_process_ends_the_others(tmp_path, cache_dir, cause, code, line):
    patch = slow(5, "raise UsageError('no such text')") if cause == "error" else slow(60)
    first, second = start_two_patched(patch, tmp_path, cache_dir)
    for waiting in second.stderr:
        if "waiting for process 0" in waiting:
            break
    if cause == "kill":
        first.kill()
    if cause == "SIGTERM":
        second.send_signal(signal.SIGTERM)
    start = time.monotonic()
    _, said = second.communicate(timeout=300)
    assert time.monotonic() - start < 40
    assert second.returncode == code
    assert line in said
    if cause == "error":
        assert first.wait(60) == 2
    first.kill()
    first.communicate()
