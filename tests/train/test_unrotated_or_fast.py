"""Arms and seeds that train as one program are single runs; the text that they are trained on."""

import functools
import io
import json
import runpy
import tarfile

import jax
import numpy as np
import pytest
from support.commands import ROOT
from support.text import read_lines

from prope import train as prope_train
from prope.errors import UsageError
from prope.optimizer import make_optimizer
from prope.step import init_state, make_train_step
from prope.workdir.run import open_run

SCRIPT = runpy.run_path(str(ROOT / "configs/results/unrotated_or_fast.py"))


def draw_batch(seed, B=2, T=64):
    tokens = np.random.default_rng(seed).integers(3, 260, (B, T + 1), dtype=np.int32)
    ones = np.ones((B, T), np.int32)
    positions = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions}
    return batch | {"segment_ids": ones, "weights": ones.astype(np.float32)}


def test_arm_and_seed_is_the_single_run_of_them():
    arms, seeds = ("rope-tiny", "partial-tiny"), (3, 4)
    specs = [[SCRIPT["get_spec"](SCRIPT["PAGE"], arm, seed, "") for seed in seeds] for arm in arms]
    optimizer = make_optimizer(specs[0][0])
    batches = [[draw_batch(10 * seed + step) for seed in seeds] for step in range(3)]
    init = jax.jit(init_state, static_argnums=(0, 1))
    states = [[init(spec, optimizer) for spec in row] for row in specs]
    together = jax.tree.map(
        lambda *leaves: np.stack(leaves).reshape(len(arms), len(seeds), *leaves[0].shape),
        *[state for row in states for state in row],
    )
    phases = SCRIPT["arm_phases"]([row[0] for row in specs])
    step = jax.jit(SCRIPT["make_step"](specs[0][0], optimizer))
    losses = []
    for of_seeds in batches:
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *of_seeds)
        *together, metrics = step(*together, batch, phases)
        losses.append(metrics["loss"])
    single = functools.cache(lambda arm: jax.jit(make_train_step(specs[arm][0], optimizer)))
    final = []
    for arm, seed in np.ndindex(len(arms), len(seeds)):
        state = states[arm][seed]
        for number, of_seeds in enumerate(batches):
            *state, metrics = single(arm)(*state, of_seeds[seed])
            np.testing.assert_allclose(losses[number][arm, seed], metrics["loss"], rtol=1e-5)
        final.append(float(metrics["loss"]))
    assert len(set(final)) == len(final)  # arms and seeds do differ


def test_whole_subsystems_are_held_out(tmp_path):
    source = tmp_path / "linux.tar.xz"
    with pytest.raises(UsageError, match="apt-get install linux-source-6.1"):
        SCRIPT["pack"](str(source), str(tmp_path / "data"))
    files = ("fs/ext4/inode.c", "fs/ext2/inode.c", "net/ipv4x/a.c", "Documentation/x/y.rst")
    with tarfile.open(source, "w:xz") as archive:
        for name in files:
            text = f"{name} {'x' * 3000}".encode()
            member = tarfile.TarInfo(f"linux-source-6.1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    library = tmp_path / "library"
    for name in ("json/a.py", "jsonx/b.py"):
        (library / name).parent.mkdir(parents=True)
        (library / name).write_text(f"# {name} {'x' * 3000}")
    totals = SCRIPT["pack"](str(source), str(tmp_path / "data"), str(library))
    assert totals["validation"] > 3000
    read = {
        split: SCRIPT["lzma"].open(tmp_path / f"data/{split}.jsonl.xz", "rt").read()
        for split in totals
    }
    held_out = {"fs/ext4/inode.c", "json/a.py"}
    names = {*files, "json/a.py", "jsonx/b.py"}
    assert {name for name in names if name in read["validation"]} == held_out
    assert {name for name in names if name in read["train"]} == names - held_out


@pytest.mark.slow
def test_runs_that_trained_together_are_ordinary_and_go_on(tmp_path):
    """Stopped after its first step, and compared with prope.train's losses."""
    page = tmp_path / "page.py"
    page.write_text(
        f"""
import runpy
original = runpy.run_path({str(SCRIPT["FILE"])!r})
def get_config(name):
    config = original["get_config"](name)
    config.num_steps, config.log_every, config.data.dataset = 3, 1, "mixture"
    config.data.mixture = ({{"weight": 1.0, "dataset": "longcontext/mix", "data_dir": ""}},) * 2
    return config
def get_sweep(size):
    return {{"config": ("page.py:rope-tiny", "page.py:fast-tiny")}}
"""
    )
    train = SCRIPT["train"]
    train.__globals__["TOGETHER"] = 1
    arguments = (str(page), "tiny", str(tmp_path / "runs"))
    assert train(*arguments, seconds=0)["step"] == 1
    assert train(*arguments)["step"] == 3
    name = "config=fast-tiny,seed=0"
    single = prope_train.train(runpy.run_path(str(page))["get_config"]("fast-tiny"), tmp_path / "W")
    together = read_lines(tmp_path / f"runs/{name}/metrics.jsonl")
    assert [record["step"] for record in together] == [1, 2, 3]
    np.testing.assert_allclose(
        [record["loss"] for record in together],
        [record["loss"] for record in read_lines(tmp_path / "W/metrics.jsonl")],
        rtol=1e-5,
    )
    run = open_run(tmp_path / "runs" / name)
    assert (run.step, run.init_hash) == (3, single["init_hash"])


def test_contrasts_are_the_effects_that_were_planted(tmp_path):
    """Losses: 2 + 0.1 without rotation, plus 0.01 for each seed. Shares: 0.2 less by slow pairs."""
    for arm in SCRIPT["PAGE"]["ARMS"]:
        for seed in range(3):
            place = tmp_path / f"config={arm}-pilot,seed={seed}"
            place.mkdir()
            (place / "config.json").write_text('{"data": {"seq_len": 256}}')
            loss = 2 + (arm in ("partial", "p_rope")) * (0.1 + 0.01 * seed)
            right = 0.5 - (arm in ("rope", "partial")) * (0.2 + 0.01 * seed)
            losses = [
                {"dataset": "files", "split": split, "seq_len": T, "loss": loss}
                for split in ("validation", "all")
                for T in (256, 2048)
            ]
            losses.append(losses[0] | {"window": 64, "loss": loss + 0.3 + 0.01 * seed})
            asked = [
                {"task": task, "seq_len": T, "accuracy": right}
                for task in ("niah", "lookup")
                for T in (256, 2048)
            ]
            for name, records in (("eval", losses), ("longcontext", asked)):
                (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    records = SCRIPT["Records"](tmp_path)
    reach = 4.302653 * 0.01 / 3**0.5  # Student's t of 2 degrees, one comparison
    precondition, *declared = SCRIPT["contrast_rows"](records)
    assert f"| +0.3100 | {0.31 - reach:+.4f} to {0.31 + reach:+.4f} |" in precondition
    means = [row.split(" | ")[1] for row in declared]
    assert means == ["+0.0000", "-0.2100", "+0.0000", "+0.1100"]
    rows = SCRIPT["arm_rows"](records)
    assert rows[2].startswith("| partial | 3 | 2.110 | 2.110 | 2.110 | 2.110 | 29.0 % |")
