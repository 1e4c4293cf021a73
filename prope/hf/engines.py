"""Compares what is exported with the run, in the engine that will compute it."""

import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from prope import model as decoder
from prope import parameters
from prope.data.sources.find import find_source
from prope.data.tokenizer import Tokenizer
from prope.errors import RunFailed, UsageError, log
from prope.inference.opening import for_this_machine
from prope.runtime import watchdog
from prope.runtime.files import is_url
from prope.spec.data import DataSpec
from prope.workdir.run import Run

# By engine: the package that has it, and what installs it.
PACKAGES = {
    "llama.cpp": ("xllamacpp", "pip install xllamacpp"),
    "mlx": ("mlx_lm", "pip install mlx-lm 'mlx[cpu]'"),
    "transformers": ("transformers", "pip install -e '.[hf]'"),
}
_TIMEOUT = 3600  # seconds
_LENGTHS = (16, 40, 100, 200, 400)  # tokens of the prompts, at most


def local_texts(data: DataSpec) -> Iterator[Iterator[bytes]]:
    """Yields the texts of a run's sources, if they are on this machine, then Python's documents."""
    for _, source in (*data.weighted_sources(), (1, DataSpec())):
        with contextlib.suppress(RunFailed, UsageError):  # not here any more, or generated
            is_far = is_url(source.data_dir) or source.store  # a store needs no text
            chunks = () if is_far else find_source(source).chunks
            yield (document.text for chunk in chunks for document in chunk.read())


def check(engine: str | None, run: Run, export: pathlib.Path, bound: float, tokenizer) -> str:
    """Compares log-probabilities after five texts of the run; returns what was found.

    Raises RunFailed where one differs by more than `bound`, or the engine gives other ids.
    """
    if engine is None:
        return "not asked for"
    package, install = PACKAGES[engine]
    if importlib.util.find_spec(package) is None:
        log.warning("not checked in %s, which is not installed: %s", engine, install)
        return f"not checked there: {install}"
    texts, prompts = _prompts(run, tokenizer)
    expected = _log_probabilities(run, prompts)
    answers = ask(engine, export, prompts, texts)
    differences = []
    for ours, tokens, theirs in zip(expected, answers["tokens"], answers["scores"], strict=True):
        differences.append(np.abs(ours[tokens] - theirs).max())
    found = max(differences)
    version = importlib.metadata.version(package.replace("_", "-"))
    place = f"{engine} ({package} {version})"
    problem = None
    if not found <= bound:
        problem = f"log-probabilities differ from the run's by {found:.2g}, more than {bound:g}"
    for text, prompt, ids in zip(texts, prompts, answers["ids"], strict=True):
        if ids != prompt[1:]:
            problem = f"it gives other ids for {text[:60]!r}"
    if problem:
        raise RunFailed(f"{place}: {problem}; nothing was written: use another engine")
    log.info("%s computes the same: log-probabilities differ by %.1e at most", place, found)
    return f"{place}: {found:.1e}"


def _prompts(run: Run, tokenizer: Tokenizer) -> tuple[list[str], list[list[int]]]:
    """Returns five texts of a run and their tokens, of different lengths."""
    sources = itertools.chain.from_iterable(local_texts(run.spec.data))
    texts, prompts = [], []
    for length, text in zip(_LENGTHS, sources, strict=False):
        text = text[: 4 * length].decode(errors="ignore")
        ids = tokenizer.encode(text.encode())[: min(length, run.spec.data.seq_len - 2) - 1]
        texts.append(tokenizer.decode(ids))
        prompts.append([tokenizer.special.start, *tokenizer.encode(texts[-1].encode()).tolist()])
    return texts, prompts


def _log_probabilities(run: Run, prompts: list[list[int]]) -> np.ndarray:
    """Computes log-probabilities of the token after each prompt, in float32: [B, V]."""
    spec = for_this_machine(run.spec.model, "float32")
    paths = parameters.parameters(spec)
    params = parameters.nest({path: run.checkpoint.read(tuple(path.split("/"))) for path in paths})
    T = max(map(len, prompts))
    tokens = np.array([[*ids, *[0] * (T - len(ids))] for ids in prompts], np.int32)

    @jax.jit
    def compute(params):
        hidden = decoder.hidden_states(spec, params, tokens, jnp.arange(T)[None])
        last = jnp.stack([row[len(ids) - 1] for row, ids in zip(hidden, prompts, strict=True)])
        return jax.nn.log_softmax(decoder.logits(spec, params, last), axis=-1)

    return np.asarray(compute(params))


def ask(engine: str, export: pathlib.Path, prompts: list, texts: list[str]) -> dict[str, list]:
    """Returns what an engine answers: the likeliest tokens after prompts, their scores; ids."""
    with tempfile.TemporaryDirectory() as folder:
        questions = pathlib.Path(folder) / "questions.json"
        answers = pathlib.Path(folder) / "answers.json"
        questions.write_text(json.dumps({"prompts": prompts, "texts": texts}))
        # Beside this file, others are named as libraries: -P keeps Python from taking them.
        program = pathlib.Path(__file__).with_name("engine_process.py")
        command = [sys.executable, "-P", program, engine, export, questions, answers]
        with watchdog.paused():
            done = subprocess.run(
                list(map(str, command)), capture_output=True, text=True, timeout=_TIMEOUT
            )
        if done.returncode or not answers.is_file():
            last = (done.stderr.strip() or "it wrote nothing").splitlines()[-1]
            raise RunFailed(f"{engine} ended with {done.returncode}: {last}; use another engine")
        return json.loads(answers.read_text())
