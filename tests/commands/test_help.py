"""Every command and script answers --help at once, refuses unknown words and ends by Ctrl-C."""

import ast
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from support.commands import ROOT
from support.launchers import launch, refused

from prope import command
from prope.runtime.interrupts import Interrupts, Request

IS_COMMAND = 'if __name__ == "__main__":'
MODULES = sorted(path for path in (ROOT / "prope").rglob("*.py") if IS_COMMAND in path.read_text())
MODULES.remove(ROOT / "prope/hf/engine_process.py")  # which export_gguf alone runs
PROGRAMS = [*MODULES, *sorted((ROOT / "launch").glob("*.py"))]
PROGRAMS.remove(ROOT / "launch/tour.py")  # the cells of a notebook
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), ROOT / "launch/slurm.sbatch"])
SCRIPTS.remove(ROOT / "launch/common.sh")  # functions that the others source


def name_of(path) -> str:
    """What follows python, or python -m, in a command line."""
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "launch":
        return str(relative)
    return ".".join(relative.with_suffix("").parts)


# Runs the programs of its arguments with each of the words, every one in a fork of this process,
# which has imported what they all import first. Prints, by program and word: the exit code, stdout,
# stderr and which packages that take long were imported.
IN_FORKS = """
import json, os, runpy, sys, tempfile
from prope import command
heavy = {"jax", "numpy", "scipy", "flax", "optax", "orbax", "grain", "tensorstore", "matplotlib"}
answers = {}
for program in sys.argv[1:]:
    for word in ("--help", "--frobnicate", "stray"):
        files = [tempfile.TemporaryFile("w+") for _ in range(3)]
        child = os.fork()
        if not child:
            os.dup2(files[0].fileno(), 1)
            os.dup2(files[1].fileno(), 2)
            sys.argv = [program, word]
            code = 0
            try:
                if program.endswith(".py"):
                    runpy.run_path(program, run_name="__main__")
                else:
                    runpy.run_module(program, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = end.code or 0
            sys.stdout.flush()
            files[2].write(" ".join(heavy & set(sys.modules)))
            files[2].flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in files:
            file.seek(0)
        answers[f"{program} {word}"] = [code, *(file.read() for file in files)]
print(json.dumps(answers))
"""


def run(*words, path=str(ROOT)) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def answers(once) -> dict[str, list]:
    """What every program answers to every word: exit code, stdout, stderr, heavy imports."""

    def ask(_):
        done = run("-c", IN_FORKS, *map(name_of, PROGRAMS))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return once("help", ask)[1]


@pytest.mark.parametrize("program", list(map(name_of, PROGRAMS)))
def test_every_program_answers_help_at_once(program, answers):
    code, stdout, stderr, heavy = answers[f"{program} --help"]
    assert (code, stderr, heavy) == (0, "", "")
    assert len(stdout.splitlines()) <= 50, "it does not fit a screen"
    call = f"python {program}" if program.endswith(".py") else f"python -m {program}"
    assert f"\n    {call} " in stdout or f"\n    {call}\n" in stdout, "there is no example"
    for word in ("--frobnicate", "stray"):
        code, stdout, stderr, _ = answers[f"{program} {word}"]
        assert (code, stdout) == (2, "")
        assert re.fullmatch(r"error: [^\n]+\n", stderr)


def test_the_package_lists_its_commands():
    done = run("-m", "prope")
    assert (done.returncode, done.stderr) == (0, "")
    listed = dict(re.findall(r"^  python -m (\S+) +(\S.*)$", done.stdout, flags=re.MULTILINE))
    expected = {}
    for path in MODULES:
        if "command.run(" in path.read_text():
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            expected[name_of(path)] = docstring.splitlines()[0]
    assert listed == expected
    assert run("-m", "prope", "-h").stdout == done.stdout
    assert "evaluate" in refused(run("-m", "prope", "evaluate"))


def test_help_into_a_pipe_that_closes_ends_quietly():
    line = f"{sys.executable} -m prope.train --help | (exec <&-; echo closed)"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.stderr) == ("closed\n", "")


