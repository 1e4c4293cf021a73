"""The page of a sweep: its numbers are those of the runs' files, and it asks for nothing."""

import base64
import dataclasses
import html
import itertools
import json
import math
import pathlib
import re
import shutil
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from etils import epath
from scipy import stats
from support.sweeps import SWEEP_PERCENTAGES as PERCENTAGES
from support.sweeps import SWEEP_SEEDS as SEEDS
from support.sweeps import SWEEP_STEPS as STEPS
from support.sweeps import Page, draw_picture
from support.text import read_lines, write_lines

from prope.errors import UsageError
from prope.inference import paired
from prope.inference.statistics import average_seeds
from prope.inference.statistics import deviation as deviation_of
from prope.pages import drawing
from prope.pages import sweep as sweep_page
from prope.pages.curves import loss_picture, pictures
from prope.pages.run import encoding_picture, report_run
from prope.spec.data import DataSpec
from prope.spec.model import ModelSpec
from prope.spec.run import Spec
from prope.sweep import comparisons, context, curves, runs
from prope.sweep.interventions import list_changes
from prope.workdir.run import find_listed


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are made, and not drawn."""
    monkeypatch.setattr(drawing.Picture, "render", lambda self: b"")


@pytest.fixture
def sweep(template, tmp_path):
    """A copy of the sweep, which a test may change."""
    return shutil.copytree(template, tmp_path / "sweep")


def run_folder(sweep, p, seed=0):
    return sweep / f"rope_percentage={p:g},seed={seed}"


def final(sweep, p, seed, seq_len=256) -> dict:
    """A run's evaluation of the last step."""
    for record in read_lines(run_folder(sweep, p, seed) / "eval.jsonl"):
        if record["step"] == 10 and record["seq_len"] == seq_len:
            return record
    raise AssertionError("no evaluation")


def finals(sweep, p, name="loss", seq_len=256) -> np.ndarray:
    """A measure of the last step, by seed."""
    records = [final(sweep, p, seed, seq_len) for seed in SEEDS]
    return np.array([record[name] for record in records])


def means_by_p(sweep, name="perplexity") -> list[float]:
    """Means over seeds of a measure of the last step."""
    return [finals(sweep, p, name).mean() for p in PERCENTAGES]


def interval(sweep, p) -> tuple[float, float]:
    """The 95 % interval of the loss minus RoPE's: Student's t, by Bonferroni for two."""
    test = stats.ttest_rel(finals(sweep, p), finals(sweep, 1.0))
    return tuple(test.confidence_interval(0.975))


def column(rows, number) -> list[str]:
    return [row[number] for row in rows]


def table_with(page, name) -> list[list[str]]:
    """The rows below the head of the table that has this column."""
    (table,) = [table for table in page.tables if name in table[0]]
    return table[1:]


def edit_values(sweep, change) -> None:
    """Changes the swept values of every run in sweep.json."""
    path = sweep / "sweep.json"
    entries = json.loads(path.read_text())
    for entry in entries["runs"]:
        if entry["values"]:
            change(entry["values"])
    path.write_text(json.dumps(entries))


def read_rows(sweep) -> tuple[list[runs.Run], list[dict]]:
    read = runs.read_sweep(sweep)
    return read, sweep_page.result_rows(read, comparisons.compare_with_reference(read))


def pictures_by_name(sweep) -> dict[str, drawing.Picture]:
    return {picture.name: picture for picture in pictures(*read_rows(sweep))}


def lines_of(picture) -> list[list[tuple[list, list]]]:
    """x and y of the lines of a picture, by panel."""

    panels = []
    for axes in draw_picture(picture).axes:
        lines = [line.get_data() for line in axes.lines]
        panels.append([(list(x), list(y)) for x, y in lines])
    return panels


