"""Sequences that are split over devices (config.mesh.context), and attention to long ones by pairs of blocks.

That a step is the same on every mesh, with parts too, is in test_sharded.
"""

import json
import math
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import CONFIG, ROOT, logged, losses, needs_cuda, needs_libtpu
from makers import assert_attention_close as assert_close
from makers import attention_with_gradients as with_gradients
from makers import cotangent_of
from makers import draw_attention as draw
from makers import draw_segments as documents
from oracles import attention as reference
from oracles import causal_mask as causal

from prope import attention, sharding
from prope.config import default_config
from prope.cost.flops import busiest_part
from prope.errors import UsageError
from prope.kernels import pairs
from prope.kernels.choice import choose_implementation
from prope.runtime.validate import validate, validate_devices


@pytest.mark.parametrize("C", [1, 2, 4, 8])
def test_parts_hold_every_token_once_and_as_much_causal_work(C):
    positions = sharding.rank_positions(C, 1024)
    assert sorted(positions.ravel().tolist()) == list(range(1024))
    work = (positions + 1).sum(axis=1)
    assert work.max() == work.min()
    for part, own in enumerate(positions):  # as in Llama 3: chunks i and 2C-1-i
        chunks = {index // (512 // C) for index in own.tolist()}
        assert C == 1 or chunks == {part, 2 * C - 1 - part}


@pytest.mark.parametrize("C", [1, 4])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 700])
def test_pairs_are_those_in_which_a_query_sees_a_key(C, window):
    T = 1024
    positions = sharding.rank_positions(C, T)
    block, listed = pairs.list_pairs(positions, window)
    seen, least = causal(T, window=window)[0], []
    for own, of_part in zip(positions, listed, strict=True):
        by_block = seen[own].reshape(len(own) // block, block, T // block, block).any(axis=(1, 3))
        real = [tuple(pair) for pair in of_part.tolist() if pair[1] < T // block]
        assert real == list(zip(*map(list, by_block.nonzero()), strict=True))
        least.append(len(real))
    assert max(least) == listed.shape[1] and (window or max(least) == min(least))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("most", [0, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "window"), [(384, 4, 1, None), (384, 4, 4, 100), (577, 6, 2, 300)]
)
def test_loops_over_pairs_and_their_gradients_equal_the_formula(
    T, heads, kv_heads, window, masked, most, monkeypatch
):
    monkeypatch.setattr(pairs, "_MOST_UNROLLED", most)
    q, k, v = draw(T, T, heads, kv_heads, H=8)
    segments = documents(len(q), T) if masked else None
    expected = reference(q, k, v, causal(T, segments, window), cotangent_of(q))
    with_gradients.clear_cache()
    assert_close(with_gradients(q, k, v, cotangent_of(q), segments, window=window), expected, 5e-6)


def test_memory_of_attention_grows_as_the_length():
    temporary = {}
    for T in (16_384, 32_768):
        shapes = [jax.ShapeDtypeStruct((1, T, heads, 64), np.float32) for heads in (4, 1, 1)]
        gradient = jax.grad(
            lambda q, k, v: attention.attention(q, k, v, implementation="xla").sum(), (0, 1, 2)
        )
        temporary[T] = (
            jax.jit(gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        )
    assert temporary[32_768] < 2.1 * temporary[16_384] < 2.1 * 2**20 * 100


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mesh.context": 0}, "mesh.context=0: must be at least 1"),
        (
            {"mesh.context": 2, "data.seq_len": 768},
            "data.seq_len=768: must be a multiple of 2 x 128 x mesh.con",
        ),
        (
            {"mesh.context": 3, "data.seq_len": 1024},
            "data.seq_len=1024: must be a multiple of 2 x 128 x mesh.con",
        ),
        ({"mesh.context": 4, "data.seq_len": 1024}, None),
    ],
)
def test_a_sequence_must_divide_into_chunks_of_blocks(fields, says):
    config = default_config()
    config.update_from_flattened_dict(fields)
    if says is None:
        return validate(config)
    with pytest.raises(UsageError, match=f"^config.{says}") as refused:
        validate(config)
    assert len(str(refused.value).splitlines()) == 1
    return None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mesh.context": 3}, "mesh.context=3: must divide the number of devices, 8"),
        (
            {"mesh.context": 8, "mesh.tensor": 2},
            "mesh.context=8: must divide the number of devices, 8 over mesh.tensor=2",
        ),
        (
            {"mesh.context": 2, "mesh.tensor": 2, "mesh.data": 4},
            "mesh.data=4: must divide the number of devices, 8 over mesh.tensor=2 and mesh.context=2",
        ),
        (
            {"mesh.context": 4, "batch_size": 3},
            "batch_size=3: must be a multiple of 2 (accumulation=1 x 2 groups of",
        ),
        ({"mesh.context": 8, "batch_size": 1}, None),
    ],
)
def test_context_tensor_and_data_must_be_the_devices(fields, says):
    config = default_config()
    config.update_from_flattened_dict(fields)
    devices = [type("Device", (), {"platform": "cpu"})] * 8
    if says is None:
        return validate_devices(config, devices)
    with pytest.raises(UsageError) as refused:
        validate_devices(config, devices)
    assert str(refused.value).startswith(f"config.{says}")
    return None


