"""launch/sky.yaml: read by SkyPilot itself, and its commands on this machine."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from etils import epath
from support.commands import ROOT
from support.launchers import clean_environment, own_environment

from prope.config import default_config
from prope.sweep.execute import Sweep, job_name, split_launcher
from prope.sweep.grid import plan

VERSION = "0.14.1"
TASK = yaml.safe_load((ROOT / "launch/sky.yaml").read_text())


@pytest.fixture(scope="module")
def ask_skypilot(tmp_path_factory):
    """Runs code where SkyPilot is installed."""
    folder = own_environment("skypilot", VERSION)
    home = tmp_path_factory.mktemp("home")
    catalogs = home / ".sky/catalogs/v8/common"  # which SkyPilot would download
    catalogs.mkdir(parents=True)
    (catalogs / "accelerators.csv").write_text("AcceleratorName,Clouds\nH100,['GCP']\n")
    (catalogs / "metadata.csv").write_text("GPU,MemoryGB,Manufacturer\nH100,80,NVIDIA\n")

    def ask(code: str):
        """Returns the object that the code calls `answer`."""
        file = f"file = {str(ROOT / 'launch/sky.yaml')!r}"
        code = "\n".join(["import json, sky", file, code, "print(json.dumps(answer))"])
        environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
        command = [folder / "bin/python", "-c", code]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return ask


READ = """
import shlex
from sky.client.cli import command
def read(line):  # as the program sky does
    given = command.jobs_launch.make_context("launch", shlex.split(line)[3:]).params
    flags = {name: given[name] for name in ("name", "gpus", "cpus", "num_nodes", "use_spot", "env")}
    task = command._make_task_or_dag_from_entrypoint_with_overrides(given["entrypoint"], **flags)
    task.validate(skip_workdir=True)
    (resources,) = task.resources
    return [task.name, resources.accelerators, resources.use_spot, task.num_nodes, task.envs]
"""


def commands_of_the_page() -> list[str]:
    """The lines of sky.md that launch a job, then what its sweep's launcher makes of a run."""
    page = (ROOT / "launch/sky.md").read_text().replace("\\\n", " ")
    page = page.replace("$(git rev-parse HEAD)", "abc")
    (launcher,) = re.findall(r'--launcher="(sky .*?)"', page)
    values = {"data.tokenizer": 'it\'s "my" model', "profile": (10, 12)}
    (run,) = plan([{"seed": [0]}], "file.py", default_config(), values)
    sweep = Sweep(epath.Path("gs://B/W"), [run], split_launcher(launcher))
    return [
        *re.findall(r"^sky jobs launch .*$", page, re.MULTILINE),
        shlex.join(sweep.command(run)),
    ]


@pytest.mark.slow
def test_skypilot_reads_the_job_by_every_command_of_its_page(ask_skypilot):
    answers = ask_skypilot(f"{READ}answer = [read(line) for line in {commands_of_the_page()}]")
    slice = {"tpu-v5p-128": 1}
    assert [answer[:4] for answer in answers] == [
        ["prepare", None, True, 1],
        ["p075", slice, True, 1],
        ["evaluate", slice, True, 1],
        ["p075", {"H100": 8}, True, 8],
        [job_name("W-seed=0"), slice, True, 1],
    ]
    environments = [answer[4] for answer in answers]
    assert [env["PLATFORM"] for env in environments] == ["cpu", "v5p", "v5p", "gpu", "v5p"]
    assert [env["PROPE_COMMIT"] for env in environments] == ["", "abc", "", "", "abc"]
    for env in environments:
        assert re.match(r"python -m prope\.(train|evaluate|data\.prepare) ", env["COMMAND"])
    assert shlex.split(environments[-1]["COMMAND"])[3:] == [
        "--config=file.py",
        '--config.data.tokenizer=it\'s "my" model',
        "--config.profile=(10, 12)",
        "--config.seed=0",
        "--workdir=gs://B/W/seed=0",
    ]


@pytest.mark.slow
def test_skypilot_wants_a_command(ask_skypilot):
    says = ask_skypilot(
        "try:\n    sky.Task.from_yaml(file)\nexcept ValueError as error:\n    answer = str(error)"
    )
    assert "'COMMAND' is None" in says


@pytest.mark.slow
def test_skypilot_restarts_what_is_not_final(ask_skypilot):
    # Codes of all hosts; 137 stands for those that SkyPilot killed because another had failed.
    codes = [[75], [76], [76, 137, 137], [137, 75], [1], [2], [130], [1, 137], [137, 2, 137]]
    restarted = ask_skypilot(f"""
from sky.jobs.recovery_strategy import StrategyExecutor
config = sky.utils.yaml_utils.read_yaml(file)
task = sky.Task.from_yaml_config(config, env_overrides={{"COMMAND": "x"}})
def restarts(codes):
    again = sky.Task.from_yaml_config(task.to_yaml_config())
    backend = sky.backends.CloudVmRayBackend()
    executor = StrategyExecutor.make("c", backend, again, 1, 0, None, set(), None, None)
    return executor.should_restart_on_failure(codes)
answer = [restarts(each) for each in {codes}]
""")
    assert restarted == [True] * 4 + [False] * 5


# What SkyPilot sets on a host. Source: its documentation, "Environment variables".
HOST = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
}
SAY = """import os, sys
print(*sys.argv[1:], os.environ["PROPE_PROCESSES"], "XLA_FLAGS" in os.environ, sep="|")
"""


@pytest.fixture
def host(tmp_path):
    """Runs the job's commands as on a host, in a folder that stands for the clone there."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "prope").symlink_to(ROOT / "prope")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text(
        f'export PATH="{os.path.dirname(sys.executable)}:$PATH"'
    )
    (tmp_path / "say.py").write_text(SAY)

    def run(platform: str, given: str) -> subprocess.CompletedProcess:
        environment = clean_environment(PLATFORM=platform, COMMAND=given, **HOST)
        command = ["bash", "-c", TASK["run"]]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return run


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("v5p", "auto|False"), ("gpu", "1/2@10.0.0.4:8476|True"), ("cpu", "1/2@10.0.0.4:8476|False")],
)
def test_a_host_joins_the_others(platform, expected, host):
    done = host(platform, "python say.py 'a  b' --c=d")
    assert done.stdout == f"a  b|--c=d|{expected}\n", done.stderr


@pytest.mark.parametrize(
    ("code", "expected"), [(0, 0), (1, 1), (2, 2), (75, 75), (76, 76), (130, 130), (134, 76)]
)
def test_a_host_hands_on_the_exit_code(code, expected, host):
    assert host("cpu", f"bash -c 'exit {code}'").returncode == expected
    assert host("cpu", "bash -c 'kill -KILL $$'").returncode == 76


def test_every_platform_installs_its_extras(tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/setup.sh").write_text('echo "$1"; [[ $1 != "$FAILS" ]]')

    def setup(platform: str, fails: str = "") -> tuple[str, int]:
        environment = os.environ | {"PLATFORM": platform, "FAILS": fails}
        command = ["bash", "-c", TASK["setup"]]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return done.stdout.replace("\n", " "), done.returncode

    assert [setup(platform) for platform in ("v5e", "gpu", "cpu")] == [
        ("tpu gcs ", 0),
        ("gpu gcs ", 0),
        ("gcs ", 0),
    ]
    assert setup("gpu", "gpu") == ("gpu ", 1) and setup("cpu", "gcs") == ("gcs ", 1)