def write_page(sweep) -> Page:
    """Writes the page without its pictures, which take time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing.Picture, "render", lambda self: b"")
        return Page(pathlib.Path(sweep_page.report_sweep(sweep)["output"]))


def add_records(folder, *records) -> None:
    """Adds evaluations to those of a run."""
    path = folder / "eval.jsonl"
    write_lines(path, [*read_lines(path), *records])


@pytest.fixture(scope="module")
def reported(template, tmp_path_factory):
    """A sweep with its page and pictures, and what the command prints; it is only read."""
    folder = tmp_path_factory.mktemp("reported") / "sweep"
    shutil.copytree(template, folder)
    return folder, sweep_page.report_sweep(folder)


# --- The page -------------------------------------------------------------------------------------


def with_error(values) -> str:
    """Mean and standard deviation of two values, with two digits of the latter."""
    spread = abs(values[0] - values[1]) / math.sqrt(2)
    digits = min(4, 1 - math.floor(math.log10(spread)))
    return f"{sum(values) / 2:.{digits}f} ± {spread:.{digits}f}"


def test_the_result_is_that_of_the_files(reported):
    """What the command prints, too."""
    sweep, result = reported
    page = Page(sweep / "report" / "index.html")
    best = int(np.argmin(means_by_p(sweep)))
    assert result["output"] == str(sweep / "report" / "index.html")
    assert len(result["runs"]) == 6
    assert [row["selected_best"] for row in result["table"]] == [i == best for i in range(3)]
    nope, _, rope = (row["minus_rope"] for row in result["table"])
    assert nope["interval"] == pytest.approx(interval(sweep, 0))
    assert rope is None
    assert all(len(set(map(len, table))) == 1 for table in page.tables)
    head, *rows = page.tables[0]
    assert head[:3] == ["p", "rotated pairs", "runs"]
    for p, row in zip(PERCENTAGES, rows, strict=True):
        expected = [f"{p:g}", f"{int(32 * p)} of 32", "2"]
        for name in ("loss", "perplexity", "bits_per_byte"):
            expected.append(with_error(finals(sweep, p, name)))
        if p == 1:
            expected.append("–")
        else:
            low, high = interval(sweep, p)
            difference = f"{(low + high) / 2:+.4f} ({low:+.4f} to {high:+.4f})"
            if low < 0 < high:
                difference += " not distinguishable"
            expected.append(difference.replace("-", "−"))
        if p == PERCENTAGES[best]:
            expected[0] += " selected best"
        assert row == expected
    assert f"p = {PERCENTAGES[best]:g} has" in page.text


def test_the_tables_of_runs_and_machines_are_those_of_the_files(reported):
    sweep, _ = reported
    page = Page(sweep / "report" / "index.html")
    row, *_ = table_with(page, "state")
    record = final(sweep, 0, 0)
    last = read_lines(run_folder(sweep, 0) / "metrics.jsonl")[-1]
    texts = [f"{last['loss']:.4f}"]
    for name in ("loss", "perplexity", "bits_per_byte"):
        texts.append(f"{record[name]:.4f}")
    assert row == ["rope_percentage=0,seed=0", "finished", "10", *texts, "0" * 16]
    first, second, *_ = table_with(page, "devices")
    code = "0123456789+changes"
    pace = ["4,096", "0:00:10"]
    assert first[1:] == ["8 × TPU v5p", "–", "0.10.2", code, "2", *pace]
    assert second[1:] == ["–"] * 5 + pace
    assert page.text.count("6 of 6 runs") == 2


def test_a_page_of_methods_compares_them_with_rope(sweep):
    """The same runs, had they been swept by config: of p = 0, 0.25 and 1."""
    by_p = write_page(sweep).tables[0]
    methods = {0.0: "nope", 0.25: "cope", 1.0: "rope"}

    def name_config(values) -> None:
        values["config"] = methods[values.pop("rope_percentage")]

    edit_values(sweep, name_config)
    head, *rows = write_page(sweep).tables[0]
    assert head[0] == "run"
    names = [name.removesuffix(" selected best") for name in column(rows, 0)]
    assert names == list(methods.values())
    assert [row[1:] for row in rows] == [row[1:] for row in by_p[1:]]
    perplexities, _ = lines_of(pictures_by_name(sweep)["perplexity"])
    assert_line(perplexities[0], methods.values(), means_by_p(sweep))


def test_lines_of_perplexity_are_the_swept_fields_beside_p(sweep):
    def change(values) -> None:
        values["rope_type"] = "partial" if values.pop("seed") else "proportional"

    edit_values(sweep, change)
    axes, _ = draw_picture(pictures_by_name(sweep)["perplexity"]).axes
    lines = axes.containers
    names = [line.get_label() for line in lines]
    assert names == ["rope_type = proportional", "rope_type = partial"]
    for seed, line in enumerate(lines):
        x, y = line.lines[0].get_data()
        assert list(x) == list(PERCENTAGES)
        expected = [final(sweep, p, seed)["perplexity"] for p in PERCENTAGES]
        assert list(y) == pytest.approx(expected)


def write_evaluation(folder, rng, fingerprint, windows, max_windows) -> dict:
    """Writes the sums of an evaluation whose losses are drawn; returns its record."""
    losses = rng.uniform(100, 200, (30, 2))
    tokens = np.full((30, 2), 64)
    loss = float(losses.sum() / tokens.sum())
    record = {
        "fingerprint": fingerprint,
        "windows": windows,
        "max_windows": max_windows,
        "step": 10,
        "dataset": "python_docs",
        "split": "validation",
        "seq_len": 256,
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss,
        "by_position": [{"from": 0, "to": 256, "loss": loss}],
    }
    edges = np.array([0, 128, 256])
    sums = paired.Sums(losses, tokens, edges, np.zeros(30, int), [1.0])
    paired.write_sums(folder / "eval" / "10", record, sums)
    return record


def test_the_page_shows_the_fullest_evaluation_everywhere(sweep):
    """After evaluations on a few windows, on other documents, and on more of one run only."""
    rng = np.random.default_rng(1)
    full = {}
    for path in sweep.glob("*,seed=1"):
        shutil.rmtree(path)
    for p in PERCENTAGES:
        folder = run_folder(sweep, p)
        records = [
            write_evaluation(folder, rng, "a", 100, None),
            write_evaluation(folder, rng, "a", 48, 48),
            write_evaluation(folder, rng, "b", 200, None),
        ]
        full[p] = records[0]["loss"]
        if p == 0:
            records.append(write_evaluation(folder, rng, "a", 500, 500))
        write_lines(folder / "eval.jsonl", records)
    expected = list(full.values())
    _, *rows = write_page(sweep).tables[0]
    assert column(rows, 3) == [f"{loss:.4f}" for loss in expected]
    for row, loss in zip(rows[:2], expected, strict=False):
        difference = f"{loss - full[1.0]:+.4f} ("
        assert row[6].startswith(difference.replace("-", "−"))
    assert [run.record()["eval_loss"] for run in runs.read_sweep(sweep)] == expected
    losses, _ = lines_of(pictures_by_name(sweep)["position"])
    for line, loss in zip(losses, expected, strict=True):
        assert_line(line, [128], [loss])
    path = run_folder(sweep, 0) / "eval.jsonl"
    write_lines(path, read_lines(path)[1:2])
    state = runs.read_sweep(sweep)[0].state
    assert state == "unfinished", "training's own evaluation is missing"


def test_evaluations_on_windows_that_another_run_lacks_are_counted_and_left_out(sweep):
    own = final(sweep, 0, 0)
    add_records(run_folder(sweep, 0), own | {"windows": 999, "max_windows": 999, "loss": 0.5})
    page = write_page(sweep)
    assert table_with(page, "state")[0][4] == f"{own['loss']:.4f}"
    assert "; 1 on windows that another run lacks" in page.text
    path = run_folder(sweep, 0) / "eval.jsonl"
    write_lines(path, [record | {"windows": 7} for record in read_lines(path)])
    assert runs.read_sweep(sweep)[0].evaluation is None
    assert write_page(sweep).tables


def test_a_run_with_windows_of_another_length_takes_nothing_from_the_others(sweep):
    """It has another number of windows of the same documents."""
    read = runs.read_sweep(sweep)
    for number, run in enumerate(read):
        records = [record | {"windows": 8} for record in run.last_evaluations]
        if number == 0:
            run = dataclasses.replace(run, spec=run.spec.replace({"data.seq_len": 512}))
            records = [record | {"seq_len": 512, "windows": 4} for record in records]
        read[number] = dataclasses.replace(run, evaluations=records)
    assert {run.state for run in runs.on_common_windows(read)} == {"finished"}


def test_the_loss_of_a_run_is_drawn_on_the_same_windows_at_every_step(sweep):
    """An evaluation of more windows after training is no point of it."""
    plain = final(sweep, 0, 0)
    fuller = plain | {"windows": 999, "max_windows": 999, "loss": 9.0}
    add_records(run_folder(sweep, 0), fuller)
    run, *_ = runs.read_sweep(sweep)
    alone = dataclasses.replace(run, evaluations=[*run.evaluations, *run.dropped])
    (axes,) = draw_picture(loss_picture(alone)).axes
    assert len(alone.evaluations) > len(run.evaluations)
    assert axes.lines[1].get_ydata()[-1] == plain["loss"]
    assert f"{plain['loss']:.4f} at step 10" in loss_picture(alone).alt
    unlike = [record | {"max_windows": 999} for record in run.evaluations]
    picture = loss_picture(dataclasses.replace(run, evaluations=unlike))
    assert len(draw_picture(picture).axes[0].lines) == 1, "none of the windows of training"


def test_bands_are_compared_with_evaluations_that_other_runs_lack(sweep):
    """Those of one run that more windows have than any other run's."""
    plain = final(sweep, 0, 0) | {"windows": 999, "max_windows": 999}
    stopped = plain | {"encoding": "stop:0-3", "factor": 1.0, "loss": plain["loss"] + 0.5}
    add_records(run_folder(sweep, 0), plain, stopped)
    (change,) = list_changes(runs.read_sweep(sweep))
    assert change.difference.difference == pytest.approx(0.5)


