"""What a sweep varies, and what its runs' files prove: without a process."""

import dataclasses
import pathlib
import statistics

import pytest
from conftest import ROOT

from prope.config import default_config
from prope.errors import RunFailed, UsageError
from prope.sweep.grid import plan, read_grids
from prope.sweep.runs import Run, check_equal, reference, table, table_text


def grid_of(*texts, percentages=None, file="", overrides=None):
    return read_grids(list(texts), percentages, file, default_config(), overrides or {})


@pytest.mark.parametrize(
    ("texts", "percentages", "says"),
    [
        (
            ["model.rope_percent=0,1"],
            None,
            r"no such config field \(did you mean model.rope_percentage\?\)",
        ),
        (
            ["seed"],
            None,
            "--grid=seed: has no values; write a field and its values, such as seed=0,1,2",
        ),
        (["seed="], None, "seed=: names no values"),
        ([], "", "model.rope_percentage=: names no values"),
        ([], "0.5,0.50", "model.rope_percentage=0.5: is given twice; remove one"),
        (["seed=1,2,01"], None, "--grid seed=1: is given twice; remove one"),
        (["seed=1.5"], None, r"--grid seed=1.5: not a value \(its type is int\)"),
        (["model.rope_percentage=half"], None, "model.rope_percentage=half: not a value"),
        (["data.mixture=1"], None, "only numbers, texts and booleans can be swept"),
        (["model.rope_percentage=0"], "1", "model.rope_percentage is given twice"),
    ],
)
def test_a_grid_that_cannot_be_used_is_named(texts, percentages, says):
    with pytest.raises(UsageError, match=says) as raised:
        grid_of(*texts, percentages=percentages)
    assert "\n" not in str(raised.value)


def names_of(grid, base=None):
    return [run.name for run in plan([grid], "", base or default_config(), {})]


def test_a_name_is_made_of_the_values_alone():
    p, seed = ("model.rope_percentage", [0.25, 1.0]), ("seed", [0, 1])
    assert names_of(dict([p])) == ["rope_percentage=0.25", "rope_percentage=1"]
    assert names_of(dict([seed, p])) == [
        "rope_percentage=0.25,seed=0",
        "rope_percentage=1,seed=0",
        "rope_percentage=0.25,seed=1",
        "rope_percentage=1,seed=1",
    ]
    assert sorted(names_of(dict([seed, p]))) == sorted(names_of(dict([p, seed])))
    assert names_of({"batch_size": [8], "eval.batch_size": [4]}) == [
        "batch_size=8,eval.batch_size=4"
    ]
    assert names_of({"optimizer.learning_rate": [1e-5 * 100, 1e-4]}) == [
        "learning_rate=0.001",
        "learning_rate=0.0001",
    ]
    assert names_of({"model.scan_layers": [True, False]}) == [
        "scan_layers=true",
        "scan_layers=false",
    ]


def test_the_sweeps_of_the_project():
    five = grid_of(file=str(ROOT / "configs" / "quick_sweep.py"))
    assert five == [{"model.rope_percentage": [0.0, 0.25, 0.5, 0.75, 1.0]}]
    file = str(ROOT / "configs" / "table2.py")
    runs = plan(grid_of(file=file), file, default_config(), {"num_steps": 700})
    assert len({run.name for run in runs}) == 14
    assert runs[0].name == "config=gemma_2b_wiki,rope_percentage=0"
    assert {(run.config.data.dataset, run.config.num_steps) for run in runs} == {
        ("wikipedia/20230601.en", 700),
        ("mixture", 700),
    }
    assert [run.config.model.rope_percentage for run in runs[:8]] == [0, 0.25, 0.75, 1] * 2
    assert all(
        (r.config.model.rope_type, r.config.model.max_wavelength) == ("proportional", 1e4)
        for r in runs[:8]
    )
    assert [run.name.partition(",")[2] for run in runs[8:]] == [
        *["max_wavelength=500000,rope_percentage=1"] * 2,
        *["rope_percentage=0.75,rope_type=reversed", "rope_percentage=0.75,rope_type=partial"] * 2,
    ]
    tiny = plan(grid_of(file=f"{file}:tiny"), file, default_config(), {})
    assert tiny[0].name == "config=gemma_2b_wiki_tiny,rope_percentage=0"
    assert (
        runs[13].config.model.rope_type == "partial" and runs[13].config.data.dataset == "mixture"
    )
    assert runs[7].arguments == [
        f"--config={ROOT}/configs/gemma_2b_flan.py",
        "--config.num_steps=700",
        "--config.model.rope_percentage=1",
    ]


def test_a_method_is_named_by_itself():
    """A sweep of encodings_wiki.py:tiny, and of two pages with the same argument."""
    file = f"{ROOT}/configs/encodings_wiki.py:tiny"
    runs = plan(grid_of(file=file), file, default_config(), {"num_steps": 7})
    assert [run.name for run in runs][:3] == [
        f"config={m}-tiny,seed=0" for m in ("rope", "nope", "p_rope_0.25")
    ]
    assert len(runs) == 15 and {run.config.num_steps for run in runs} == {7}
    assert runs[10].config.model.rope_type == "cope" and runs[10].arguments[0].endswith(
        "encodings_wiki.py:cope-tiny"
    )
    files = [f"{ROOT}/configs/encodings_{page}.py:cope" for page in ("wiki", "synthetic")]
    with pytest.raises(UsageError, match="two runs would be called config=cope"):
        plan([{"config": files}], "", default_config(), {})


