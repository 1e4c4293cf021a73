"""The analysis on meshes of several fake devices, in another process, against one device."""

import json
import tempfile
import types

import jax
import numpy as np
import pytest
from etils import epath
from support.heads import analysis_options, compare_analyses, make_walk
from support.models import ALL_SWITCHES
from support.processes import on_eight_devices
from support.runs import make_run

from prope import sharding
from prope.analysis import analysis, walk

B, T = 5, 24


def analyse_on(run, shape):
    """Analyses a run on a mesh (data, fsdp, tensor); several take one sequence a device at a time.

    Patches prope, as its process ends after it.
    """
    data, fsdp, tensor = shape
    size = data * fsdp * tensor
    mesh = sharding.make_mesh(data, tensor, jax.devices()[:size])
    walks = []

    class RecordedWalk(walk.Walk):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            walks.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", lambda: mesh)
        patch.setattr(analysis, "Walk", RecordedWalk)
        if size > 1:
            patch.setattr(walk, "_TOKENS", T)
        patch.setattr(walk, "_KEPT", 0 if size == 1 else 2**30)
        options = analysis_options(channels=8, head_of="t5", layers="0,2")
        found = analysis.analyse(run, options)
        batches = 1 if size == 1 else -(-B // (data * fsdp))
        assert len(walks[-1].enter().x) == batches
        linear = walks[-1]._layer_params(1)["mlp"]["linear"]
        shard = linear.addressable_shards[0].data
        assert shard.size * fsdp * tensor == linear.size, "not sharded"
    return found


def over_meshes(fields, *shapes):
    """Compares analyses on meshes of these shapes with that on one device."""
    sharding._MIN_SHARD_SIZE = 1
    ids = np.random.default_rng(0).integers(3, 40, (B, T)).astype(np.int32)
    names = [[f"t{token}" for token in row] for row in ids]
    text = {"source": "drawn", "split": None}
    analysis.read_sequences = lambda run, options: (ids, names, text)
    # Not rounded.
    loads = lambda text, parse_float: json.loads(text)  # noqa: E731
    analysis.json = types.SimpleNamespace(dumps=json.dumps, loads=loads)
    with tempfile.TemporaryDirectory() as folder:
        run = epath.Path(folder) / "run"
        make_run(run, 0.75, **{"num_layers": 3} | fields)
        alone = analyse_on(run, (1, 1, 1))
        assert alone["sequences"] == B
        assert alone["heads"][0]["head_of"] is not None
        assert len(alone["channels"]) == 8
        assert any(channel["stopped"] for channel in alone["channels"])
        for shape in shapes:
            print(fields, shape, compare_analyses(alone, analyse_on(run, shape)))


def on_four_devices():
    over_meshes(ALL_SWITCHES, (1, 2, 2))


def on_other_meshes():
    over_meshes({}, (2, 2, 1), (1, 8, 1), (2, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("function", ["on_four_devices", "on_other_meshes"])
def test_several_devices_find_what_one_does(function):
    on_eight_devices(__file__, function)


def test_one_layer_and_one_batch_are_on_the_devices_at_a_time(tmp_path, monkeypatch):
    make_run(tmp_path / "run", 0.75, num_layers=3, hidden_dim=104, vocab_size=308)
    monkeypatch.setattr(walk, "_KEPT", 0)
    monkeypatch.setattr(walk, "_TOKENS", 2 * T)
    run = make_walk(tmp_path / "run", B, T)
    calls = []

    def watch(owner, name):
        function = getattr(owner, name)

        def watched(*arguments, **options):
            live = [array.shape for array in jax.live_arrays()]
            params = live.count((2, 48, 104)) + live.count((308, 48))
            queries = sum(shape[1:] == (T, 4, 64) for shape in live)
            calls.append((name, params, queries))
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(run._checkpoint, "read")
    watch(run, "_layer")
    analysis.measure_layers(run, [0, 1, 2], 0, [0, 1], np.zeros((B, T), bool))
    of_a_layer = [("read", 0, 0), *[("_layer", 1, 0)] * 3]
    assert calls == [("read", 0, 0), *of_a_layer * 3]