def test_what_is_missing_is_left_out(sweep):
    """A run whose checkpoints were removed is finished; one that was never evaluated is not."""
    before = write_page(sweep).tables[0]
    for folder in sweep.glob("*/checkpoints"):
        shutil.rmtree(folder)
    assert write_page(sweep).tables[0] == before
    for path in sweep.glob("rope_percentage=1,*/eval.jsonl"):
        path.unlink()
    (run_folder(sweep, 0, 1) / "metrics.jsonl").unlink()
    rows = write_page(sweep).tables[0][1:]
    assert column(rows, 2) == ["2", "2", "0"]
    assert rows[2][3:7] == ["–"] * 4
    assert rows[0][6] == "–"
    states = [run.state for run in runs.read_sweep(sweep)]
    assert states.count("unfinished") == 2
    for path in sweep.glob("*/*.jsonl"):
        path.unlink()
    assert {row[4] for row in table_with(write_page(sweep), "rotated pairs")} == {"–"}
    assert pictures_by_name(sweep) == {}
    assert sweep_page.equality(runs.read_sweep(sweep))["batches"] == 0


UNPREDICTED = dict.fromkeys(("loss", "loss_stderr", "perplexity", *runs.METRICS[1:]))


@pytest.mark.parametrize("folders", ["rope_percentage=0,seed=1", "*"])
def test_evaluations_without_a_predicted_token_are_left_out(sweep, folders, undrawn):
    """One run lacks it, or all do; the others have bits per byte or, with too many <unk>, none."""
    for path in sweep.glob("*/eval.jsonl"):
        records = [record | {"bits_per_byte": None} for record in read_lines(path)]
        write_lines(path, records)
    for path in sweep.glob(f"{folders}/eval.jsonl"):
        records = [record | UNPREDICTED | {"by_position": []} for record in read_lines(path)]
        write_lines(path, records)
    result = table_with(write_page(sweep), "rotated pairs")
    assert len(result) == len(PERCENTAGES)
    if folders == "*":
        assert {row[4] for row in result} == {"–"}
    else:
        assert result[0][4] == f"{final(sweep, 0, 0)['perplexity']:.4f}", "without an error"
    page = Page(pathlib.Path(report_run(run_folder(sweep, 0, 1))["output"]))
    assert {row[7] for row in table_with(page, "predicted tokens")} == {"–"}


def test_the_page_of_a_run_has_all_of_its_evaluations(sweep, undrawn):
    """The numbers are those of eval.jsonl, of equal records the last."""
    folder = run_folder(sweep, 0.25)
    plain = read_lines(folder / "eval.jsonl")[0] | {"step": 10, "seq_len": 2048}
    changes = [
        {"loss": 3.5},
        {"loss": 2.25},
        {"loss": 7.25, "encoding": "stop:0-3", "factor": 1.0},
        {"loss": 8.0, "encoding": "yarn", "factor": 8.0},
        {"loss": 6.5, "window": 64, "sinks": 4},
        {"loss": 1.5, "split": "train"},
        {"loss": 1024.0, "window": 1024, "sinks": 0},
        {"loss": 9.0, "changed": {"model.dtype": "float32"}},
    ]
    write_lines(folder / "eval.jsonl", [plain | change for change in changes])
    page = Page(pathlib.Path(report_run(folder)["output"]))
    first = next(attributes for tag, attributes in page.tags if tag == "img")
    assert first["alt"].startswith("Last losses of training")
    assert all(len(set(map(len, table))) == 1 for table in page.tables)
    rows = table_with(page, "predicted tokens")
    assert {row[3]: row[5] for row in rows} == {
        "–": "2.2500",
        "stop:0-3": "7.2500",
        "yarn by 8": "8.0000",
        "last 64 keys and the first 4": "6.5000",
        "split train": "1.5000",
        "last 1,024 keys": "1024.0000",
        "model.dtype=float32": "9.0000",
    }
    assert {(row[0], row[2]) for row in rows} == {("10", "2,048")}
    write_page(sweep)
    link = '<a href="../rope_percentage=0.25,seed=0/report/index.html">'
    assert (sweep / "report/index.html").read_text().count(link) == 1


@pytest.mark.parametrize("p", [1 / 3, "by layer"])
def test_a_run_of_any_p_has_a_page(sweep, p, undrawn):
    folder = run_folder(sweep, 0.25)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if p == "by layer":
        p = [1.0] + [0.5] * (config["model"]["num_layers"] - 1)
    config["model"]["rope_percentage"] = p
    path.write_text(json.dumps(config))
    shutil.rmtree(folder / "checkpoints")  # which have the config, too
    assert Page(pathlib.Path(report_run(folder)["output"])).text


def test_the_encoding_of_a_run_is_drawn_by_kind_of_layer():
    """Frequencies by the formula wavelength^(-2 k / head_dim); what does not rotate has none."""
    model = {"num_layers": 3, "head_dim": 16, "max_wavelength": 10_000.0, "rope_percentage": 0.5}
    windows = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}
    spec = Spec(model=ModelSpec(**model | windows | {"local_rope_percentage": 1.0}))
    picture = encoding_picture(SimpleNamespace(spec=spec))
    axes = draw_picture(picture).axes[0]
    *curves, once = axes.lines
    rotate = [8, 4]
    assert len(curves) == len(rotate)
    freqs = 10_000.0 ** (-2 * np.arange(8) / 16)
    for curve, pairs in zip(curves, rotate, strict=True):
        assert f"{pairs} pairs rotate" in curve.get_label()
        expected = np.where(np.arange(8) < pairs, freqs, np.nan)
        np.testing.assert_allclose(curve.get_ydata(), expected, rtol=1e-6)
    assert once.get_ydata()[0] == pytest.approx(2 * math.pi / spec.data.seq_len)


