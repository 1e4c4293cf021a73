"""Compares what was exported with the run, in the engine that will compute it."""

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
from prope.spec.model import ModelSpec
from prope.spec.run import Spec
from prope.workdir.run import Run

# By engine: the package that has it, and what installs it.
PACKAGES = {
    "llama.cpp": ("xllamacpp", "pip install -e '.[engines]'"),
    "mlx": ("mlx-lm", "pip install -e '.[engines]'"),
    "transformers": ("transformers", "source launch/setup.sh hf"),
    "vllm": ("vllm", "pip install vllm, in another environment that has prope, too"),
}
# How far log-probabilities may be from the run's, by the dtype of the tensors. With q8_0, llama.cpp
# rounds activations to 8 bits, too.
BOUNDS = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 5e-2, "q8_0": 0.3}
_LENGTHS = (16, 40, 100, 200, 400)  # of the prompts, in tokens, at most
_TIMEOUT = 3600  # seconds


def local_texts(data: DataSpec) -> Iterator[Iterator[bytes]]:
    """Yields the texts of each of a run's sources that is here; then Python's documentation."""
    for _, source in (*data.weighted_sources(), (1, DataSpec())):
        with contextlib.suppress(RunFailed, UsageError):  # not here any more, or generated
            is_far = is_url(source.data_dir) or source.store  # a store needs no text
            chunks = () if is_far else find_source(source).chunks
            yield (document.text for chunk in chunks for document in chunk.read())


def is_there(engine: str | None) -> bool:
    """Returns whether an engine is named and installed."""
    package, _ = PACKAGES.get(engine, ("", ""))
    needed = ("torch", package) if engine == "transformers" else (package,)
    return all(name and importlib.util.find_spec(name.replace("-", "_")) for name in needed)


def check(
    engine: str | None, run: Run, spec: Spec, tokenizer: Tokenizer, export, bound: float
) -> str | None:
    """Compares log-probabilities after five texts of a run, and their ids; returns what was found.

    `spec` is what was exported. A folder of the byte tokenizer has none, so no ids to compare.

    Raises RunFailed where one differs by more than `bound`, or an id does.
    """
    if engine is None:
        return None
    package, install = PACKAGES[engine]
    if not is_there(engine):
        log.warning("not checked in %s, which is not installed: %s", engine, install)
        return f"not checked there: {install}"
    texts = []
    sources = itertools.chain.from_iterable(local_texts(spec.data))
    for length, text in zip(_LENGTHS, sources, strict=False):
        ids = tokenizer.encode(text[: 8 * length].decode(errors="ignore").encode())
        texts.append(tokenizer.decode(ids[: min(length, spec.data.seq_len - 3)]))
    ids = [tokenizer.encode(text.encode()).tolist() for text in texts]
    prompts = [[tokenizer.special.start, *tokens] for tokens in ids]
    if engine != "llama.cpp" and spec.data.tokenizer == "byte":
        texts = ids = []
    answers = ask(engine, export, prompts, texts)
    expected = _log_probabilities(run, spec.model, prompts)
    rows = zip(expected, answers["tokens"], answers["scores"], strict=True)
    # The mean over the tokens, as the run expects them.
    found = max(np.exp(ours[t]) @ np.abs(ours[t] - scores) for ours, t, scores in rows)
    place = f"{engine} ({package} {importlib.metadata.version(package)})"
    if answers["ids"] != ids:
        text = next(t for t, a, b in zip(texts, ids, answers["ids"], strict=True) if a != b)
        remedy = "nothing was written: leave out --check, and read the tokenizer otherwise"
        raise RunFailed(f"{place}: it gives other ids for {text[:60]!r}; {remedy}")
    if not found <= bound:
        problem = f"log-probabilities differ from the run's by {found:.2g}, more than {bound:g}"
        raise RunFailed(f"{place}: {problem}; nothing was written: use another engine")
    log.info("%s: log-probabilities are the run's, but for %.1e on average", place, found)
    return f"{place}: {found:.1e}"


def _log_probabilities(run: Run, model: ModelSpec, prompts: list[list[int]]) -> np.ndarray:
    """Computes log-probabilities of the token after each prompt, in float32: [B, V]."""
    spec = for_this_machine(model, "float32")
    paths = parameters.parameters(spec)
    params = parameters.nest({path: run.checkpoint.read(tuple(path.split("/"))) for path in paths})
    lengths = np.array(list(map(len, prompts)))
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def compute(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = decoder.hidden_states(spec, params, tokens, positions)
        last = hidden[np.arange(len(prompts)), lengths - 1]
        return jax.nn.log_softmax(decoder.logits(spec, params, last), axis=-1)

    return np.asarray(compute(params, jnp.asarray(tokens)))


def ask(engine: str, export, prompts: list[list[int]], texts: list[str]) -> dict[str, list]:
    """Asks an engine, in a process of its own: the likeliest tokens after prompts; ids of texts."""
    with tempfile.TemporaryDirectory() as folder:
        questions = pathlib.Path(folder, "questions.json")
        answers = pathlib.Path(folder, "answers.json")
        questions.write_text(json.dumps({"prompts": prompts, "texts": texts}))
        # Beside this program, files are named as libraries: with -P Python does not take them.
        program = pathlib.Path(__file__).with_name("engine_process.py")
        command = [sys.executable, "-P", program, engine, export, questions, answers]
        with watchdog.paused():
            done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT, check=False)
        if done.returncode or not answers.is_file():
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            tells = (line for line in lines if "ASSERT" in line or "rror" in line)
            problem = f"ended with {done.returncode}: {next(tells, 'no message')}"
            raise RunFailed(f"{engine} {problem}; nothing was written: use another engine")
        return json.loads(answers.read_text())
