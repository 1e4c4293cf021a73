"""Every command and script answers --help at once, and refuses words that it does not know."""

import ast
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib

import pytest
from support.commands import ROOT
from support.launchers import launch, refused

from prope import command

IS_COMMAND = 'if __name__ == "__main__":'
MODULES = sorted(path for path in (ROOT / "prope").rglob("*.py") if IS_COMMAND in path.read_text())
PROGRAMS = [*MODULES, *sorted((ROOT / "launch").glob("*.py"))]
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), ROOT / "launch/slurm.sbatch"])
SCRIPTS.remove(ROOT / "launch/common.sh")  # functions that the others source
HEAVY = {
    "jax",
    "numpy",
    "scipy",
    "flax",
    "optax",
    "orbax",
    "grain",
    "tensorstore",
    "matplotlib",
    "torch",
}

# Runs a module or file as a program does; says on stderr what it has imported of HEAVY.
WATCH = f"""
import atexit, runpy, sys
atexit.register(lambda: print(*sorted({HEAVY} & set(sys.modules)), file=sys.stderr))
del sys.argv[0]
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def name_of(path) -> str:
    """What follows python, or python -m, in a command line."""
    relative = path.relative_to(ROOT)
    return (
        str(relative) if relative.parts[0] == "launch" else ".".join(relative.with_suffix("").parts)
    )


def run(*command) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )


def program(path, *arguments) -> subprocess.CompletedProcess:
    name = name_of(path)
    return run(*([name] if name.endswith(".py") else ["-m", name]), *arguments)


def defined_flags(path) -> dict[str, str]:
    """What --help should say of every flag that a program defines, in parentheses."""
    said, required = {}, set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr.startswith(("DEFINE_", "define_place")):
            name, default = (
                eval(compile(ast.Expression(arg), "", "eval")) for arg in node.args[:2]
            )
            default = ",".join(default) if isinstance(default, list) else default
            text = (
                "none"
                if default in (None, "")
                else str(default).lower()
                if default in (True, False)
                else str(default)
            )
            said[name] = f"default: {text}"
        elif node.func.attr == "define_flags":
            said |= defined_flags(ROOT / "prope/inference/options.py")
        elif node.func.attr == "mark_flags_as_required":
            required = set(ast.literal_eval(node.args[0]))
    return said | dict.fromkeys(required, "required")


def test_the_lists_are_not_empty():
    assert {
        "prope.train",
        "prope.data.inspect",
        "prope.runtime.xla_flags",
        "launch/sweep.py",
    } <= set(map(name_of, PROGRAMS))
    assert {"quickstart.sh", "setup.sh", "slurm.sbatch"} <= {path.name for path in SCRIPTS}
    assert len(defined_flags(ROOT / "prope/sample.py")) == 9


def test_the_package_lists_its_commands():
    done = run("-m", "prope")
    assert (done.returncode, done.stderr) == (0, "")
    commands = [path for path in MODULES if "command.run(" in path.read_text()]
    listed = dict(re.findall(r"^  python -m (\S+) +(\S.*)$", done.stdout, flags=re.MULTILINE))
    expected = {}
    for path in commands:
        expected[name_of(path)] = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
    assert listed == expected
    assert run("-m", "prope", "--help").stdout == done.stdout
    for argument, name in (("evaluate", "prope.evaluate"), ("xyz", "prope.train")):
        refused = run("-m", "prope", argument)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr == (
            f"error: python -m prope takes no argument, not {argument}: write python -m {name}\n"
        )


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_every_program_answers_help_at_once(path):
    done = program(path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    first, *rest = done.stdout.splitlines()
    assert len(rest) < 50, "it does not fit a screen"
    assert re.fullmatch(r"[A-Z][a-z]+s\b.*\.", first), "the first line says what it does"
    name = name_of(path)
    example = re.escape(f"python {name}" if name.endswith(".py") else f"python -m {name}")
    assert any(re.match(rf"    {example}\b", line) for line in rest), "there is no example"
    table = done.stdout.partition("\nFlags:\n")[2].partition("\n\n")[0]
    rows = re.split(r"^  --(?:\[no\])?", table, flags=re.MULTILINE)[1:]
    entries = {row.split()[0]: re.sub(r"\s+", " ", row).strip() for row in rows}
    expected = defined_flags(path)
    assert entries.keys() == expected.keys()
    for flag, entry in entries.items():
        assert entry.endswith(f"({expected[flag]})"), entry
    short = run("-c", WATCH, name, "-h")
    assert (short.returncode, short.stderr) == (0, "\n"), "something heavy is imported first"
    assert short.stdout == done.stdout


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_every_program_refuses_what_it_does_not_know(path):
    for stray in ("--frobnicate", "stray"):
        done = program(path, stray)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert re.fullmatch(r"error: [^\n]+\n", done.stderr), done.stderr


def test_help_into_a_pipe_that_closes_ends_quietly():
    command = f"{sys.executable} -m prope.train --help | (exec <&-; echo closed)"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.stderr) == ("closed\n", "")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_answers_help(path):
    done = launch(path.name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"[A-Z].*[.;]$", done.stdout.splitlines()[0])
    assert re.search(rf"^  .*launch/{path.name}", done.stdout, re.MULTILINE), "there is no example"
    assert not re.search(r"^#", done.stdout, re.MULTILINE)
    code = path.read_text()
    for values, switches in re.findall(r'parse_flags "([a-z_ ]*)" (?:\\\n\s*)?"([a-z_ ]*)"', code):
        for name in values.split():
            default = re.search(rf"(?<![\w-]){name}=([\w/]*)", code[code.index("\nset -e") :])[1]
            assert re.search(rf"^ +--{name}={default or '[A-Za-z0-9]'}", done.stdout, re.M), (
                f"--{name}={default}"
            )
        for name in switches.split():
            assert f"--{name.replace('_', '-')} " in done.stdout, name
    short = launch(path.name, "-h")
    assert (short.returncode, short.stdout, short.stderr) == (0, done.stdout, "")


NEEDED = {"tpu_vm.sh": ["logs"]}  # what comes before a flag


@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if path.name != "test.sh"], ids=lambda path: path.name
)
def test_every_script_refuses_what_it_does_not_know(path):
    assert "--frobnicate" in refused(launch(path.name, *NEEDED.get(path.name, []), "--frobnicate"))
    assert "--frobnicate=1" in refused(
        launch(path.name, *NEEDED.get(path.name, []), "--frobnicate=1")
    )


@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        ("quickstart.sh", ["runs/a", "runs/b"], "runs/b: unexpected argument"),
        ("setup.sh", ["gpus"], "gpus: there is no such extra"),
        ("setup.sh", ["gpu", "test"], "test: unexpected argument"),
        ("tpu_vm.sh", ["logs", "--name=a", "b"], "b: logs takes no command"),
        ("run.sh", [], "no platform"),
        ("run.sh", ["tpu9", "true"], "v5e, v5p, v6e, gpu, cpu; got tpu9"),
        ("run.sh", ["cpu"], "no command"),
        (
            "local_pod.sh",
            ["--processes", "3", "--", "true"],
            "--processes: needs a value: --processes=VALUE",
        ),
        ("local_pod.sh", ["--dry-run=yes", "--", "true"], "--dry-run=yes: takes no value"),
    ],
)
def test_surplus_and_missing_words_are_refused(script, arguments, named):
    assert named in refused(launch(script, *arguments))


def test_setup_knows_the_extras_of_the_project_and_its_own_folder(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = re.search(r"\^\(([a-z|-]*)\)\$", (ROOT / "launch/setup.sh").read_text())[1].split("|")
    assert sorted(filter(None, allowed)) == sorted(project["optional-dependencies"])
    command = ["bash", ROOT / "launch/setup.sh"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "is not the folder of a clone of prope" in refused(done) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("module", "arguments", "says"),
    [
        (
            "train",
            ["--num_steps=5"],
            "--num_steps: there is no such flag (did you mean --config.num_steps?)",
        ),
        (
            "train",
            ["--steps=5"],
            "--steps: there is no such flag (did you mean --config.num_steps?)",
        ),
        (
            "train",
            ["--config={c}", "--config.model.rope_percentage=half"],
            "--config.model.rope_percentage=half: could not convert string to float: 'half'; "
            "p in [0, 1]: 1 is RoPE, 0 is NoPE",
        ),
        ("train", ["--rope_percentage=1"], "(did you mean --config.model.rope_percentage?)"),
        ("train", ["--model.head_dim=8"], "(did you mean --config.model.head_dim?)"),
        ("train", ["--wrokdir=W"], "--wrokdir: there is no such flag (did you mean --workdir?)"),
        ("train", [], "Flag --config must have a value"),
        (
            "train",
            ["--config.seed=1", "--config={c}"],
            "Found --config.seed=1 in argv before a value for --config was specified",
        ),
        (
            "train",
            ["--config", "none.py", "--workdir=W"],
            "--config: [Errno 2] No such file or directory: 'none.py'",
        ),
        ("evaluate", ["--workdir=W", "--config.seed=1"], "--config.seed: there is no such flag"),
        (
            "evaluate",
            ["--frobnicate=5"],
            "--frobnicate: there is no such flag; --help lists the flags",
        ),
        (
            "sample",
            ["--workdir=W", "--top_k=few"],
            "flag --top_k=few: invalid literal for int() with base 10: 'few'",
        ),
        (
            "sample",
            ["--workdir=W", "--temperature=hot"],
            "--temperature=hot: could not convert string to float: 'hot'",
        ),
        ("bench", ["--rope", "--rope_percentage=nan"], "--rope_percentage=nan: must be a number"),
        ("report", [], "give either --workdir, the directory of a run, or --sweep"),
    ],
)
def test_a_wrong_flag_is_answered_with_the_right_one(start_command, module, arguments, says):
    command = start_command(
        f"prope.{module}", *(a.format(c=ROOT / "configs/quickstart.py") for a in arguments)
    )
    code, stdout, stderr = command.wait()
    assert code == 2 and not stdout
    assert re.fullmatch(r"error: [^\n]+\n", stderr) and says in stderr, stderr


def test_training_imports_only_what_it_uses():
    code = "import prope.train, sys; print(*sys.modules)"
    loaded = run("-c", code).stdout.split()
    assert "jax" in loaded and "orbax.checkpoint" in loaded
    for name in (
        "torch",
        "tensorboard",
        "tensorboardX",
        "tensorflow_datasets",
        "matplotlib",
        "scipy",
        "jinja2",
    ):
        assert name not in loaded
    assert not [name for name in loaded if name.startswith("google.cloud.")]


@pytest.mark.parametrize("works", [True, False], ids=["installed", "failed"])
def test_setup_remembers_only_an_install_that_worked(works, tmp_path):
    for name in ("launch/setup.sh", "launch/constraints.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text("activated=yes\n")
    (programs / "python").write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexit {0 if works else 1}\n'
    )
    (programs / "python").chmod(0o755)
    command = 'source launch/setup.sh gpu; source launch/setup.sh gpu; echo "$? ${activated:-no}"'
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == ("0 yes\n" if works else "1 no\n")
    calls = (tmp_path / "calls").read_text().splitlines()
    by_uv, by_pip = (
        f"-m {program} --constraint launch/constraints.txt --editable .[gpu]"
        for program in (
            "uv pip install --quiet --python .venv/bin/python",
            "pip install --quiet --disable-pip-version-check",
        )
    )
    assert calls[0].endswith(" uv") and calls[1:] == (
        [by_uv] if works else [by_pip, calls[0], by_pip]
    )


OLD = """#!/bin/sh
case "$*" in
  -c*) exit 1 ;;
  *"python find 3.11") echo {0}/new ;;
  *) echo "$@" >>{0}/calls ;;