def test_a_field_that_differs_though_it_is_not_swept_is_named(sweep):
    assert sweep_page.equality(runs.read_sweep(sweep))["fields"] == []
    path = run_folder(sweep, 0) / "config.json"
    path.write_text(path.read_text().replace('"log_every": 10', '"log_every": 7'))
    assert sweep_page.equality(runs.read_sweep(sweep))["fields"] == ["log_every"]
    assert "log_every" in write_page(sweep).text


def test_runs_that_may_not_be_compared_are_said_to_be_so(sweep):
    path = run_folder(sweep, 0.25, 1) / "metrics.jsonl"
    path.write_text(path.read_text().replace('"batch_hash": "15"', '"batch_hash": "99"'))
    error = sweep_page.equality(runs.read_sweep(sweep))["error"]
    assert "batch_hash 15 and 99" in error and error in write_page(sweep).text


ACTIVE_TAGS = {"script", "iframe", "object", "embed", "video", "audio", "form", "base"}
ADDRESSES = {"src", "srcset", "href", "xlink:href", "data", "action", "poster"}


def test_the_page_asks_for_nothing_and_can_be_read_aloud(reported):
    sweep, _ = reported
    folder = sweep / "report"
    page = Page(folder / "index.html")
    assert not ACTIVE_TAGS & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        for name in ADDRESSES & attributes.keys():
            assert attributes[name].startswith(("data:", "#")), (tag, name)
        assert not any(name.startswith("on") for name in attributes)
        assert not any("http" in (value or "") for value in attributes.values())
    source = (folder / "index.html").read_text()
    assert "url(" not in source and "@import" not in source
    assert "default-src 'none'" in source
    names = pictures_by_name(sweep)
    texts = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    assert len(texts) == len(names) and all(texts)
    assert ("html", {"lang": "en"}) in page.tags
    files = {path.name for path in folder.iterdir()}
    assert files == {"index.html", *(f"{name}.png" for name in names)}
    png = (folder / "loss.png").read_bytes()
    assert base64.b64encode(png).decode() in source


# Markup, quotes, formulas that are none, control characters, a bidirectional mark, a surrogate.
HOSTILE = "<script>alert(1)</script> \"q\" 'q' & $\\frac$ {x} \0\x1b[31m\u202e\ud800"
SHOWN = "<script>alert(1)</script> \"q\" 'q' & $\\frac$ {x} \\x00\\x1b[31m\\u202e\\ud800"

VISIBLE = "".join(filter(str.isprintable, HOSTILE))  # as a path has to be


def name_hostile(sweep) -> None:
    """Gives a hostile name to everything that the page and its pictures name."""
    edit_values(sweep, lambda values: values.update(note=HOSTILE))
    for path in sweep.glob("*/config.json"):
        config = json.loads(path.read_text())
        texts = {"dataset": HOSTILE, "tokenizer": VISIBLE, "template": HOSTILE}
        config["data"] |= texts | {"data_dir": "text"}
        path.write_text(json.dumps(config))
        shutil.rmtree(path.parent / "checkpoints")
    for path in sweep.glob("*/eval.jsonl"):
        records = []
        for record in read_lines(path):
            for entry in record.get("accuracy_by_distance", []):
                entry["task"] = f"../{HOSTILE}"
            records.append(record | {"dataset": HOSTILE})
        write_lines(path, records)


def assert_shown(page) -> None:
    """All that is hostile in a page is text, and its bytes are UTF-8 without control characters."""
    source = page.read_bytes().decode()
    assert "alert(1)" in source
    assert "<script>alert" not in source
    assert all(character.isprintable() or character == "\n" for character in source)
    assert SHOWN in html.unescape(source)


def test_hostile_names_are_text_in_pages_and_pictures(sweep, monkeypatch):
    monkeypatch.setitem(drawing.STYLE, "savefig.dpi", 20)  # which saves time
    name_hostile(sweep)
    result = sweep_page.report_sweep(sweep)
    assert_shown(sweep / "report" / "index.html")
    assert len(result["table"]) == len(PERCENTAGES)
    assert_shown(pathlib.Path(report_run(run_folder(sweep, 0))["output"]))
    tasks = [path.name for path in (sweep / "report").glob("accuracy-*")]
    assert len(tasks) == 1 and tasks[0].startswith("accuracy-.._")
    assert not list(sweep.glob("*.png"))


def test_what_is_no_sweep_or_no_run_is_refused(run_command, sweep, tmp_path):
    """In one line with exit code 2 that begins with what was given."""
    run = run_folder(sweep, 0)
    for flags, begins in (
        ([f"--sweep={tmp_path}/none"], f"--sweep={tmp_path}/none: "),
        ([], "give either --workdir"),
        ([f"--workdir={sweep}"], f"--workdir={sweep}: "),
        ([f"--workdir={tmp_path}/none"], f"--workdir={tmp_path}/none: "),
        ([f"--workdir={run}", "--contrast=a,b"], "--contrast=a,b: "),
        ([f"--workdir={run}", f"--runs={run}"], "give either --workdir"),
        ([f"--runs={run},{tmp_path}/none"], f"--runs={tmp_path}/none: "),
        ([f"--runs={run}"], f"--runs={run}: no two compare"),
    ):
        done = run_command("prope.report", *flags)
        assert done.code == 2
        assert done.error.startswith(f"error: {begins}")
    for path in sweep.glob("*/config.json"):
        path.unlink()
    with pytest.raises(UsageError, match=f"^--sweep={re.escape(str(sweep))}: .* 7 runs"):
        runs.read_sweep(sweep)
    (sweep / "sweep.json").write_text("{")
    with pytest.raises(UsageError, match=r"sweep\.json: "):
        runs.read_sweep(sweep)


# --- Runs that are no sweep -----------------------------------------------------------------------


def folders(sweep, *chosen) -> list[pathlib.Path]:
    return [epath.Path(run_folder(sweep, *one)) for one in chosen]


