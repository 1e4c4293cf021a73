"""The token store of a run of several processes: the first one prepares it, the others wait and open it."""

import re
import signal
import time

import pytest
from conftest import CONFIG, finish, losses
from makers import articles, pod_environments, start_two_patched, write_text

from prope.workdir.run import read_config

pytestmark = pytest.mark.slow


def slow(seconds: float) -> str:
    """A patch that has the first process prepare for so long, and the other one log every second."""
    return (
        "import time; from prope.data import windows; from prope.runtime import processes\n"
        "processes._LOG_SECONDS = 1; real = windows.open_store\n"
        "def open_store(*arguments):\n"
        f"    time.sleep({seconds}); print('OPENS', file=sys.stderr); return real(*arguments)\n"
        "windows.open_store = open_store"
    )


@pytest.fixture
def run_both(start_command, tmp_path):
    """Runs two processes of one run on some text: their arguments differ in those of each."""

    def run(workdir, *of_each):
        common = (
            CONFIG,
            f"--workdir={workdir}",
            "--config.data.dataset=files",
            "--config.data.seq_len=64",
        )
        short = ("--stop_at_step=2", "--config.eval.max_windows=2", "--config.log_every=1")
        started = [
            start_command("prope.train", *common, *short, *arguments, **pod)
            for arguments, pod in zip(of_each, pod_environments(), strict=True)
        ]
        return [finish(command) for command in started]

    return run


def test_only_the_first_process_reads_the_text(run_both, tmp_path):
    write_text(tmp_path / "text", articles())
    cache = f"--config.data.cache_dir={tmp_path}/stores"
    folders = [f"--config.data.data_dir={tmp_path}/{name}" for name in ("text", "not on this host")]
    outcomes = run_both(tmp_path / "run", *((cache, folder) for folder in folders))
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert "packing" in outcomes[0].stderr and "no such folder" not in outcomes[1].stderr
    assert read_config(tmp_path / "run").data.data_dir == f"{tmp_path}/text"
    assert outcomes[0].result["step"] == 2 and len(losses(tmp_path / "run")) == 2


@pytest.mark.parametrize("text", ["same", "other"])
def test_hosts_that_share_no_cache_make_a_store_each(tmp_path, cache_dir, text):
    other = "lambda *arguments: dataclasses.replace(real(*arguments), fingerprint='0')"
    patch = (
        "import dataclasses; from prope.data import windows; real = windows.open_store\n"
        "if process == '1':\n"
        f"    windows.find_store = lambda *arguments: None; windows.open_store = {'real' if text == 'same' else other}"
    )
    started = start_two_patched(patch, tmp_path, cache_dir)
    first, second = (process.communicate(timeout=300)[1] for process in started)
    assert "config.data.cache_dir may be a place that hosts share" in second
    assert [process.returncode for process in started] == ([0, 0] if text == "same" else [2, 2]), (
        first + second
    )
    if text == "other":
        said = re.compile(
            r"error: (process 1: )?python_docs: is other text here \(.*\) than in process 0 \(.*share it"
        )
        assert said.match(first.splitlines()[-1]) and said.match(second.splitlines()[-1])


def test_the_others_wait_however_long_it_takes(tmp_path, cache_dir):
    started = start_two_patched(slow(20), tmp_path, cache_dir)
    first, second = (process.communicate(timeout=300)[1] for process in started)
    assert [process.returncode for process in started] == [0, 0], first + second
    assert first.count("OPENS") == 2 and "OPENS" not in second
    assert second.count("waiting for process 0") > 10


@pytest.mark.parametrize("ends", ["error", "kill", "SIGTERM"])
def test_what_ends_the_first_process_ends_the_others(tmp_path, cache_dir, ends):
    patch = slow(5 if ends == "error" else 60).replace(
        "print(", "raise UsageError('no such text'); print("
    )
    first, second = start_two_patched(patch, tmp_path, cache_dir)
    lines = []
    for line in second.stderr:
        lines.append(line)
        if "waiting for process 0" in line:
            break
    if ends == "kill":
        first.kill()
    if ends == "SIGTERM":
        second.send_signal(signal.SIGTERM)
    start = time.monotonic()
    _, said = second.communicate(timeout=300)
    assert time.monotonic() - start < 40
    if ends == "error":
        assert (
            second.returncode == first.wait(60) == 2
            and said.splitlines()[-1] == "error: no such text"
        ), said
    if ends == "kill":
        assert second.returncode == 76 and "another process of this run is gone" in said, said
    if ends == "SIGTERM":
        assert second.returncode == 75 and "SIGTERM before the first step" in said, said
    first.kill()
    first.communicate()