esac
"""
NEW = """#!/bin/sh
mkdir -p .venv/bin
cp {0}/new .venv/bin/python
touch .venv/bin/activate
echo new $@ >>{0}/calls
"""


@pytest.mark.parametrize(("extra", "code"), [("tpu", 0), ("gcs", 0), ("", 1)])
def test_setup_brings_a_newer_python_where_a_machine_in_a_cloud_has_none(extra, code, tmp_path):
    for name in ("launch/setup.sh", "launch/constraints.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        (tmp_path / name).write_text(OLD.format(tmp_path))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "new").write_text(NEW.format(tmp_path))
    (tmp_path / "new").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = ["bash", "-c", f"source launch/setup.sh {extra}"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    if code:
        assert (
            "no Python >= 3.11 with venv and pip found" in done.stderr
            and not (tmp_path / "calls").exists()
        )
        return
    pip, uv, venv, _, editable = (tmp_path / "calls").read_text().splitlines()
    assert pip == "-m pip install --quiet --user uv" and uv == "-m uv python install --quiet 3.11"
    assert venv == "new -m venv .venv" and editable.endswith(f"--editable .[{extra}]")


# Commands as a module of a user's would define them; what they print first is waited for.
INTERRUPTED = {
    "in a callback of the garbage collector": (
        "import gc\n"
        "def callback(*_):\n    say('ready')\n    time.sleep(1)\n"
        "def main():\n    gc.callbacks.append(callback)\n    gc.collect()\n"
        "    gc.callbacks.clear()\n    time.sleep(60)",
        1,
        130,
    ),
    "twice": (
        "def main():\n    try:\n        say('ready')\n        time.sleep(60)\n"
        "    finally:\n        say('ready')\n        time.sleep(60)",
        2,
        -signal.SIGINT,
    ),
}


@pytest.mark.parametrize("when", INTERRUPTED)
def test_ctrl_c_ends_a_command_without_a_traceback(when):
    code, presses, expected = INTERRUPTED[when]
    head = "import sys, time\nfrom prope import command\ndef say(word): print(word, flush=True)"
    script = f"{head}\n{code}\n"
    process = start_python("-c", f"{script}\ncommand.run(main, lambda: None)")
    for _ in range(presses):
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == expected
    assert re.fullmatch("" if when == "twice" else "stopped by Ctrl-C; .*\n", stderr)


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
    assert process.returncode == 130 and re.fullmatch("stopped by Ctrl-C; .*\n", stderr)


def start_python(*arguments, path=str(ROOT)) -> subprocess.Popen:
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, **output
    )


@pytest.mark.parametrize("compiler", ["libtpu", "jax_cuda13_plugin"])
@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("chosen", [None, "tpu"])
def test_compilers_are_left_alone_where_there_is_no_accelerator(
    monkeypatch, compiler, accelerator, chosen
):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: True if name == compiler else None
    )
    monkeypatch.setattr(sys, "argv", ["prope.evaluate"])
    monkeypatch.setattr(command, "_ACCELERATORS", ["null" if accelerator else "accel*"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    environ = {} if chosen is None else {"JAX_PLATFORMS": chosen}
    monkeypatch.setattr(os, "environ", environ)
    command.prepare(lambda: None, "")
    assert environ.get("JAX_PLATFORMS") == (chosen or (None if accelerator else "cpu"))