def test_runs_are_compared_with_the_first_over_seeds_as_in_their_sweep(sweep, undrawn):
    order = [1.0, 0.0, 0.25]
    chosen = [(p, seed) for p in order for seed in SEEDS]
    result = sweep_page.report_runs(folders(sweep, *chosen))
    first, *others = result["table"]
    assert first["run"] == "rope_percentage=1,seed=0" and first["minus_first"] is None
    for p, row in zip(order[1:], others, strict=True):
        assert row["runs"] == 2 and row["minus_first"]["over"] == "2 seeds"
        assert row["minus_first"]["interval"] == pytest.approx(interval(sweep, p))
        assert row["eval_loss"] == pytest.approx(finals(sweep, p).mean())
    fields = {"model.rope_percentage": [p for p, _ in chosen], "seed": [seed for _, seed in chosen]}
    assert result["differing"] == fields
    page = Page(pathlib.Path(result["output"]))
    assert result["output"] == f"{folders(sweep, (1.0, 0))[0]}/compared/index.html"
    rows = table_with(page, "rope_percentage=1,seed=0")
    assert {row[0]: list(map(float, row[1:])) for row in rows[:2]} == fields
    assert "RoPE’s" not in page.text and "loss minus rope_percentage=1,seed=0’s" in page.text


def test_two_runs_of_any_seeds_are_compared_by_document(sweep, undrawn):
    rng = np.random.default_rng(0)
    pair = folders(sweep, (0.25, 0), (1.0, 1))
    losses = []
    for folder in pair:
        write_lines(folder / "eval.jsonl", [write_evaluation(folder, rng, "a", 100, None)])
        (saved,) = (folder / "eval/10").glob("*.npz")
        losses.append(np.load(saved)["loss"].astype(float).sum(axis=1) / 128)  # tokens, of each
    expected = stats.ttest_rel(losses[1], losses[0])
    _, row = sweep_page.report_runs(pair)["table"]
    assert row["minus_first"]["over"] == "documents"
    assert row["minus_first"]["loss"] == pytest.approx((losses[1] - losses[0]).mean())
    assert row["minus_first"]["interval"] == pytest.approx(tuple(expected.confidence_interval()))
    shutil.rmtree(pair[1] / "eval")
    result = sweep_page.report_runs(pair)
    assert result["table"][1]["minus_first"]["interval"] is None
    assert "has kept no sums by document" in Page(pathlib.Path(result["output"])).text


def of_another_text(folder):
    records = read_lines(folder / "eval.jsonl")
    write_lines(folder / "eval.jsonl", [record | {"fingerprint": "b"} for record in records])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (of_another_text, "fingerprint b, seq_len 256"),
        (lambda folder: (folder / "eval.jsonl").unlink(), "not evaluated there"),
        (lambda folder: shutil.rmtree(folder / "eval"), ""),
    ],
)
def test_a_run_that_cannot_be_compared_is_left_out_with_the_reason(sweep, change, reason, undrawn):
    chosen = folders(sweep, (1.0, 0), (0.0, 0), (0.25, 0))
    (chosen[1] / "eval").mkdir()
    change(chosen[1])
    result = sweep_page.report_runs(chosen)
    left_out = [entry["name"] for entry in result["left_out"]]
    compared = [row["run"] for row in result["table"]]
    names = [path.name for path in chosen]
    if not reason:
        assert (compared, left_out) == (names, [])
        return
    assert (compared, left_out) == ([names[0], names[2]], [names[1]])
    assert reason in result["left_out"][0]["reason"]
    rows = table_with(Page(pathlib.Path(result["output"])), "why")
    assert [row[0] for row in rows] == left_out and reason in rows[0][1]
    with pytest.raises(UsageError, match=f"no two compare: .*{reason}") as refused:
        sweep_page.report_runs(chosen[:2])
    assert "\n" not in str(refused.value)


def test_equal_configs_are_runs_of_their_own_and_may_begin_from_others(sweep, tmp_path):
    (first,) = folders(sweep, (1.0, 0))
    again = epath.Path(shutil.copytree(first, tmp_path / "other" / first.name))
    read, _ = runs.read_runs([first, again])
    assert [run.group for run in read] == [str(first), str(again)]
    read = [
        dataclasses.replace(read[0], init_hash="1"),
        dataclasses.replace(read[1], init_hash="2"),
    ]
    assert sweep_page.equality(read)["error"]
    read[1] = dataclasses.replace(read[1], init_from="/runs/base")
    assert sweep_page.equality(read)["error"] is None


def test_a_list_of_runs_may_hold_folders_and_names_with_commas(sweep):
    one, two = folders(sweep, (0.25, 1), (1.0, 0))
    assert find_listed(f"{one},{two},{one}") == [one, two]
    assert find_listed(f"{two},{sweep}")[0] == two
    assert len(find_listed(str(sweep))) == len(PERCENTAGES) * len(SEEDS)


# --- The headline ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("differences", "claims"),
    [
        ([-0.006, -0.007, -0.008], "0.0070 nats per token below RoPE’s (95 % interval over"),
        ([-0.001, -0.010, -0.001], "is not distinguishable from RoPE"),
        ([-0.007], "One run of each cannot tell"),
        ([+0.001, +0.010, +0.001], "p = 1 has the lowest validation perplexity, 5.0000. Not"),
        ([+0.006, +0.007, +0.008], "p = 1 has the lowest validation perplexity, 5.0000. It was"),
    ],
)
def test_the_headline_claims_no_more_than_the_interval(differences, claims):
    """The mean of −0.001, −0.010, −0.001 is 1.33 standard errors below 0; 4.3 are needed."""
    difference = average_seeds(differences)
    better = difference.difference < 0
    rope = dict.fromkeys(("reference", "difference"))
    rope |= {
        "group": "p = 1",
        "compared_with": "RoPE",
        "over": "",
        "perplexity": 5.0,
        "best": not better,
    }
    row = rope | {"group": "p = 0.75", "reference": "p = 1", "difference": difference}
    row |= {"over": "3 seeds", "perplexity": 4.9 if better else 5.1, "best": better}
    lead = sweep_page.lead([row, rope])
    assert claims in lead
    assert "selected as the best of 2 after the results were seen" in lead


# --- What may be concluded ------------------------------------------------------------------------


def test_a_page_of_one_seed_says_that_it_cannot_tell(sweep):
    assert "With one seed" not in write_page(sweep).text
    for path in sweep.glob("*,seed=1"):
        shutil.rmtree(path)
    assert "With one seed this page cannot tell any two methods apart" in write_page(sweep).text


