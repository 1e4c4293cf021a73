# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # p-RoPE in ten minutes
#
# RoPE rotates every pair of lanes of a query or a key; **p-RoPE leaves the slow pairs
# unrotated**. This notebook shows the function, what it rotates, and a decoder trained with and
# without the slow pairs, on a CPU and without a download. In Colab, write the repository's
# address into the first cell: it installs prope there.

# %%
import importlib.util
import os
import subprocess
import sys

REPOSITORY = "URL-OF-THIS-REPOSITORY"

if importlib.util.find_spec("prope") is None:
    subprocess.run(["git", "clone", "--depth=1", REPOSITORY, "prope-clone"], check=True)
    os.chdir("prope-clone")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "."], check=True)
    sys.path.insert(0, os.getcwd())

# %% [markdown]
# ## The function
#
# `apply_p_rope` takes queries or keys [B, T, N, H] and their positions [B, T]. With p = 0.25 and
# heads of 16 lanes, 2 of 8 pairs rotate: lanes 0 and 1, each with the lane 8 further on. All
# other lanes stay what they were.

# %%
import jax.numpy as jnp
import numpy as np

from prope import apply_p_rope

rng = np.random.default_rng(0)
queries, keys = jnp.asarray(rng.standard_normal((2, 1, 64, 1, 16)), jnp.float32)
positions = jnp.arange(64)[None]
rotated = apply_p_rope(queries, positions, head_dim=16, rope_percentage=0.25)
lanes = np.flatnonzero(np.any(np.asarray(rotated != queries), axis=(0, 1, 2)))
print("lanes that rotate:", lanes.tolist())


# %% [markdown]
# A score depends on the distance of query and key alone: 1000 tokens later all scores are the
# same.


# %%
def scores(first: int) -> np.ndarray:
    """The scores [T, S] of all queries and keys, where the first token has this position."""
    q, k = (
        apply_p_rope(heads, first + positions, head_dim=16, rope_percentage=0.25)
        for heads in (queries, keys)
    )
    return np.asarray(jnp.einsum("btnh,bsnh->ts", q, k))


print("largest change of a score:", np.abs(scores(1000) - scores(0)).max().round(5))

# %% [markdown]
# ## What rotates
#
# The angle of every pair as the text goes on. The fast pairs, on the left, turn many times and
# tell distances apart. The slow ones hardly move in 128 tokens; at long range they blur what they
# carry, so p-RoPE stops them.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt

from prope.rope import frequencies

percentages = (1.0, 0.5, 0.25)
plt.rcParams["figure.dpi"] = 72
figure, panels = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
for axes, p in zip(panels, percentages, strict=True):
    angles = np.arange(128)[:, None] * frequencies(32, rope_percentage=p)
    colours = {"cmap": "RdBu", "vmin": -1, "vmax": 1}
    image = axes.imshow(np.cos(angles), aspect="auto", interpolation="nearest", **colours)
    axes.set_title(f"p = {p:g}")
    axes.set_xlabel("pair")
panels[0].set_ylabel("position")
figure.colorbar(image, label="cosine of the angle")
plt.show()

# %% [markdown]
# ## A tiny run
#
# Two layers read Python's own documentation, byte by byte. `configs/quickstart.py` is the config,
# `:tiny` its form for seconds. Every command of prope ends with one JSON object, which `run`
# returns.

# %%
import json
import pathlib
import tempfile

import prope

clone = pathlib.Path(prope.__file__).parents[1]
runs = pathlib.Path(tempfile.mkdtemp())


def run(command: str, *flags: str) -> dict:
    """Runs a command of prope; returns its result."""
    words = [sys.executable, "-m", f"prope.{command}", *flags]
    done = subprocess.run(words, cwd=clone, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def train(name: str, p: float) -> dict:
    """Trains a decoder with this p for 100 steps."""
    steps = ["--config.num_steps=100", "--config.log_every=10", "--config.eval_every=100"]
    return run(
        "train",
        "--config=configs/quickstart.py:tiny",
        f"--workdir={runs / name}",
        f"--config.model.rope_percentage={p}",
        "--config.checkpoint_every=100",
        *steps,
    )


rope = train("rope", p=1)
print(f"RoPE: {rope['eval_loss']:.3f} nats per byte on held-out text, after {rope['step']} steps")

# %% [markdown]
# ## The same with p = 0.25
#
# Initial weights and batches are equal, so the two runs differ in their rotation alone.

# %%
slow = train("p_rope", p=0.25)
print(f"p = 0.25: {slow['eval_loss']:.3f} nats per byte")
print("same initial weights:", slow["init_hash"] == rope["init_hash"])

# %%
figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
for name, label in (("rope", "RoPE"), ("p_rope", "p = 0.25")):
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], label=label)
axes.set_xlabel("step")
axes.set_ylabel("training loss, nats per byte")
axes.legend()
plt.show()

# %% [markdown]
# Both at the length that they were trained on, 64 bytes, and at four times that. Runs this small
# and short decide nothing: `configs/results` has runs with several seeds, and intervals.

# %%
run("evaluate", f"--workdir={runs}", "--seq_len=4x", "--max_windows=16")
for name in ("rope", "p_rope"):
    lines = (runs / name / "eval.jsonl").read_text().splitlines()
    losses = {r["seq_len"]: r["loss"] for r in map(json.loads, lines)}
    print(f"{name:7}", {T: round(loss, 3) for T, loss in losses.items()})

# %% [markdown]
# ## A real checkpoint
#
# `PROPE_MODEL` names a folder with a checkpoint of Hugging Face, or a model on its Hub, such as
# `HuggingFaceTB/SmolLM2-135M-Instruct` (with `pip install huggingface-hub`). Where it names none,
# nothing happens here.

# %%
MODEL = os.environ.get("PROPE_MODEL", "")

if MODEL:
    real = runs / "real"
    run("import_hf", f"--input={MODEL}", f"--workdir={real}")
    text = run(
        "sample", f"--workdir={real}", "--prompt=The capital of France is", "--temperature=0"
    )
    print(text["prompt"] + text["text"][:60])

# %% [markdown]
# Its loss on the same documentation, and with the slow half of its pairs stopped, without any
# training:

# %%
if MODEL:
    pairs = json.loads((real / "config.json").read_text())["model"]["head_dim"] // 2
    run(
        "evaluate",
        f"--workdir={real}",
        "--dataset=python_docs",
        "--seq_len=256",
        "--max_windows=4",
        f"--intervene=stop:{pairs // 2}-{pairs - 1}",
    )
    for line in (real / "eval.jsonl").read_text().splitlines():
        record = json.loads(line)
        print(f"{record.get('encoding', 'as it is'):12} {record['loss']:.3f} nats per token")

# %% [markdown]
# ## Where next
#
# `README.md` has the commands for a first run and a sweep, `prope/README.md` p-RoPE in your own
# model and in PyTorch.
