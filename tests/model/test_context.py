"""Sequences split over devices (config.mesh.context).

That a step is the same on every mesh, with context parallelism too, is in test_sharded.
"""

import functools
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.commands import ROOT, logged, losses, needs_cuda, needs_libtpu
from support.models import initial_params
from support.processes import on_eight_devices, train_in_local_pod
from support.text import read_lines

from prope import sharding
from prope.inference.losses import LossEvaluation
from prope.spec.data import DataSpec
from prope.spec.model import ModelSpec
from prope.spec.run import Spec


@pytest.mark.parametrize("C", [1, 2, 4, 8])
def test_ranks_hold_every_token_once_and_as_much_causal_work(C):
    T = 1024
    positions = sharding.rank_positions(C, T)
    assert sorted(positions.ravel().tolist()) == list(range(T))
    work = (positions + 1).sum(axis=1)
    assert work.max() == work.min()
    chunks = positions // (T // (2 * C))
    for rank in range(C):  # as in Llama 3
        assert set(chunks[rank].tolist()) == {rank, 2 * C - 1 - rank}


LONGER = (
    "--config.data.seq_len=1024",
    "--config.batch_size=4",
    "--config.log_every=1",
    "--config.num_steps=12",
    "--config.eval_every=3",
    "--config.eval.max_windows=3",
    "--config.model.embed_dim=256",
)


def assert_same_evaluations(run, expected_run):
    """Compares evaluations of two runs, which may differ as sums in another order do."""
    records = read_lines(run / "eval.jsonl")
    expected_records = read_lines(expected_run / "eval.jsonl")
    for record, expected in zip(records, expected_records, strict=True):
        for name in ("step", "tokens", "documents"):
            assert record[name] == expected[name], name
        np.testing.assert_allclose(record["loss"], expected["loss"], rtol=1e-5)
        ranges = zip(record["by_position"], expected["by_position"], strict=True)
        assert len(record["by_position"]) == 8
        for range_, expected_range in ranges:
            assert range_["tokens"] == expected_range["tokens"]
            assert abs(range_["loss"] - expected_range["loss"]) < 1e-4


@pytest.mark.slow
def test_a_run_may_move_between_whole_and_split_sequences(train, tmp_path, cache_dir):
    arguments = (*LONGER, "--config.data.mask_documents=True")
    straight = tmp_path / "straight"
    run = tmp_path / "run"
    outcome = train(straight, *arguments)
    assert outcome.code == 0, outcome.stderr
    # Whole on four devices, split over four, split over two processes, whole on one device.
    outcome = train(run, *arguments, "--stop_at_step=3", devices=4)
    assert outcome.code == 0, outcome.stderr
    split = ("--config.mesh.context=4", "--stop_at_step=6")
    outcome = train(run, *arguments, *split, devices=4)
    assert outcome.code == 0, outcome.stderr
    assert "resumed from step 3" in outcome.stderr, outcome.stderr
    split = ("--config.mesh.context=2", "--stop_at_step=9")
    train_in_local_pod(run, cache_dir, 1, *arguments, *split)
    outcome = train(run, *arguments)
    assert outcome.code == 0, outcome.stderr
    assert "resumed from step 9" in outcome.stderr, outcome.stderr

    assert logged(run, "batch_hash") == logged(straight, "batch_hash")
    by_step = losses(run)
    assert list(by_step) == list(range(1, 13))
    expected = list(losses(straight).values())
    np.testing.assert_allclose(list(by_step.values()), expected, rtol=1e-5)
    assert_same_evaluations(run, straight)


def check_targets():
    """Scores windows that are split over four devices."""
    model = ModelSpec(num_layers=1, embed_dim=16, head_dim=8, hidden_dim=16)
    spec = Spec(model=model, data=DataSpec(seq_len=1024))
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 2, (4, 1024)).astype(np.float32)
    integers = {
        name: rng.integers(0, 9, (4, 1024)).astype(np.int32)
        for name in ("tokens", "targets", "positions", "segment_ids")
    }
    mesh = sharding.make_mesh(context=4)
    batch = sharding.global_batch(mesh, integers | {"weights": weights}, 4)
    evaluation = SimpleNamespace(spec=spec, windows=None)
    with sharding.use(mesh):
        params = initial_params(model)
        score = functools.partial(LossEvaluation._score, evaluation)
        scores = jax.jit(score)(params, batch)
    np.testing.assert_array_equal(scores["targets"], integers["targets"])
    np.testing.assert_array_equal(scores["weights"], weights)


def test_targets_of_split_sequences_are_returned_by_window():
    on_eight_devices(__file__, "check_targets")


COMPILE = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
from prope.spec.run import Spec
from support.compiled import array_shapes
from prope.cost import hlo, traffic
from prope.cost.topology import as_if_attached, find_devices
from prope.step import prepare, trace_step
model = {
    "num_layers": 2,
    "num_heads": 8,
    "head_dim": 128,
    "vocab_size": 25_600,
    "dtype": "bfloat16",
    "remat": "full",
}
fields = {"batch_size": 1, "mesh.context": 4, "data.seq_len": 131_072}
spec = Spec().replace(fields | {f"model.{name}": value for name, value in model.items()})
devices = find_devices(sys.argv[1], 1)
with as_if_attached(devices):
    spec, mesh, optimizer, state = prepare(spec, devices)
    text = trace_step(spec, optimizer, mesh, state).lower().compile().as_text()
module = hlo.parse(text)
shapes = sorted(array_shapes(text, in_fusions=False))
print(json.dumps([shapes, traffic.collectives(module), traffic.kernels(module)]))
"""


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("topology", "kernel", "exchange"),
    [
        pytest.param("v5e:2x2", "tpu_custom_call", None, marks=needs_libtpu),
        pytest.param("h200:4", "__cudnn$fmhaSoftmax", "all-to-all", marks=needs_cuda),
    ],
)
def test_at_131072_tokens_no_scores_logits_or_float32_keys_are_whole(topology, kernel, exchange):
    environment = {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, topology],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shapes, collectives, kernels = json.loads(done.stdout.splitlines()[-1])
    C = 4
    T = 131_072
    H = 128
    V = 25_600
    assert kernel in kernels
    if exchange:
        assert collectives[exchange]["count"] > 0
    # Keys and values in 2 layers, each computed twice with remat, two bytes an element.
    gathered = collectives["all-gather of keys and values"]
    assert gathered["bytes"] == 2 * 2 * 2 * T * H * 2
    sizes = [(dtype, math.prod(dims)) for dtype, dims in shapes]
    assert ("bf16", T * H) in sizes, "the keys of a sequence"
    largest = max(size for _, size in sizes)
    assert largest < T // C * V, "logits or scores of a rank"
    for dtype, dims in shapes:
        is_like_keys = math.prod(dims) == T * H and H in dims
        assert dtype != "f32" or not is_like_keys, dims
