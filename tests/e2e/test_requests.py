"""Requests to a bucket: how many a process of a run makes, and that other processes add none.

python -m pytest -m "" -s tests/e2e/test_requests.py    # prints the table of launch/README.md
"""

import collections

import pytest
from support.commands import CONFIG, finish
from support.processes import WIDE, pod_environments

pytestmark = pytest.mark.slow

FLAGS = (*WIDE, "--config.num_steps=7", "--config.checkpoint_every=2", "--config.eval_every=5")
# Says in the server's log who asks, and what for; waits for what is saved in the background.
PATCH = """
import os
from gcsfs import core
from prope.inference.losses import LossEvaluation
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.metrics import MetricWriter

process = os.environ["PROPE_PROCESSES"].partition("/")[0]
headers = core.GCSFileSystem._get_headers
core.GCSFileSystem._get_headers = lambda *given, **more: (
    headers(*given, **more) | {"authorization": process}
)

def say(phase):
    with open(LOG, "a") as log:
        log.write(f"{process} PHASE {phase}\\n")

def save(self, *arguments):
    say("checkpoint" if self._steps else "first_checkpoint")
    saved(self, *arguments)
    self._manager.wait_until_finished()
    say("steps")

def evaluate(*arguments):
    say("evaluation")
    return evaluated(*arguments)

def write(*arguments):
    written(*arguments)
    say("steps")

saved, Checkpoints.save = Checkpoints.save, save
evaluated, LossEvaluation.evaluate = LossEvaluation.evaluate, evaluate
written, MetricWriter.evaluation = MetricWriter.evaluation, write
"""
KINDS = ("list", "get", "put", "delete")
# Phases of the run, and how often each is there.
PHASES = {"start": 1, "first_checkpoint": 1, "checkpoint": 3, "evaluation": 2}
INDEX = 6  # requests, at most, of each kind for a process's index, of parameters and optimizer


def kind_of(method: str, path: str) -> str:
    """What a request to Cloud Storage's JSON interface does."""
    is_list = path.partition("?")[0].endswith("/o")
    reads = "list" if is_list else "get"
    return {"POST": "put", "PUT": "put", "PATCH": "put", "DELETE": "delete"}.get(method, reads)


def count(lines: list[str]) -> dict[int, dict[str, list[int]]]:
    """Requests by process, phase and kind; those of the lease, which go by the clock, left out."""
    counts = collections.Counter()
    phases = {}
    for line in lines:
        client, method, path = line.rsplit(" ", 2)
        process = client.removeprefix("Bearer ")  # TensorStore's
        if method == "PHASE":
            phases[process] = path
        elif "lease.json" not in path:
            counts[process, phases.get(process, "start"), kind_of(method, path)] += 1
    return {
        int(process): {phase: [counts[process, phase, kind] for kind in KINDS] for phase in PHASES}
        for process in phases
    }


@pytest.fixture
def count_requests(bucket, storage, start_command):
    """Counts those of a run of so many processes."""

    def run(processes: int) -> dict[int, dict[str, list[int]]]:
        patch = f"LOG = {str(storage.log)!r}\n{PATCH}"
        storage.requests()
        started = []
        for number, pod in enumerate(pod_environments(processes)):
            words = (CONFIG, f"--workdir={bucket}/{processes}", *FLAGS)
            token = {"GOOGLE_AUTH_TOKEN_FOR_TESTING": str(number)}
            started.append(start_command("prope.train", *words, patch=patch, **pod, **token))
        for outcome in [finish(command) for command in started]:
            assert outcome.code == 0, outcome.stderr
        return count(storage.requests())

    return run


def test_requests_of_a_process_do_not_grow_with_the_processes(count_requests):
    """But for the first one's of a save, by which it joins each process's index of arrays."""
    counts = {processes: count_requests(processes) for processes in (1, 2, 4)}
    print(f"\nphase (of which there were)  processes  process  {'  '.join(KINDS)}")
    for phase, times in PHASES.items():
        for processes, by_process in counts.items():
            for process in range(min(processes, 2)):
                print(f"{phase} ({times})", processes, process, *by_process[process][phase])
    for phase, times in PHASES.items():
        puts = counts[1][0][phase][KINDS.index("put")]
        assert puts >= times, f"{phase}: requests were not counted"
        two, four = (counts[processes] for processes in (2, 4))
        for process in (1, 2, 3):
            other = zip(four[process][phase], two[1][phase], strict=True)
            # Which process writes a part that several hold, and in which phase it ends, is chance.
            assert all(now <= before + times + 1 for now, before in other), (phase, process)
        growth = [now - before for now, before in zip(four[0][phase], two[0][phase], strict=True)]
        indices = 2 * times * INDEX if "checkpoint" in phase else 0
        allowed = [times + 1 + more for more in (0, indices, 0, indices)]
        assert all(more <= most for more, most in zip(growth, allowed, strict=True)), phase