def test_cudnn_splits_heads_and_says_where_it_cannot():
    gpu = type("Device", (), {"platform": "gpu", "compute_capability": "9.0"})
    arguments = gpu, 1024, 128, "bfloat16", False
    assert choose_implementation("auto", *arguments, True)[0] == "cudnn"
    name, reason = choose_implementation("auto", *arguments, False)
    assert name == "xla" and "mesh.context must divide a device's heads" in reason
    with pytest.raises(ValueError, match="cudnn cannot be used: mesh.context must divide"):
        choose_implementation("cudnn", *arguments, False)


def test_the_busiest_part_has_its_share_of_the_work():
    model = default_config().model
    assert busiest_part(model, 131_072, 8) == pytest.approx(1, abs=1e-9)
    model.update(layer_types=("sliding_attention", "full_attention"), sliding_window=4096)
    assert 1 < busiest_part(model, 131_072, 8) < 1.02


LONGER = (
    "--config.data.seq_len=1024",
    "--config.batch_size=4",
    "--config.log_every=1",
    "--config.num_steps=12",
    "--config.eval_every=3",
    "--config.eval.max_windows=3",
    "--config.model.embed_dim=256",
)
MASKED = "--config.data.mask_documents=True"


def records(workdir):
    return [json.loads(line) for line in (workdir / "eval.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_a_run_that_moves_from_whole_sequences_to_parts_and_back(
    train, tmp_path, cache_dir, masked
):
    arguments = (*LONGER, MASKED) if masked else LONGER
    straight = train(tmp_path / "straight", *arguments)
    assert straight.code == 0, straight.stderr
    run = tmp_path / "run"
    first = train(run, *arguments, "--stop_at_step=3", devices=4)
    assert first.code == 0, first.stderr
    parts = train(run, *arguments, "--config.mesh.context=4", "--stop_at_step=6", devices=4)
    assert parts.code == 0 and "resumed from step 3" in parts.stderr, parts.stderr
    command = [
        "--",
        sys.executable,
        "-m",
        "prope.train",
        CONFIG,
        f"--workdir={run}",
        *arguments,
        "--stop_at_step=9",
    ]
    pod = [
        "bash",
        ROOT / "launch" / "local_pod.sh",
        "--processes=2",
        "--devices=1",
        *command,
        "--config.mesh.context=2",
    ]
    done = subprocess.run(
        pod,
        env=os.environ | {"PROPE_CACHE": str(cache_dir)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    last = train(run, *arguments)
    assert last.code == 0 and "resumed from step 9" in last.stderr, last.stderr
    assert logged(run, "batch_hash") == logged(tmp_path / "straight", "batch_hash")
    ours, theirs = losses(run), losses(tmp_path / "straight")
    assert list(ours) == list(range(1, 13))
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)
    for mine, other in zip(records(run), records(tmp_path / "straight"), strict=True):
        assert mine["step"] == other["step"] and len(mine["by_position"]) == 8
        assert mine["tokens"] == other["tokens"] and mine["documents"] == other["documents"]
        np.testing.assert_allclose(mine["loss"], other["loss"], rtol=1e-5)
        pairs_of = zip(mine["by_position"], other["by_position"], strict=True)
        assert all(
            a["tokens"] == b["tokens"] and abs(a["loss"] - b["loss"]) < 1e-4 for a, b in pairs_of
        )


COMPILE = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
from prope.config import default_config
from compiled import array_shapes
from prope.cost import hlo, traffic
from prope.cost.topology import find_devices
from prope.step import prepare, trace_step
config = default_config()
config.model.update(num_layers=2, num_heads=8, head_dim=128, vocab_size=25600, dtype="bfloat16", remat="full")
config.batch_size, config.mesh.context, config.data.seq_len = 1, 4, 131_072
config, mesh, optimizer, state = prepare(config, find_devices(sys.argv[1], 1))
text = trace_step(config, optimizer, mesh, state).lower().compile().as_text()
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
    environment = os.environ | {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    command = [sys.executable, "-c", COMPILE, topology]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shapes, collectives, kernels = json.loads(done.stdout.splitlines()[-1])
    T, H, V, C = 131_072, 128, 25_600, 4
    assert kernel in kernels and (exchange is None or collectives[exchange]["count"] > 0)
    gathered = collectives[
        "all-gather of keys and values"
    ]  # in 2 layers, each computed twice with remat
    assert gathered["bytes"] == 2 * 2 * 2 * T * H * 2
    assert ["bf16", T * H] in [[dtype, math.prod(dims)] for dtype, dims in shapes], (
        "keys of a sequence"
    )
    assert max(math.prod(dims) for _, dims in shapes) < T // C * V, "logits or scores of a part"
    assert [
        dims for dtype, dims in shapes if dtype == "f32" and math.prod(dims) == T * H and H in dims
    ] == []