def test_contrasts_are_declared_by_the_names_of_groups(sweep):
    """The same the other way round is none; a group of several fields has commas in its name."""
    texts = ["nope,p=1", "p = 0, p = 0.25", "rope,p=0"]
    comparisons.declare(sweep, sweep, texts)
    expected = [["p = 0", "p = 1"], ["p = 0", "p = 0.25"]]
    declared = [{"groups": groups, "evaluated": 6} for groups in expected]
    assert read_lines(sweep / "contrasts.jsonl") == declared
    edit_values(sweep, lambda values: values.update(rope_type="partial"))
    comparisons.declare(sweep, sweep, ["p=0.25,rope_type=partial,rope,rope_type=partial"])
    *_, record = read_lines(sweep / "contrasts.jsonl")
    assert record["groups"] == ["p = 0.25, rope_type = partial", "p = 1, rope_type = partial"]


def test_contrasts_of_no_two_groups_are_refused(sweep):
    for text in ("p=0.75,rope", "rope", "rope,p=1", ""):
        with pytest.raises(UsageError, match=f"^--contrast={text}: .*p=0.25, p=1, rope"):
            comparisons.declare(sweep, sweep, ["p=0,p=1", text])
        assert not (sweep / "contrasts.jsonl").exists()


def test_contrasts_are_declared_before_results_are_read(sweep, monkeypatch):
    def stop(directory):
        assert read_lines(directory / "contrasts.jsonl")[0]["evaluated"] == 0
        raise InterruptedError

    for path in sweep.glob("*/eval.jsonl"):
        path.write_text("")  # as it is from the start of a run
    monkeypatch.setattr(sweep_page, "read_sweep", stop)
    with pytest.raises(InterruptedError):
        sweep_page.report_sweep(sweep, contrasts=["p=0.25,rope"])


def test_declared_contrasts_are_corrected_for_their_number(sweep, monkeypatch):
    """Intervals by Bonferroni, p-values by Holm; of each contrast's own differences."""
    monkeypatch.setattr(sweep_page, "pictures", lambda *_: [])
    sweep_page.report_sweep(sweep, contrasts=["p=0.25,rope"])
    result = sweep_page.report_sweep(sweep, contrasts=["p=0,p=0.25"])
    losses = {p: finals(sweep, p) for p in PERCENTAGES}
    p_values = []
    sign_flips = []
    contrasts = [(0.25, 1.0), (0.0, 0.25)]
    for (first, second), contrast in zip(contrasts, result["contrasts"], strict=True):
        test = stats.ttest_rel(losses[first], losses[second])
        assert contrast["difference"] == pytest.approx(np.mean(losses[first] - losses[second]))
        assert contrast["interval"] == pytest.approx(tuple(test.confidence_interval(0.975)))
        p_values.append(test.pvalue)
        differences = losses[first] - losses[second]
        signed = [differences @ signs for signs in itertools.product((1, -1), repeat=2)]
        sign_flips.append(np.mean(np.abs(signed) >= abs(differences.sum()) - 1e-12))
    expected, flipped = (
        [min(1, max(2 * min(found), p)) for p in found] for found in (p_values, sign_flips)
    )
    assert [one["p_value"] for one in result["contrasts"]] == pytest.approx(expected)
    assert [one["sign_flip_p_value"] for one in result["contrasts"]] == pytest.approx(flipped)
    page = Page(sweep / "report" / "index.html")
    rows = table_with(page, "contrast")
    assert column(rows, 0) == ["p = 0.25 minus p = 1", "p = 0 minus p = 0.25"]
    assert column(rows, 3) == [f"{p:.2g}" for p in expected]
    assert column(rows, 4) == [f"{p:.2g}" for p in flipped]
    assert column(rows, 5) == ["when 6 runs had a result"] * 2


def lose_evaluation(folder):
    (folder / "eval.jsonl").unlink()


def lose_predicted_tokens(folder):
    records = read_lines(folder / "eval.jsonl")
    write_lines(folder / "eval.jsonl", [one | UNPREDICTED | {"by_position": []} for one in records])


@pytest.mark.parametrize("p", PERCENTAGES)
@pytest.mark.parametrize("lose", [shutil.rmtree, lose_evaluation, lose_predicted_tokens])
def test_means_over_different_seeds_have_no_best(sweep, lose, p, undrawn, caplog):
    """On the page, in JSON, in the terminal: the lowest mean is that of an easy seed."""
    for folder in (run_folder(sweep, p, seed) for seed in SEEDS):
        for path in folder.glob("eval.jsonl"):
            easy = {"loss": 0.5, "perplexity": math.exp(0.5)}
            records = [one | easy for one in read_lines(path) if one["loss"] < 2]
            write_lines(path, records)
    assert [row["selected_best"] for row in sweep_page.report_sweep(sweep)["table"]].count(
        True
    ) == 1
    lose(run_folder(sweep, p, 1))
    result = sweep_page.report_sweep(sweep)
    assert not any(row["selected_best"] for row in result["table"])
    assert [row["seeds"] for row in result["table"]] == [
        [0] if q == p else [0, 1] for q in PERCENTAGES
    ]
    page = Page(sweep / "report/index.html")
    for claim in ("selected best", "has the lowest", "selected as the best"):
        assert claim not in page.text.replace("marked as the selected best", "")
    assert "over different seeds" in page.text
    text = runs.table_text(runs.table(runs.read_sweep(sweep)))
    assert "seeds" in text and "[0, 1]" in text and "[0] " in text


@pytest.mark.parametrize("name", ["loss", "perplexity"])
def test_a_picture_of_means_over_different_seeds_says_so(sweep, name):
    for is_lost in (False, True):
        if is_lost:
            shutil.rmtree(run_folder(sweep, 0.25, 1))
        drawn = {picture.name: picture for picture in pictures(*read_rows(sweep))}
        means, *_ = draw_picture(drawn[name]).axes
        assert ("different seeds" in means.get_title()) == is_lost
        joined = any(line.get_linestyle() == "-" for line in means.lines)
        assert name == "loss" or joined != is_lost


def test_groups_of_which_all_runs_failed_leave_a_best_among_the_others(sweep, undrawn):
    for seed in SEEDS:
        lose_evaluation(run_folder(sweep, 0.25, seed))
    rows = sweep_page.report_sweep(sweep)["table"]
    others = [finals(sweep, p, "perplexity").mean() for p in (0.0, 1.0)]
    expected = [others[0] < others[1], False, others[1] < others[0]]
    assert [row["selected_best"] for row in rows] == expected


