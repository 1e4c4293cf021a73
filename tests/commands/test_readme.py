"""The READMEs are true: every ```bash block runs, at tiny sizes, and so does every ```python block.

A README's blocks run in order in a folder that stands for the clone. A block says nothing that a
user would not type: DRY and SMALL below make it small, and STANDINS are the programs that it does
not find here. What must not run is in a ```text block.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from support.commands import ROOT
from support.forks import forking_python
from support.launchers import commit

TOPS = ("configs", "launch", "prope", "tests")
FILES = [ROOT / "README.md", *(file for top in TOPS for file in (ROOT / top).rglob("*.md"))]
READMES = sorted(file.relative_to(ROOT).as_posix() for file in FILES)
# What stands in a README -> what runs here, in this order: nothing that starts elsewhere ..
DRY = [
    (r"\\\n\s*", ""),
    (r"^source launch/setup\.sh.*", "bash -n launch/setup.sh"),
    (r"bash launch/(quickstart|test)\.sh.*", r"bash -n launch/\1.sh"),
    (r"bash launch/local_pod\.sh", "bash launch/local_pod.sh --dry-run"),
    (r"bash launch/tpu_vm\.sh (\w+)", r"bash launch/tpu_vm.sh \1 --dry-run"),
    (r"--launcher=", "--dry-run --launcher="),
]
# .. and nothing that takes long.
SMALL = [
    (r"(configs/\w+\.py)\b(?!:)", r"\1:tiny"),
    (r"(configs/(?:quick_sweep|wiki_sample)\.py:tiny)", r"\1 --rope_percentage=0,1"),
    (r" --config\.data\.data_dir=\S+", ""),  # tiny configs bring their own text
    (r"--rope_percentage=0,0\.[\d.,]+", "--rope_percentage=0,1"),
    (r"--seq_len=1x,2x,\S+", "--seq_len=1x,2x"),
    # A tiny model fits with ever larger batches; test_plan searches.
    (r"--search\b", "--sequences_per_chip=1"),
    # Compilers of chips read this, too.
    (r"(python -m prope\.plan)", r"JAX_DISABLE_MOST_OPTIMIZATIONS=false \1"),
    (r"--max_windows=\d+", "--max_windows=2"),
    (r"--step=\d+", "--step=10"),  # the tiny run has checkpoints 10 and 20
    (r"--grid=seed=(\d+),\S+", r"--grid=seed=\1"),
    # The page has three seeds; two make an interval.
    (r"(configs/wiki_sample\.py:tiny)", r"\1 --grid=seed=0,1"),
    (r"--(seq_len|config\.data\.seq_len)=\d+\b", r"--\1=64"),
    (r"--config\.model\.(embed_dim|hidden_dim|vocab_size)=\d+", r"--config.model.\1=320"),
]
# Pages of clouds: what a launcher is to run is a line of its own, too.
PAGES = ("launch/gke.md", "launch/sky.md", "launch/slurm.md", "launch/tpu_vm.md")
HANDED = [
    (r"gs://my-bucket", "runs/bucket"),
    (r"\.venv-(sky|xpk)/bin/", ""),
    (r"^(.* -- |\$JOB )(python -m .*)$", r"\1\2\n\2"),
    (
        r"^(.*(?:COMMAND|--command)=)\"(?:cd .* && |\$START )?(python -m [^\"]*)\"(.*)$",
        r'\1"\2"\3\n\2',
    ),
]
STANDINS = ("sbatch", "gcloud", "sky", "ssh-add", "xpk", "pip")
# `python` there: a command of the project checks its flags and its config, and does no more.
PARSES = """#!{python}
import os, runpy, sys
arguments = sys.argv[1:]
if arguments[0] != "-m" or not arguments[1].startswith("prope.") or "xla_flags" in arguments[1]:
    os.execv({python!r}, [{python!r}, *arguments])
from absl import flags
from prope import command
def run(main, define_flags, *_, **__):
    if not flags.FLAGS.is_parsed():
        command.prepare(define_flags, "", uses_devices=False)
    print("parsed", *sys.argv[1:])
