"""launch/gke.md: its commands by xpk itself, and the JobSets that xpk makes, as a pod runs them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import yaml
from support.commands import ROOT
from support.launchers import HANDLE, clean_environment, own_environment, wait_for

from prope.sweep.execute import job_name

VERSION = "1.16.0"
# In xpk's place: xpk itself, which writes what it would do into a file for each call.
XPK = """#!/bin/sh
export TELEMETRY_ENABLED=false HOME={folder}
exec {xpk} "$@" --dry-run >{folder}/calls/$(ls {folder}/calls | wc -l)
"""
VALUES = """"--config.data.tokenizer=it's \\"my\\" \\$HOME" --config.profile=10,12"""


@pytest.fixture(scope="module")
def answers(once) -> list[str]:
    """What xpk answers to every command of the page, those that the sweep hands out too."""
    return once("gke", run_page)[1]


def run_page(folder) -> list[str]:
    page = (ROOT / "launch/gke.md").read_text()
    (script,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    script = script.replace("\\\n", " ").replace("$(git rev-parse HEAD)", "abc")
    script = script.replace("gs://my-bucket", "bucket").replace(
        "sweep.py $RUN", f"sweep.py $RUN {VALUES}"
    )
    ours = r"^(?:export|mkdir|[A-Z]+=|\$JOB|xpk|python launch/sweep).*$"
    for name in ("configs", "launch"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("bin", "calls"):
        (folder / name).mkdir()
    xpk = own_environment("xpk", VERSION) / "bin/xpk"
    (folder / "bin/xpk").write_text(XPK.format(folder=folder, xpk=xpk))
    (folder / "bin/xpk").chmod(0o755)
    path = f"{folder}/bin:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "\n".join(re.findall(ours, script, re.MULTILINE))],
        cwd=folder,
        env=clean_environment(PATH=path, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.count('"state": "submitted"') == 5, done.stderr
    count = len(list((folder / "calls").iterdir()))
    return [(folder / "calls" / str(call)).read_text() for call in range(count)]


@pytest.fixture(scope="module")
def jobsets(answers) -> list[dict]:
    """The JobSets that xpk would create."""
    texts = re.findall(r"^apiVersion: jobset.*?(?=^\[XPK\])", "".join(answers), re.M | re.DOTALL)
    return [yaml.safe_load(text) for text in texts]


@pytest.mark.slow
def test_xpk_takes_every_command_of_the_page(answers):
    tasks = [re.search(r"Starting (cluster|[Ww]orkload) (\w+)", answer)[2] for answer in answers]
    assert tasks == ["create", *["create"] * 7, "list", "delete"]
    nodes = re.search(r"node-pools create .*", answers[0])[0]
    for flag in ("--machine-type=ct5p-hightpu-4t", "--tpu-topology=4x4x4", "--num-nodes=16"):
        assert flag in nodes
    assert "--spot" in nodes
    assert all("crane mutate python:3.11 " in answer for answer in answers[1:8])
    endings = [answer.splitlines()[-1] for answer in answers]
    # Without a cluster there is nothing to wait for.
    assert endings.pop(8) == "[XPK] XPK failed, error code 1"
    assert set(endings) == {"[XPK] Exiting XPK cleanly"}


@pytest.mark.slow
def test_a_jobset_is_a_slice_that_saves_and_restarts(jobsets):
    swept = [job_name(f"sweep-rope_percentage={p}") for p in ("0", "0.25", "0.5", "0.75", "1")]
    assert [jobset["metadata"]["name"] for jobset in jobsets] == ["p075", *swept, "evaluate"]
    for jobset in jobsets:
        assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 50
        (replicated,) = jobset["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
        pod = job["template"]["spec"]
        assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (16, 16, 0)
        assert pod["terminationGracePeriodSeconds"] == 600
        assert pod["nodeSelector"] == {
            "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
            "cloud.google.com/gke-tpu-topology": "4x4x4",
        }
        (container,) = pod["containers"]
        assert container["resources"] == {"limits": {"google.com/tpu": 4}}
        variables = {entry["name"]: entry["value"] for entry in container["env"]}
        assert variables == {"PROPE_PROCESSES": "auto", "PROPE_COMMIT": "abc"}


PYTHON = """#!/bin/sh
case "$2" in prope.runtime.*) exec {python} "$@" ;; esac
exec {python} program.py "$@"
"""
PROGRAM = f"""import json, os, pathlib, sys
record = [pathlib.Path("installed").read_text(), os.environ["LIBTPU_INIT_ARGS"], sys.argv[1:]]
pathlib.Path("record").write_text(json.dumps(record))
if os.environ["CODE"] == "kill":
    os.kill(os.getpid(), 9)