def test_runs_that_are_not_finished_are_named_with_the_reason(sweep, undrawn):
    """By what the sweep knows; how far a run got by its files, if it is still to be trained."""
    killed = run_folder(sweep, 0.25, 1).name
    shutil.rmtree(sweep / killed)  # before it wrote anything
    lose_evaluation(run_folder(sweep, 0, 0))
    path = sweep / "sweep.json"
    entries = json.loads(path.read_text())
    for entry in entries["runs"]:
        entry["reason"] = "signal SIGKILL" if entry["name"] == killed else None
        if entry["name"] == run_folder(sweep, 1.0, 0).name:
            entry["reason"] = "exit code 1, of before it was finished by hand"
    path.write_text(json.dumps(entries))
    expected = {
        run_folder(sweep, 0, 0).name: "unfinished",
        killed: "signal SIGKILL",
        "to come": "not begun",
    }
    entries = sweep_page.report_sweep(sweep)["unfinished"]
    reasons = {entry["name"]: entry.get("reason") for entry in entries}
    assert reasons == {name: "signal SIGKILL" if name == killed else None for name in expected}
    page = Page(sweep / "report/index.html")
    assert dict(table_with(page, "why")) == expected
    assert "4 of 7 runs finished; 3 are not" in page.text


@pytest.mark.parametrize(
    ("losses", "deviation"),
    [
        ([2.0, 2.0 + 4e-16], 0.0),
        ([0.1 + 0.2, 0.3], 0.0),
        ([1e3 / 3, 1e3 / 3 + 1e-13, 1e3 / 3], 0.0),
        ([2.0, 2.0 + 2e-9], math.sqrt(2) * 1e-9),
    ],
)
def test_rounding_is_no_deviation(sweep, losses, deviation):
    """Nor does a mean of two differences that are equal but for it tell two methods apart."""
    assert deviation_of(losses) == pytest.approx(deviation, rel=1e-6)
    differences = [2.3 - 2.0, 0.3, 0.1 + 0.2]
    assert 0 < statistics.stdev(differences) < 1e-15
    apart = average_seeds(differences)
    assert apart.difference == pytest.approx(0.3)
    assert (apart.stderr, apart.interval(), apart.p_value) == (None, None, None)
    assert not apart.distinguishable
    for p in PERCENTAGES:
        for seed in SEEDS:
            path = run_folder(sweep, p, seed) / "eval.jsonl"
            loss = 2 + 0.1 * seed - 0.3 * (p < 1)
            values = {"loss": loss, "perplexity": math.exp(loss)}
            write_lines(path, [one | values for one in read_lines(path)])
    rows = read_rows(sweep)[1]
    assert [row["difference"] and row["difference"].stderr for row in rows] == [None] * 3
    text = write_page(sweep).text
    assert "The differences of all seeds are equal, so there is no interval" in text
    assert "distinguishable" not in text.replace("cannot tell", "")


# --- Losses by length, with and without what is far back ------------------------------------------

# Losses with a window minus those without, by seed: the second is the best.
CHANGES = {(64, 0): (0.5, 0.7), (128, 4): (0.1, 0.3), (192, 0): (0.9, -0.1)}


@pytest.fixture
def cut(sweep):
    """A sweep whose runs of p = 0 have evaluations with windows, all but one of every seed."""
    for seed in SEEDS:
        path = run_folder(sweep, 0, seed) / "eval.jsonl"
        records = read_lines(path)
        plain = plain_record(records)
        for (window, sinks), changes in CHANGES.items():
            loss = plain["loss"] + changes[seed]
            records.append(plain | {"window": window, "sinks": sinks, "loss": loss})
        if seed == 0:
            alone = {"window": 8, "sinks": 0, "loss": 0.001}
            records.append(plain | alone)
        write_lines(path, records)
    return sweep


def plain_record(records) -> dict:
    """The last step's evaluation of all windows at the longest length, as it is."""
    plain = []
    for record in records:
        is_whole = record["step"] == 10 and record.get("max_windows") is None
        if is_whole and "encoding" not in record:
            plain.append(record)
    return max(plain, key=lambda record: record["seq_len"])


