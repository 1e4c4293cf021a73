"""The analysis on meshes of several devices, which a process of its own pretends to have, against one device."""

import json
import tempfile
import types

import jax
import numpy as np
import pytest
from etils import epath
from makers import analysis_options as asked
from makers import compare_analyses as difference
from makers import make_run, make_walk, on_eight_devices

from prope import sharding
from prope.analysis import analysis, walk

B, T = 5, 24


def over_meshes(kv_heads, *shapes):
    """Analyses a run on meshes (data, fsdp, tensor) of these shapes, with one sequence at a time on each device."""
    sharding._MIN_SHARD_SIZE, make_mesh = 1, sharding.make_mesh
    ids = np.random.default_rng(0).integers(3, 40, (B, T)).astype(np.int32)
    names = [[f"t{t}" for t in row] for row in ids]
    analysis.read_sequences = lambda run, options: (ids, names, {"source": "drawn", "split": None})
    whole = types.SimpleNamespace(
        dumps=json.dumps, loads=lambda text, parse_float: json.loads(text)
    )
    analysis.json = whole  # not rounded
    walks, original, found = [], walk.Walk, []
    analysis.Walk = lambda *arguments: walks.append(original(*arguments)) or walks[-1]
    with tempfile.TemporaryDirectory() as folder:
        make_run(run := epath.Path(folder) / "run", 0.75, num_layers=3, num_kv_heads=kv_heads)
        for shape in ((1, 1, 1), *shapes):
            mesh = make_mesh(shape[0], shape[2], jax.devices()[: np.prod(shape)])
            sharding.make_mesh = lambda mesh=mesh: mesh
            walk._TOKENS, walk._KEPT = (8192, 0) if mesh.size == 1 else (T, 2**30)
            found.append(analysis.analyse(run, asked(channels=3, head_of="t5", layers="0,2")))
            batches = 1 if mesh.size == 1 else -(-B // (shape[0] * shape[1]))
            assert len(walks[-1].enter()) == batches
            linear = walks[-1]._params("layers", 1)["mlp"]["linear"]
            assert linear.addressable_shards[0].data.size * shape[1] * shape[2] == linear.size, (
                "not sharded"
            )
    assert found[0]["sequences"] == B and found[0]["heads"][0]["head_of"] is not None
    assert len(found[0]["channels"]) == 3 and any(
        channel["stopped"] for channel in found[0]["channels"]
    )
    for shape, other in zip(shapes, found[1:], strict=True):
        print(kv_heads, shape, difference(found[0], other))


def on_four_devices():
    over_meshes(2, (1, 2, 2))


def on_other_meshes():
    over_meshes(1, (2, 2, 1), (1, 8, 1), (2, 2, 2))


@pytest.mark.slow
def test_four_devices_find_what_one_does():
    on_eight_devices("test_analyze_sharded", "on_four_devices")


@pytest.mark.slow
def test_other_meshes_find_the_same():
    on_eight_devices("test_analyze_sharded", "on_other_meshes")


def test_one_layer_and_one_batch_are_on_the_devices_at_a_time(tmp_path, monkeypatch):
    make_run(tmp_path / "run", 0.75, num_layers=3, hidden_dim=104, vocab_size=308)
    monkeypatch.setattr(walk, "_KEPT", 0)
    monkeypatch.setattr(walk, "_TOKENS", 2 * T)
    made = make_walk(tmp_path / "run", B, T)

    def watch(name, function):
        def watched(*arguments, **options):
            live = [array.shape for array in jax.live_arrays()]
            params = live.count((2, 48, 104)) + live.count((308, 48))
            found.append((name, params, sum(shape[1:] == (T, 4, 64) for shape in live)))
            return function(*arguments, **options)

        return watched

    found = []
    monkeypatch.setattr(made._checkpoint, "read", watch("read", made._checkpoint.read))
    monkeypatch.setattr(made, "_layer", watch("layer", made._layer))
    analysis.measure_layers(made, [0, 1, 2], 0, [0, 1], np.zeros((B, T), bool))
    assert found == [("read", 0, 0), *[("read", 0, 0), *[("layer", 1, 0)] * 3] * 3]
