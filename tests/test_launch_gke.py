"""launch/gke_jobset.sh and its image: the YAML by the schemas of JobSet and Kubernetes, the rest by a kubectl."""

import copy
import re
import shlex
import subprocess
import tarfile

import kubernetes_validate
import pytest
import yaml
from conftest import ROOT
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from launchers import TOOLS, calls, launch, make_clone, put_programs, refused


@pytest.fixture
def fakes(tmp_path):
    return put_programs(tmp_path)


@pytest.fixture
def clone(tmp_path):
    return make_clone(tmp_path)


GKE = ["--name=wiki-025", "--image=i:t"]
# Source: GKE's documentation, "Plan TPUs in GKE", the machines of four chips (one for 1x1): hosts, chips per host.
FLAT = {
    "1x1": (1, 1),
    "2x2": (1, 4),
    "2x4": (2, 4),
    "4x4": (4, 4),
    "4x8": (8, 4),
    "8x8": (16, 4),
    "8x16": (32, 4),
    "16x16": (64, 4),
}
CUBES = {
    "2x2x1": (1, 4),
    "2x2x2": (2, 4),
    "2x2x4": (4, 4),
    "2x4x4": (8, 4),
    "4x4x4": (16, 4),
    "4x4x8": (32, 4),
    "8x8x16": (256, 4),
    "16x16x24": (1536, 4),
}
SLICES = [
    *(("v5e", *item) for item in FLAT.items()),
    *(("v5p", *item) for item in CUBES.items()),
    ("v6e", "2x4", (2, 4)),
    ("v6e", "16x16", (64, 4)),
]
LABEL = {"v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice"}


def rendered(*arguments, **environment) -> dict:
    done = launch(
        "gke_jobset.sh", *GKE, *arguments, "--dry-run", "--", "python", "-m", "x", **environment
    )
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def check_jobset(jobset: dict) -> None:
    """Fails where a field is not in the schemas of JobSet and Kubernetes, or is of another type."""
    read = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(jobset)).to_dict()
    for part in ("apiVersion", "kind", "metadata"):
        assert read.pop(part) == jobset[part]
    assert read == {"spec": jobset["spec"]}
    for job in jobset["spec"]["replicatedJobs"]:
        template = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "x"},
            **job["template"],
        }
        kubernetes_validate.validate(template, "1.33", strict=True)


@pytest.mark.parametrize(("kind", "topology", "expected"), SLICES)
def test_gke_computes_hosts_and_chips(kind, topology, expected):
    jobset = rendered(f"--type={kind}", f"--topology={topology}")
    check_jobset(jobset)
    hosts, chips = expected
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (
        hosts,
        hosts,
        "Indexed",
    )
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": LABEL[kind],
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert {"name": "PROPE_PROCESSES", "value": str(hosts)} in pod["containers"][0]["env"]


def test_gke_says_what_ends_and_what_restarts():
    jobset = rendered(
        "--type=v5p",
        "--topology=2x2x2",
        "--slices=3",
        "--max_restarts=7",
        "--spot",
        "--service_account=writer",
    )
    check_jobset(jobset)
    spec = jobset["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 7
    [rule] = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    [replicated] = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    assert (replicated["replicas"], job["backoffLimit"], pod["restartPolicy"]) == (3, 0, "Never")
    [rule] = job["podFailurePolicy"]["rules"]
    container = pod["containers"][0]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [1, 2, 130],
    }
    assert pod["terminationGracePeriodSeconds"] == 600
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert {"name": "PROPE_PROCESSES", "value": "6"} in container["env"]  # 3 slices of 2 hosts
    assert container["command"][-1] == "v5p" and container["args"] == ["python", "-m", "x"]
    assert pod["serviceAccountName"] == "writer"


NASTY = [
    "a: b",
    "- c",
    '"',
    "'",
    "${name}",
    "$(HOME)",
    "# d",
    "{e: [",
    "on",
    "1",
    "",
    " ",
    "new\nline",
    "ü",
]


def test_gke_hands_every_word_on_as_it_is():
    done = launch("gke_jobset.sh", *GKE, "--type=v5e", "--topology=4x4", "--dry-run", "--", *NASTY)
    jobset = yaml.safe_load(done.stdout)
    check_jobset(jobset)
    given = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ][0]["args"]
    assert given == [
        word.replace("$(", "$$(") for word in NASTY
    ]  # which Kubernetes turns into $( again


FREE = {
    "labels",
    "annotations",
    "nodeSelector",
    "limits",
    "volumeAttributes",
}  # whose keys are the user's


