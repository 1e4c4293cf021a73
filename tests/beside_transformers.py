"""Times a run beside the class of transformers that computes it, in turns on one device.

    python tests/beside_transformers.py WORKDIR --seq_len=1024 --rounds=5

Both have the same weights and tokens, and AdamW with clipped gradients; on a CPU float32 and as
many threads, on a GPU float32 parameters and bfloat16 matmuls. transformers runs on torch; its
model is what `export` writes. On a GPU, JAX has to leave memory to torch:
XLA_PYTHON_CLIENT_MEM_FRACTION=0.45.
"""

import argparse
import importlib.metadata
import json
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prope import model
from prope.cost.bench import medians, random_batch
from prope.hf.exporter import export
from prope.inference import generation
from prope.inference.generation import Sampling
from prope.loss import token_losses
from prope.runtime.processes import list_cores
from prope.sharding import make_mesh
from prope.spec.run import Spec
from prope.step import batch_hidden, compile_step, prepare
from prope.workdir.run import open_run

NEW_TOKENS = 64
Programs = dict[str, Callable[[], Any]]  # by what they compute; "loss" returns it


def measure(workdir: str, seq_len: int | None, sequences: int, rounds: int) -> dict:
    """Times a batch of a run: its loss, a training step, prefill, prefill and decode.

    Returns seconds of both, medians of `rounds` turns, and `ratio`, theirs over ours.
    """
    device = {"cpu": "cpu", "gpu": "cuda"}[jax.devices()[0].platform]  # torch's name
    run = open_run(workdir)
    fields = {
        "model.dtype": "float32" if device == "cpu" else "bfloat16",
        "model.attention": "auto",
        "model.global_attention": None,
        "model.remat": "none",
        "optimizer.name": "adamw",
        "batch_size": sequences,
        "accumulation": 1,
        "data.seq_len": seq_len or run.spec.data.seq_len,
        "data.position_range": None,
        "mesh.context": 1,
        "mesh.tensor": 1,
        "profile": (),
    }
    spec = run.spec.replace(fields)
    batch = random_batch(spec, make_mesh(devices=jax.devices()[:1]))
    threads = len(list_cores())
    theirs = their_programs(workdir, batch, threads, device)
    ours = our_programs(spec, run.params(), batch)
    losses = {"prope": ours["loss"](), "transformers": theirs["loss"]()}
    seconds = {}
    for name in ours:
        times = medians({"prope": ours[name], "transformers": theirs[name]}, rounds)
        seconds[name] = times | {"ratio": times["transformers"] / times["prope"]}
    return {
        "workdir": str(workdir),
        "transformers": importlib.metadata.version("transformers"),
        "torch": importlib.metadata.version("torch"),
        "device": jax.devices()[0].device_kind,
        "threads": threads,
        "dtype": spec.model.dtype,
        "sequences": sequences,
        "seq_len": spec.data.seq_len,
        "losses": losses,
        "seconds": seconds,
    }


def our_programs(spec: Spec, params: model.Params, batch: dict[str, jax.Array]) -> Programs:
    """Builds prope's programs for a batch, [B, T]."""

    @jax.jit
    def loss(params):
        hidden = batch_hidden(spec, params, batch)
        cap = spec.model.final_softcap
        return token_losses(hidden, model.head(params), batch["targets"], cap).mean()

    spec, mesh, optimizer, shapes = prepare(spec, jax.devices()[:1])
    step = compile_step(spec, optimizer, mesh, shapes)
    state = []

    def train():
        if not state:
            copied = jax.tree.map(jnp.array, params)
            state.extend([copied, optimizer.init(copied)])
        *state[:], metrics = step(*state, batch)
        jax.block_until_ready(metrics)

    B = spec.batch_size
    lengths = jnp.full(B, spec.data.seq_len, jnp.int32)
    keys = generation.row_keys(0, B)
    sampling = Sampling(NEW_TOKENS, temperature=0.0, eos=-1)

    def prefill():
        filled = generation.prefill(spec.model, sampling, params, batch["tokens"], lengths, keys)
        return jax.block_until_ready(filled)

    def prefill_and_decode():
        generated, _ = generation.decode(spec.model, sampling, params, *prefill(), lengths, keys)
        jax.block_until_ready(generated)

    return {
        "loss": lambda: float(loss(params)),
        "training step": train,
        "prefill": prefill,
        f"prefill and {NEW_TOKENS} tokens": prefill_and_decode,
    }


def their_programs(
    workdir: str, batch: dict[str, jax.Array], threads: int, device: str
) -> Programs:
    """Builds transformers' programs for a batch, [B, T], with a run's weights."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        exported = f"{folder}/model"
        export(workdir, exported)
        hf_model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    hf_model.to(device)
    inputs, targets = (
        torch.tensor(np.asarray(batch[name]), device=device).long()
        for name in ("tokens", "targets")
    )
    adamw = torch.optim.AdamW(hf_model.parameters(), lr=1e-6)
    mixed = torch.autocast(device, torch.bfloat16, enabled=device != "cpu")

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    @mixed
    def loss():
        logits = hf_model(inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def train():
        adamw.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(hf_model.parameters(), 1.0)
        adamw.step()
        wait()

    @mixed
    def generate(count):
        options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False}
        hf_model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
        wait()

    return {
        "loss": lambda: float(torch.no_grad()(loss)()),
        "training step": train,
        "prefill": lambda: generate(1),
        f"prefill and {NEW_TOKENS} tokens": lambda: generate(NEW_TOKENS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workdir", help="directory of the run")
    parser.add_argument("--seq_len", type=int, help="tokens of a sequence; by default the run's")
    parser.add_argument("--sequences", type=int, default=1, help="of the batch")
    parser.add_argument("--rounds", type=int, default=10, help="timed turns of each program")
    print(json.dumps(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