@pytest.mark.parametrize(
    ("values", "of_rope"),
    [
        ({"rope_percentage": 0.25, "seed": 1}, "p = 1"),
        ({"rope_percentage": 1.0}, None),
        ({"rope_percentage": 1.0, "max_wavelength": 5e5}, "p = 1"),
        ({"rope_percentage": 0.75, "rope_type": "partial"}, "p = 1"),
        ({"batch_size": 8, "rope_percentage": 0.25}, "batch_size = 8, p = 1"),
        ({"batch_size": 9, "rope_percentage": 0.25}, None),
        ({"rope_percentage": 0.25, "max_wavelength": 100.0}, "p = 1, max_wavelength = 100"),
        ({"config": "cope", "seed": 0}, "rope"),
        ({"config": "cope-tiny", "seed": 0}, "rope-tiny"),
        ({"config": "cope-rates", "learning_rate": 0.1}, None),
        ({"config": "rope"}, None),
        ({"config": "gemma_2b_wiki", "rope_percentage": 0.25}, "gemma_2b_wiki, p = 1"),
        ({"seed": 1}, None),
    ],
)
def test_what_a_group_is_compared_with(values, of_rope):
    names = {
        "p = 1",
        "batch_size = 8, p = 1",
        "p = 1, max_wavelength = 100",
        "rope",
        "rope-tiny",
        "gemma_2b_wiki, p = 1",
    }
    assert reference(values, names) == of_rope


def test_a_table_has_the_fields_of_all_grids():
    plain, other = made_run("a", []), made_run("b", [])
    other.values["rope_type"] = "partial"
    assert [row["rope_type"] for row in table([plain, other])] == [None, "partial"]
    head, first, second = table_text(table([plain, other])).splitlines()
    assert head.split()[:2] == ["rope_percentage", "rope_type"]
    assert (first.split()[:2], second.split()[:2]) == (["1.0", "-"], ["1.0", "partial"])


def made_run(name, hashes, init="aa", loss=1.0, **fields):
    config = default_config()
    config.update_from_flattened_dict(
        {"num_steps": 2} | {k.replace("__", "."): v for k, v in fields.items()}
    )
    metrics = [
        {"step": step, "loss": loss, "batch_hash": found} for step, found in enumerate(hashes, 1)
    ]
    data = {"dataset": config.data.dataset, "seq_len": config.data.seq_len, "max_windows": None}
    evaluations = [
        {"step": 2, "loss": loss, "perplexity": 2 * loss, "bits_per_byte": 3 * loss, **data}
    ]
    values = {"rope_percentage": config.model.rope_percentage, "seed": config.seed}
    return Run(name, pathlib.Path(name), values, config, True, 2, init, metrics, evaluations, [])


def test_equality_is_read_from_the_hashes():
    a = made_run("a", ["1", "2"], model__rope_percentage=0.0)
    b = made_run("b", ["1", "2", "3"], model__rope_percentage=0.5, model__dtype="bfloat16")
    assert check_equal([a, b]) == {"init": 2, "batches": 2, "steps": 2}
    assert check_equal([a]) == {"init": 0, "batches": 0, "steps": 0}
    with pytest.raises(
        RunFailed, match="a and c did not start equal at step 0: init_hash aa and bb"
    ):
        check_equal([a, b, made_run("c", ["1"], init="bb", model__rope_percentage=1.0)])
    with pytest.raises(RunFailed, match="b and c saw other batches at step 3: batch_hash 3 and 4"):
        check_equal([a, b, made_run("c", ["1", "2", "4"])])
    for other in (
        {"seed": 1},
        {"model__embed_dim": 128},
    ):  # may differ in both, or in the weights only
        batches = ["5", "6"] if "seed" in other else ["1", "2"]
        assert check_equal([a, made_run("c", batches, init="bb", **other)])["init"] == 0
    for other in ({"batch_size": 8}, {"data__seq_len": 64}):
        assert check_equal([a, made_run("c", ["5", "6"], **other)])["batches"] == 0
    silent = dataclasses.replace(a, name="old", metrics=[{"step": 1, "loss": 1.0}])
    assert check_equal([silent, a])["batches"] == 0


def test_a_row_is_the_mean_and_the_spread_over_seeds():
    values = [1.0, 1.5, 3.5]
    runs = [made_run(str(seed), [], loss=loss, seed=seed) for seed, loss in enumerate(values)]
    runs.append(dataclasses.replace(runs[0], name="cut", step=1))
    (row,) = table(runs)
    assert row["runs"] == 3 and row["rotated_pairs"] == 32
    for name, factor in (("eval_loss", 1), ("perplexity", 2), ("bits_per_byte", 3)):
        assert row[name] == pytest.approx(factor * statistics.mean(values))
        assert row[f"{name}_sd"] == pytest.approx(factor * statistics.stdev(values))
    assert "2.0000 ± 1.3229" in table_text([row])