def paths(node, place=()):
    """The place of every key whose name the schemas fix."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*place, key)
            if key not in FREE:
                yield from paths(value, (*place, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from paths(value, (*place, index))


def test_gke_check_finds_a_typo_in_every_field():
    jobset = rendered("--type=v5p", "--topology=4x4x4")
    places = [place for place in paths(jobset["spec"]) if isinstance(place[-1], str)]
    assert len(places) > 50
    for place in places:
        broken = copy.deepcopy(jobset)
        node = broken["spec"]
        for key in place[:-1]:
            node = node[key]
        node[f"{place[-1]}X"] = node.pop(place[-1])
        with pytest.raises((AssertionError, ValueError, kubernetes_validate.ValidationError)):
            check_jobset(broken)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--type=v4", "--topology=4x4"], "--type=v4"),
        (["--type=v5e", "--topology=4x4x4"], "--topology=4x4x4"),
        (["--type=v5e", "--topology=3x3"], "--topology=3x3"),
        (["--type=v5p", "--topology=4x4"], "--topology=4x4"),
        (["--type=v5p", "--topology=08x8x8"], "--topology=08x8x8"),
        (["--type=v5e", "--topology=2x2", "--slices=2"], "--slices=2"),
        (["--type=v5e", "--topology=4x4", "--slices=0"], "--slices=0"),
        (["--type=v5e", "--topology=4x4", "--name=A"], "--name=A"),
        (["--type=v5e", "--topology=4x4", f"--name={'a' * 41}"], "40 at most"),
        (["--type=v5e", "--topology=4x4", "--image="], "--image"),
        (["--type=v5e", "--topology=4x4", "--service_account=N"], "--service_account=N"),
        (["--type=v5e", "--topology=4x4", '--image=i"'], "--image=i"),
        (["--type=v5e", "--topology=4x4", "--slice=2"], "--slice=2"),
    ],
)
def test_gke_refuses(arguments, named, fakes, tmp_path):
    assert named in refused(launch("gke_jobset.sh", *GKE, *arguments, "--", "x", **fakes))
    assert not calls(tmp_path)


def test_gke_refuses_without_command(fakes):
    assert "no command" in refused(
        launch("gke_jobset.sh", *GKE, "--type=v5e", "--topology=4x4", **fakes)
    )


@pytest.mark.parametrize(
    ("states", "code", "verbs"),
    [
        (",", 0, ["get", "create"]),
        ("wiki-025 Completed,", 0, ["get", "delete", "create"]),
        ("wiki-025 Failed,", 0, ["get", "delete", "create"]),
        ("wiki-025 ", 2, ["get"]),
        ("lost", 1, ["get"]),
        (",wiki-025 ,lost,wiki-025 Completed", 0, ["get", "create", "get", "get", "get", "logs"]),
        (",wiki-025 Failed", 1, ["get", "create", "get"]),
        (",,", 1, ["get", "create", "get"]),
    ],
)
def test_gke_starts_and_waits(states, code, verbs, fakes, tmp_path):
    (tmp_path / "states").write_text(states)
    wait = (
        ["--wait", "--poll=1"] if len(states.split(",")) > 2 or states == ",wiki-025 Failed" else []
    )
    arguments = [*GKE, "--type=v5p", "--topology=4x4x4"]
    done = launch("gke_jobset.sh", *arguments, *wait, "--", "python", "-m", "x", **fakes)
    assert done.returncode == code, done.stderr
    assert [call[1] for call in calls(tmp_path)] == verbs
    if "create" in verbs:
        printed = launch(
            "gke_jobset.sh", *arguments, "--dry-run", "--", "python", "-m", "x", **fakes
        )
        assert (tmp_path / "created.yaml").read_text() == printed.stdout
    assert done.stdout == ('{"step": 1}\n' if "logs" in verbs else "")


def test_hadolint_finds_nothing():
    done = subprocess.run(
        [TOOLS / "hadolint", ROOT / "launch/Dockerfile"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--image="),
        (["--image=a:B/c"], "--image=a:B/c"),
        (["--image=a", "--extra=hf"], "--extra=hf"),
        (["--image=a", "--pull"], "--pull"),
    ],
)
def test_image_refuses(arguments, named, fakes, tmp_path):
    assert named in refused(launch("image.sh", *arguments, **fakes))
    assert not calls(tmp_path)


def test_image_builds_what_is_committed_and_knows_it(clone, fakes, tmp_path):
    root, head = clone
    image = f"eu.pkg.dev/p/prope:{head[:12]}"
    build = [
        "docker",
        "build",
        "--file=launch/Dockerfile",
        "--build-arg=EXTRA=tpu",
        f"--build-arg=COMMIT={head}",
        f"--tag={image}",
        "-",
    ]
    flags = ["--image=eu.pkg.dev/p/prope", "--push"]
    first, second, last = launch(
        "image.sh", *flags, "--dry-run", root=root, **fakes
    ).stdout.splitlines()
    archive, printed = first.split(" | ")
    assert shlex.split(archive) == ["git", "-C", str(root), "archive", "HEAD"]
    assert shlex.split(printed) == build and second == f"docker push {image}" and last == image
    assert launch("image.sh", *flags, root=root, **fakes).stdout == f"{image}\n"
    assert calls(tmp_path) == [build, ["docker", "push", image]]
    with tarfile.open(tmp_path / "context.tar") as context:
        assert {"launch/Dockerfile", "pyproject.toml", "prope/runtime/xla_flags.py"} <= set(
            context.getnames()
        )
    (root / "launch/new").write_text("")
    assert "--allow-changes" in refused(launch("image.sh", *flags, root=root, **fakes))
    changed = launch(
        "image.sh", "--image=a", "--extra=cpu", "--allow-changes", "--dry-run", root=root
    ).stdout
    assert f"EXTRA= --build-arg=COMMIT={head}+changes --tag=a:{head[:12]}-changes" in changed


def test_the_image_installs_with_the_pins_and_keeps_the_commit():
    text = (ROOT / "launch/Dockerfile").read_text()
    assert re.search(r"^ENV PIP_CONSTRAINT=/prope/launch/constraints.txt", text, re.MULTILINE)
    assert re.search(r"^ARG COMMIT\nENV PROPE_COMMIT=\$COMMIT$", text, re.MULTILINE)
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    assert all((ROOT / name).exists() for names in copied for name in names.split())
