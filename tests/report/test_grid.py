"""What a sweep varies, and what its runs' files prove: without a process."""

import dataclasses
import pathlib
import statistics

import pytest
from support.commands import ROOT, refusal

from prope.config import default_config
from prope.errors import RunFailed
from prope.spec.run import Spec
from prope.sweep.grid import plan, read_grids
from prope.sweep.runs import Run, check_equal, reference, table, table_text


def grid_of(*texts, percentages=None, file=""):
    return read_grids(list(texts), percentages, file, default_config(), {})


@pytest.mark.parametrize(
    ("texts", "percentages", "named"),
    [
        (["model.rope_percent=0"], None, "model.rope_percentage"),
        (["seed"], None, "seed"),
        (["seed="], None, "seed="),
        ([], "0.5,0.50", "model.rope_percentage=0.5"),
        (["seed=1.5"], None, "seed=1.5"),
        (["model.scan_layers=2"], None, "model.scan_layers=2"),
        (["data.mixture=1"], None, "data.mixture=1"),
        (["model.rope_percentage=0"], "1", "model.rope_percentage"),
    ],
)
def test_a_grid_that_cannot_be_used_is_named(texts, percentages, named):
    assert named in refusal(lambda: grid_of(*texts, percentages=percentages))


def names_of(*grids, file="") -> list[str]:
    return [run.name for run in plan(list(grids), file, default_config(), {})]


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        (
            {"seed": [0, 1], "model.rope_percentage": [0.25, 1.0]},
            [f"rope_percentage={p},seed={seed}" for seed in (0, 1) for p in ("0.25", "1")],
        ),
        ({"batch_size": [8], "eval.batch_size": [4]}, ["batch_size=8,eval.batch_size=4"]),
        (
            {"optimizer.learning_rate": [1e-5 * 100, 1e-4]},
            ["learning_rate=0.001", "learning_rate=0.0001"],
        ),
        ({"model.scan_layers": [True, False]}, ["scan_layers=true", "scan_layers=false"]),
    ],
)
def test_a_name_is_made_of_the_values_alone(grid, names):
    assert names_of(grid) == names
    reversed_grid = {name: grid[name] for name in reversed(grid)}
    assert sorted(names_of(reversed_grid)) == sorted(names)


def test_every_run_begins_from_another_or_from_that_of_its_own_seed():
    runs = plan([{"seed": [0, 1]}], "file.py", default_config(), {}, "gs://b/S/seed={seed}/x{y}")
    expected = [f"--init_from=gs://b/S/seed={seed}/x{{y}}" for seed in (0, 1)]
    assert [run.arguments[-1] for run in runs] == expected


def test_what_a_config_refuses_is_found_before_the_first_run():
    assert "rope_percentage=1.5" in refusal(lambda: names_of({"model.rope_percentage": [0, 1.5]}))
    swept = {"model.rope_percentage": 1.0}
    line = refusal(lambda: read_grids([], "0", "", default_config(), swept))
    assert "model.rope_percentage=1.0" in line


def test_the_sweep_of_table_2_has_fourteen_runs():
    file = str(ROOT / "configs" / "table2.py")
    runs = plan(grid_of(file=file), file, default_config(), {"num_steps": 700})
    names = [run.name for run in runs]
    assert len(set(names)) == 14
    assert names[0] == "config=gemma_2b_wiki,rope_percentage=0"
    assert {run.spec.data.dataset for run in runs} == {"wikipedia/20230601.en", "mixture"}
    assert {run.spec.num_steps for run in runs} == {700}
    models = [run.spec.model for run in runs]
    assert [model.rope_percentage for model in models[:8]] == [0, 0.25, 0.75, 1] * 2
    assert [(model.rope_type, model.max_wavelength) for model in models[7:]] == [
        ("proportional", 1e4),
        *[("proportional", 5e5)] * 2,
        *[("reversed", 1e4), ("partial", 1e4)] * 2,
    ]
    assert runs[7].arguments == [
        f"--config={ROOT}/configs/gemma_2b_flan.py",
        "--config.num_steps=700",
        "--config.model.rope_percentage=1",
    ]
    tiny = names_of(*grid_of(file=f"{file}:tiny"), file=file)
    assert tiny[0] == "config=gemma_2b_wiki_tiny,rope_percentage=0"


def test_a_method_is_named_by_itself():
    """A sweep of encodings_wiki.py:tiny, and of two pages with the same argument."""
    file = f"{ROOT}/configs/encodings_wiki.py:tiny"
    runs = plan(grid_of(file=file), file, default_config(), {"num_steps": 7})
    assert len(runs) == 17
    names = [f"config={method}-tiny,seed=0" for method in ("rope", "nope", "p_rope_0.25")]
    assert [run.name for run in runs[:3]] == names
    assert {run.spec.num_steps for run in runs} == {7}
    assert runs[10].spec.model.rope_type == "cope"
    assert runs[10].arguments[0].endswith("encodings_wiki.py:cope-tiny")
    files = [f"{ROOT}/configs/encodings_{page}.py:cope" for page in ("wiki", "synthetic")]
    assert "config=cope" in refusal(lambda: names_of({"config": files}))