def test_the_best_window_and_the_gain_from_context(cut, undrawn):
    """Means over seeds; a window that a seed lacks does not count; p = 1 has none."""
    plain = [plain_record(read_lines(run_folder(cut, 0, seed) / "eval.jsonl")) for seed in SEEDS]
    T = plain[0]["seq_len"]
    loss = np.mean([record["loss"] for record in plain])
    changes = CHANGES[128, 4]
    printed = sweep_page.report_sweep(cut)["lengths"]
    by_place = {(row["group"], row["seq_len"]): row for row in printed}
    row = by_place["p = 0", T]
    assert row["loss"] == pytest.approx(loss)
    assert (row["window"], row["sinks"]) == (128, 4)
    assert row["window_loss"] == pytest.approx(loss + np.mean(changes))
    assert row["gain"] == pytest.approx(np.mean(changes))
    expected = stats.ttest_1samp(changes, 0).confidence_interval(0.95)
    assert row["interval"] == pytest.approx(tuple(expected))
    assert "window" not in by_place["p = 1", T] and "window" not in by_place["p = 0", T // 2]
    table = table_with(Page(cut / "report" / "index.html"), "gain from context")
    (best,) = [row for row in table if row[3].startswith("128") and row[3].endswith("4")]
    assert best[-1].startswith("+0.2000 (")


def test_one_length_alone_and_a_run_that_is_not_finished(cut):
    """Its evaluations with windows are enough for a row; runs that go on do not hide it."""
    for seed in SEEDS:
        path = run_folder(cut, 0, seed) / "eval.jsonl"
        records = read_lines(path)
        T = plain_record(records)["seq_len"]
        write_lines(path, [one | {"seq_len": 256} for one in records if one["seq_len"] == T])
    read = runs.read_sweep(cut)
    going_on = dataclasses.replace(read[0], step=5, evaluations=[])
    (row,) = [row for row in context.rows([*read, going_on]) if row.group == "p = 0"]
    assert row.seq_len == 256
    assert row.window == 128


# --- Pictures -------------------------------------------------------------------------------------


def logged(sweep, p) -> np.ndarray:
    """Training losses [seed, logged step]."""
    losses = []
    for seed in SEEDS:
        records = read_lines(run_folder(sweep, p, seed) / "metrics.jsonl")
        losses.append([record["loss"] for record in records])
    return np.array(losses)


def assert_line(line, x, y) -> None:
    drawn_x, drawn_y = line
    assert drawn_x == list(x)
    np.testing.assert_allclose(drawn_y, y)


def bucket_means(sweep, name, measure, p, seq_len) -> np.ndarray:
    """Means over seeds of a measure of every bucket."""
    rows = []
    for buckets in finals(sweep, p, name, seq_len):
        rows.append([bucket[measure] for bucket in buckets])
    return np.mean(rows, axis=0)


def test_the_pictures_show_what_the_files_say(reported):
    sweep, _ = reported
    drawn = pictures_by_name(sweep)
    assert list(drawn) == [
        "perplexity",
        "loss",
        "position",
        "length",
        "far",
        "accuracy-copy",
        "accuracy-recall",
    ]
    losses, differences = lines_of(drawn["loss"])
    for i, p in enumerate(PERCENTAGES):
        assert_line(losses[i], STEPS, logged(sweep, p).mean(axis=0))
        if p < 1:
            apart = logged(sweep, p) - logged(sweep, 1.0)
            assert_line(differences[i], STEPS, apart.mean(axis=0))
    accuracy = bucket_means(sweep, "accuracy_by_distance", "accuracy", 0, 512)
    for name, x, y in (
        ("position", [32, 96], bucket_means(sweep, "by_position", "loss", 0, 256)),
        ("length", [256, 512], [finals(sweep, 0, "loss", T).mean() for T in (256, 512)]),
        ("far", [32, 96], bucket_means(sweep, "by_position", "loss", 0, 512)),
        ("accuracy-copy", [12, 24], accuracy[:2]),
        ("accuracy-recall", [12, 24], accuracy[2:]),
        ("perplexity", PERCENTAGES, means_by_p(sweep)),
    ):
        lines, _ = lines_of(drawn[name])
        assert_line(lines[0], x, y)


def test_errors_of_perplexity_are_deviations_and_those_of_differences_intervals(reported):
    sweep, _ = reported
    perplexity, difference = draw_picture(pictures_by_name(sweep)["perplexity"]).axes
    for p, ends in zip(PERCENTAGES, error_bars(perplexity), strict=True):
        values = finals(sweep, p, "perplexity")
        reach = statistics.stdev(values)
        assert ends == pytest.approx((values.mean() - reach, values.mean() + reach))
    for p, ends in zip((0, 0.25), error_bars(difference), strict=True):
        assert ends == pytest.approx(interval(sweep, p))


def band_ends(axes, number=0) -> dict[float, tuple[float, float]]:
    """The ends of a line's band, by x."""
    (path,) = axes.collections[number].get_paths()
    x, y = path.vertices.T
    return {at: (y[x == at].min(), y[x == at].max()) for at in set(x)}


def test_bands_are_intervals_over_seeds_and_of_a_single_run_over_documents(sweep):
    """Those of positions; the octave of two buckets has the mean of theirs, by tokens."""
    path = run_folder(sweep, 0) / "eval.jsonl"
    records = read_lines(path)
    *_, last = records[-2]["by_position"]
    records[-2]["by_position"].append(last | {"from": 96, "to": 128, "tokens": 27})
    errors = (0.1, 0.2, 0.3)
    for record in records:
        for bucket, stderr in zip(record.get("by_position", []), errors, strict=False):
            bucket |= {"documents": 12, "loss_stderr": stderr}
    write_lines(path, records)
    axes, _ = draw_picture(pictures_by_name(sweep)["position"]).axes
    losses = [[bucket["loss"] for bucket in row] for row in finals(sweep, 0, "by_position")]
    ends = band_ends(axes)
    for place, of_seeds in zip((32, 96), zip(*losses, strict=True), strict=True):
        expected = stats.ttest_1samp(of_seeds, 0).confidence_interval(0.95)
        assert ends[place] == pytest.approx(tuple(expected))
    shutil.rmtree(run_folder(sweep, 0, 1))
    drawn = pictures_by_name(sweep)
    t = stats.t.ppf(0.975, 11)
    far = [0.1, (9 * 0.2 + 27 * 0.3) / 36]
    for name, stderrs in (("position", errors[:2]), ("far", far)):
        axes, _ = draw_picture(drawn[name]).axes
        ends = band_ends(axes)
        for x, y, stderr in zip(*axes.lines[0].get_data(), stderrs, strict=True):
            assert ends[x] == pytest.approx((y - t * stderr, y + t * stderr))


def error_bars(axes) -> list[tuple[float, float]]:
    """The ends of all error bars."""
    (bars,) = axes.containers
    (collection,) = bars.lines[2]
    return [tuple(segment[:, 1]) for segment in collection.get_segments()]


def stand_in(evaluations, seq_len=256) -> SimpleNamespace:
    """What pictures read of a run at its last step."""
    spec = Spec(data=DataSpec(seq_len=seq_len))
    records = [{"step": 10, "dataset": "python_docs"} | one for one in evaluations]
    return SimpleNamespace(spec=spec, evaluations=records, metrics=[1], last_step=10)


def test_positions_in_long_windows_are_put_together_by_octaves():
    buckets = []
    for k in range(8):
        start = 1024 * k
        bucket = {"from": start, "to": start + 1024}
        buckets.append(bucket | {"loss": float(start), "tokens": 1 + k})
    others = [{"seq_len": 16_384}, {"seq_len": 256, "by_position": buckets[:1]}]
    longest = {"seq_len": 8192, "by_position": buckets}
    shorter = {"seq_len": 512, "by_position": buckets[1:2]}
    assert curves.by_octave(stand_in([shorter, longest, *others])) == pytest.approx(
        {
            512: 0,
            1536: 1024,
            3072: (3 * 2048 + 4 * 3072) / 7,
            6144: (5 * 4096 + 6 * 5120 + 7 * 6144 + 8 * 7168) / 26,
        }
    )
    assert curves.by_octave(stand_in(others)) == {}


def test_lengths_are_compared_on_the_fullest_text_that_has_several():
    evaluations = []
    for fingerprint, max_windows, lengths in (
        ("only one", None, [4096]),
        ("full", None, [256, 512]),
        ("few", 48, [256, 512, 1024]),
    ):
        text = {"fingerprint": fingerprint, "max_windows": max_windows}
        for seq_len in lengths:
            loss = f"{fingerprint}, {seq_len}"
            evaluations.append(text | {"seq_len": seq_len, "loss": loss})
    trained_on = {"split": "train", "fingerprint": "trained on", "loss": 0.0}
    seen = [trained_on | {"seq_len": seq_len} for seq_len in (256, 512, 1024)]
    by_length = {256: "full, 256", 512: "full, 512"}
    assert curves.by_length(stand_in(evaluations + seen)) == by_length
    imported = stand_in([one | {"dataset": "files"} for one in evaluations])
    imported.metrics = []
    assert curves.by_length(imported) == by_length, "an import has no data of its own"
    assert curves.by_length(stand_in(evaluations[:1])) == {}