@pytest.mark.parametrize("when", ["during", "at the end"])
def test_output_into_a_pipe_that_closes_is_named_as_that(when):
    """A reader such as `head` has ended; no file is at fault, and nothing is said at exit."""
    main = {
        "during": "def main():\n    for _ in range(100_000): print('a row')",
        "at the end": "import time\ndef main():\n    time.sleep(1)\n    return {}",
    }[when]
    code = f"from prope import command\n{main}\ncommand.run(main, lambda: None, uses_devices=False)"
    reader = "head -1" if when == "during" else "true"
    line = f'{sys.executable} -c "$CODE" | {reader}; echo ${{PIPESTATUS[0]}}'
    env = os.environ | {"CODE": code, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == ("a row\n1\n" if when == "during" else "1\n")
    assert re.fullmatch(r"stopped: [^\n]*what reads the output has ended[^\n]*\n", done.stderr)


NEEDED = {"tpu_vm.sh": ["logs"]}  # what comes before a flag
WITHOUT_FLAGS = ("setup.sh", "test.sh")  # of their own


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_answers_help_and_refuses_what_it_does_not_know(path):
    done = launch(path.name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"launch/{path.name}" in done.stdout, "there is no example"
    assert not re.search(r"^#", done.stdout, re.MULTILINE)
    code = path.read_text()
    parsed = re.findall(r'parse_flags "([a-z_ ]*)" (?:\\\n\s*)?"([a-z_ ]*)"', code)
    assert bool(parsed) == (path.name not in WITHOUT_FLAGS), "which flags it has is not known"
    for names in parsed:
        for name in " ".join(names).split():
            assert f"--{name}" in done.stdout or f"--{name.replace('_', '-')}" in done.stdout, name
    short = launch(path.name, "-h")
    assert (short.returncode, short.stdout, short.stderr) == (0, done.stdout, "")
    if path.name != "test.sh":  # which hands its arguments to pytest
        for word in ("--frobnicate", "--frobnicate=1"):
            assert word in refused(launch(path.name, *NEEDED.get(path.name, []), word))


def test_a_run_imports_only_what_it_uses(tmp_path, cache_dir, monkeypatch):
    monkeypatch.setenv("PROPE_CACHE", str(cache_dir))
    flags = ["--config=configs/quickstart.py:tiny", f"--workdir={tmp_path}/run"]
    flags += ["--config.num_steps=1", "--config.eval.max_windows=4", "--config.log_to=csv"]
    code = "import runpy, sys; runpy.run_module('prope.train', run_name='__main__')"
    done = run("-c", f"{code}; print(*sys.modules)", *flags)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert {"jax", "orbax.checkpoint"} <= loaded
    unused = {"torch", "tensorboard", "tensorboardX", "tensorflow_datasets", "matplotlib", "scipy"}
    unused |= {"tensorflow", "transformers", "pandas", "pyarrow", "wandb", "jinja2"}
    assert not unused & loaded
    assert not [name for name in loaded if name.startswith("google.cloud.")]


# --- Ctrl-C -----------------------------------------------------------------------------------

# Commands as a module of a user's would define them, how often Ctrl-C is pressed, and how they end;
# what they print first is waited for.
INTERRUPTED = {
    "once": ("def main():\n    say('ready')\n    time.sleep(60)", 1, 130),
    "twice": (
        "def main():\n    try:\n        say('ready')\n        time.sleep(60)\n"
        "    finally:\n        say('ready')\n        time.sleep(60)",
        2,
        -signal.SIGINT,
    ),
}


def start_python(*arguments, path=str(ROOT)) -> subprocess.Popen:
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, **output
    )


@pytest.mark.parametrize("when", INTERRUPTED)
def test_ctrl_c_ends_a_command_without_a_traceback(when):
    code, presses, expected = INTERRUPTED[when]
    head = "import sys, time\nfrom prope import command\ndef say(word): print(word, flush=True)"
    process = start_python("-c", f"{head}\n{code}\ncommand.run(main, lambda: None)")
    for _ in range(presses):
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == expected
    assert re.fullmatch("" if when == "twice" else r"stopped by Ctrl-C[^\n]*\n", stderr)


def test_after_ctrl_c_nothing_is_run_at_exit():
    """At exit JAX clears its caches, which may crash where a compilation was interrupted."""
    script = """
import atexit
from prope import command
def main():
    atexit.register(print, "taken down", flush=True)
    print("to be flushed")
    raise KeyboardInterrupt
command.run(main, lambda: None)
"""
    process = start_python("-c", script)
    assert process.communicate(timeout=60)[0] == "to be flushed\n"
    assert process.returncode == 130


@pytest.mark.parametrize("module", ["prope.train", "prope.evaluate"])
def test_ctrl_c_during_the_import_of_jax(tmp_path, module):
    (tmp_path / "jax.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    arguments = [f"--config={ROOT}/configs/quickstart.py"] if module == "prope.train" else []
    process = start_python(
        "-m", module, *arguments, f"--workdir={tmp_path}", path=f"{tmp_path}:{ROOT}"
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and re.fullmatch(r"stopped by Ctrl-C[^\n]*\n", stderr)


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


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("chosen", [None, "tpu"])
def test_compilers_are_left_alone_where_there_is_no_accelerator(monkeypatch, accelerator, chosen):
    monkeypatch.setattr(importlib.util, "find_spec", {"libtpu": True}.get)
    monkeypatch.setattr(sys, "argv", ["prope.evaluate"])
    monkeypatch.setattr(command, "_ACCELERATORS", ["null" if accelerator else "accel*"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(command, "_log_to_stderr", lambda: None)
    environ = {} if chosen is None else {"JAX_PLATFORMS": chosen}
    monkeypatch.setattr(os, "environ", environ)
    command.prepare(lambda: None, "")
    assert environ.get("JAX_PLATFORMS") == (chosen or (None if accelerator else "cpu"))


BACKGROUND = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts a job with &
from prope import command
sys.argv = ["command"]
command.prepare(lambda: None, "", uses_devices=False)
print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
"""


def test_a_command_in_the_background_goes_on_ignoring_ctrl_c():
    done = subprocess.run([sys.executable, "-c", BACKGROUND], capture_output=True, cwd=ROOT)
    assert done.stdout == b"True\n", done.stderr