GROUPS = [
    "p = 1",
    "batch_size = 8, p = 1",
    "p = 1, max_wavelength = 100",
    "rope",
    "rope-tiny",
    "gemma_2b_wiki, p = 1",
]


@pytest.mark.parametrize(
    ("run", "rope"),
    [
        ("rope_percentage=1", None),
        ("rope_percentage=1,max_wavelength=500000", "p = 1"),
        ("batch_size=8,rope_percentage=0.25", "batch_size = 8, p = 1"),
        ("batch_size=9,rope_percentage=0.25", None),
        ("rope_percentage=0.25,max_wavelength=100", "p = 1, max_wavelength = 100"),
        ("config=cope,seed=0", "rope"),
        ("config=cope-tiny,seed=0", "rope-tiny"),
        ("config=cope-rates,learning_rate=0.1", None),
        ("config=gemma_2b_wiki,rope_percentage=0.25", "gemma_2b_wiki, p = 1"),
        ("seed=1", None),
    ],
)
def test_a_group_is_compared_with_its_rope(run, rope):
    values = {}
    for field in run.split(","):
        name, value = field.split("=")
        values[name] = value if name in ("config", "rope_type") else float(value)
    assert reference(values, GROUPS) == rope


def test_a_table_has_the_fields_of_all_grids():
    plain = make_run("a", "")
    other = make_run("b", "")
    other.values["rope_type"] = "partial"
    rows = table([plain, other])
    assert [row["rope_type"] for row in rows] == [None, "partial"]
    assert "rope_type" in table_text(rows).splitlines()[0]


def make_run(name, hashes, init="aa", loss=1.0, **fields):
    named = {field.replace("__", "."): value for field, value in fields.items()}
    spec = Spec().replace({"num_steps": 2} | named)
    evaluation = {
        "step": 2,
        "loss": loss,
        "perplexity": 2 * loss,
        "bits_per_byte": 3 * loss,
        "dataset": spec.data.dataset,
        "seq_len": spec.data.seq_len,
        "max_windows": None,
    }
    return Run(
        name,
        pathlib.Path(name),
        {"rope_percentage": spec.model.rope_percentage, "seed": spec.seed},
        spec,
        started=True,
        step=2,
        init_hash=init,
        metrics=[
            {"step": step, "loss": loss, "batch_hash": hashed}
            for step, hashed in enumerate(hashes, 1)
        ],
        evaluations=[evaluation],
        answers=[],
    )


A = make_run("a", "12", model__rope_percentage=0.0)
B = make_run("b", "123", model__rope_percentage=0.5, model__dtype="bfloat16")


def test_equal_runs_are_counted():
    assert check_equal([A, B]) == {"init": 2, "batches": 2, "steps": 2}
    assert check_equal([A]) == {"init": 0, "batches": 0, "steps": 0}
    silent = dataclasses.replace(A, name="old", metrics=[{"step": 1, "loss": 1.0}])
    assert check_equal([silent, A])["batches"] == 0


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (make_run("c", "1", init="bb", model__rope_percentage=1.0), "a and c .* 0: .* aa and bb"),
        (make_run("c", "124"), "b and c .* 3: .* 3 and 4"),
    ],
)
def test_equality_is_read_from_the_hashes(other, says):
    with pytest.raises(RunFailed, match=says):
        check_equal([A, B, other])


@pytest.mark.parametrize(
    ("fields", "hashes", "init", "equal"),
    [
        ({"seed": 1}, "56", "bb", {"init": 0, "batches": 0}),
        ({"model__embed_dim": 128}, "12", "bb", {"init": 0, "batches": 2}),
        ({"data__seq_len": 64}, "56", "aa", {"init": 2, "batches": 0}),
    ],
)
def test_runs_that_need_not_be_equal_are_not_compared(fields, hashes, init, equal):
    other = make_run("c", hashes, init, **fields)
    assert check_equal([A, other]).items() >= equal.items()


def test_a_row_is_the_mean_and_the_spread_over_seeds():
    losses = [1.0, 1.5, 3.5]
    runs = [make_run(str(seed), "", loss=loss, seed=seed) for seed, loss in enumerate(losses)]
    cut = dataclasses.replace(runs[0], name="cut", step=1)
    (row,) = table([*runs, cut])
    assert (row["runs"], row["rotated_pairs"]) == (3, 32)
    for name, factor in (("eval_loss", 1), ("perplexity", 2), ("bits_per_byte", 3)):
        assert row[name] == pytest.approx(factor * statistics.mean(losses))
        assert row[f"{name}_sd"] == pytest.approx(factor * statistics.stdev(losses))