command.run = run
sys.argv = arguments[1:]
runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
"""
PREPARED = ("runs/quickstart",)  # runs that a README reads and another one makes


def blocks(readme: str, language: str) -> list[str]:
    return re.findall(
        rf"^ *```{language}\n(.*?)^ *```", (ROOT / readme).read_text(), re.DOTALL | re.MULTILINE
    )


def rewrite(script: str, rules: list[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        script = re.sub(pattern, replacement, script, flags=re.MULTILINE)
    return script


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("readme", READMES)
def test_links_lead_somewhere(readme):
    prose = re.sub(r"^ *```.*?^ *```", "", (ROOT / readme).read_text(), flags=re.DOTALL | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = ((ROOT / readme).parent / name).resolve() if name else ROOT / readme
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), target


def anchors(text: str) -> set[str]:
    """The names of a Markdown file's headings, as GitHub makes them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


def put_program(file: pathlib.Path, code: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(code)
    file.chmod(0o755)


def put_programs(folder: pathlib.Path) -> dict[str, str]:
    """Puts the stand-ins into folder/bin; returns an environment in which they are found first."""
    for name in STANDINS:
        # Each prints its words; of gcloud's, ACTIVE is a state.
        put_program(folder / "bin" / name, '#!/bin/sh\necho ACTIVE "$@"\n')
    path = f"{folder}/bin:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    return environment() | {"PATH": path}


def make_clone(folder: pathlib.Path) -> None:
    """Copies what stands here into a folder, and commits all that the folder has."""
    for name in ("configs", "launch", "prope"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    commit(folder)


def run_script(script: str, folder: pathlib.Path, env: dict) -> subprocess.CompletedProcess:
    """Runs a script in a folder up to its first error, and fails where there is one."""
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    "readme", [name for name in READMES if blocks(name, "bash") and name not in PAGES]
)
def test_every_command_runs(readme, trained, cache_dir, tmp_path):
    script = rewrite("".join(blocks(readme, "bash")), [*DRY, *SMALL])
    if "prope.plan" in script and importlib.util.find_spec("libtpu") is None:
        script = re.sub(r"^.*python -m prope\.plan.*", "", script, flags=re.MULTILINE)
    env = put_programs(tmp_path) | {"PROPE_CACHE": str(cache_dir)}
    make_clone(tmp_path)
    for name in PREPARED:
        shutil.copytree(trained[0], tmp_path / name)
    with forking_python() as program:
        put_program(tmp_path / "bin/python", program)
        run_script(script, tmp_path, env)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_one_that_its_programs_take(page, tmp_path):
    page_text = "".join(blocks(page, "bash"))
    env = put_programs(tmp_path) | {"PROPE_CACHE": f"{tmp_path}/cache"}
    put_program(tmp_path / "bin/python", PARSES.format(python=sys.executable))
    make_clone(tmp_path)
    done = run_script(rewrite(page_text, [*DRY, *HANDED]), tmp_path, env)
    modules = re.findall(r"python -m prope\.([\w.]+)", page_text)
    measure = "bench" if "slurm" in page else "plan"
    assert set(modules) == {"data.prepare", measure, "train", "evaluate", "report"}
    parsed = re.findall(r"^parsed (.*)$", done.stdout, re.MULTILINE)
    assert len(parsed) == len(modules)
    for line in parsed:
        assert "--config=" not in line or "--config.data.cache_dir=runs/" in line
    assert done.stdout.count('"state": "new"') == 5  # the runs of the sweep
    made = {path.name for path in tmp_path.glob("runs/*")} - {"clone"}  # the files of an image
    assert not made and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("readme", "block"),
    [(name, block) for name in READMES for block in range(len(blocks(name, "python")))],
)
def test_every_python_block_runs(readme, block):
    code = blocks(readme, "python")[block]
    for library in re.findall(r"^(?:import|from) (torch|transformers)\b", code, re.MULTILINE):
        pytest.importorskip(library, reason="the hf extra is not installed")
    exec(compile(code, readme, "exec"), {})
