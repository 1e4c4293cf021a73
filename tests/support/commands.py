"""Commands as a user runs them, and what they leave."""

import dataclasses
import importlib.util
import json
import os
import pathlib

import pytest

from prope.errors import UsageError
from support.forks import Command

ROOT = pathlib.Path(__file__).parents[2]


CONFIG = f"--config={ROOT}/configs/quickstart.py:tiny"


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'"
)


needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs JAX's CUDA plugin: pip install -e '.[plan-gpu]'",
)


def devices_flags(count: int) -> str:
    """XLA_FLAGS of a process that pretends to have this many devices."""
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    result: dict | None  # the last line of stdout
    stderr: str

    @property
    def error(self) -> str:
        """The one line that a failed command leaves; fails if there is a traceback or another."""
        assert self.code != 0 and "Traceback" not in self.stderr, self.stderr
        lines = [
            line for line in self.stderr.splitlines() if line.startswith(("error:", "stopped:"))
        ]
        assert len(lines) == 1, self.stderr
        assert self.stderr.splitlines()[-1] == lines[0], self.stderr
        return lines[0]


def finish(command: Command) -> Outcome:
    """What a command that was started ends with."""
    return outcome(*command.wait())


def outcome(code: int, stdout: str, stderr: str) -> Outcome:
    last = (stdout.splitlines() or [""])[-1]
    return Outcome(code, json.loads(last) if code == 0 and last.startswith("{") else None, stderr)


def refusal(function, *arguments, **named) -> str:
    """The one line with which a call is refused as bad input."""
    with pytest.raises(UsageError) as caught:
        function(*arguments, **named)
    line = str(caught.value)
    assert line and "\n" not in line, line
    return line


def flipped(data: bytes) -> bytes:
    """The bytes with the one in the middle changed."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]


def logged(workdir, name: str) -> dict:
    """A metric by step."""
    lines = (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record[name] for record in map(json.loads, lines)}


def losses(workdir) -> dict[int, float]:
    """The logged training loss by step."""
    return logged(workdir, "loss")