if os.environ["CODE"] == "wait":
    sys.argv = ["program.py", "ready"]
    exec({HANDLE!r})
sys.exit(int(os.environ["CODE"]))
"""


def job_of(jobset: dict) -> dict:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


@pytest.fixture
def start_pod(tmp_path):
    """Starts what a JobSet's container runs, in a folder that stands for /app there."""
    (tmp_path / "launch").mkdir()
    for name in ("common.sh", "run.sh"):
        shutil.copy(ROOT / "launch" / name, tmp_path / "launch")
    (tmp_path / "launch/setup.sh").write_text('echo -n "$1" >installed')
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "python").write_text(PYTHON.format(python=sys.executable))
    (tmp_path / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.1\n")  # xpk's is of 5 s
    for name in ("python", "sleep"):
        (tmp_path / name).chmod(0o755)

    def start(jobset: dict, code: str) -> subprocess.Popen:
        (container,) = job_of(jobset)["template"]["spec"]["containers"]
        path = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.Popen(
            container["command"],
            cwd=tmp_path,
            env=clean_environment(PATH=path, PYTHONPATH=str(ROOT), CODE=code),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.mark.slow
def test_a_pod_installs_and_runs_the_words_of_the_run(jobsets, start_pod, tmp_path):
    _, stderr = start_pod(jobsets[2], "0").communicate(timeout=60)
    assert stderr == ""
    extra, flags, words = json.loads((tmp_path / "record").read_text())
    assert extra == "tpu" and "xla_tpu_enable_ag_backward_pipelining" in flags  # v5p alone has it
    assert words[:3] == ["-m", "prope.train", "--config=configs/gemma_2b_wiki.py"]
    assert {
        "--config.data.data_dir=gs://tfds-data/datasets",
        '--config.data.tokenizer=it\'s "my" $HOME',
        "--config.profile=(10, 12)",
        "--config.model.rope_percentage=0.25",
        "--workdir=bucket/sweep/rope_percentage=0.25",
    } <= set(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "expected", "restarts"),
    [
        ("0", 0, False),
        ("1", 1, False),
        ("2", 2, False),
        ("75", 75, True),
        ("76", 76, True),
        ("134", 134, True),
        ("139", 139, True),
        ("kill", 137, True),
        ("130", 130, True),  # xpk restarts all codes from 127 on; nothing sends Ctrl-C to a pod
    ],
)
def test_a_jobset_restarts_what_is_not_final(code, expected, restarts, jobsets, start_pod):
    pod = start_pod(jobsets[0], code)
    _, stderr = pod.communicate(timeout=60)
    assert pod.returncode == expected, stderr
    (rule,) = job_of(jobsets[0])["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]
    assert (rule["action"], codes["operator"]) == ("FailJob", "NotIn")
    assert jobsets[0]["spec"]["failurePolicy"]["rules"] == [
        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    assert (expected in codes["values"]) == restarts


@pytest.mark.slow
def test_sigterm_reaches_the_run_which_saves(jobsets, start_pod, tmp_path):
    pod = start_pod(jobsets[0], "wait")
    wait_for(tmp_path / "ready", 1)
    pod.send_signal(signal.SIGTERM)  # to the first process alone, as Kubernetes does
    _, stderr = pod.communicate(timeout=60)
    assert pod.returncode == 75 and "got 15\n" in stderr
