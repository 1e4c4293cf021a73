"""Tables of configs/results are those of the records beside them, which redraw the sweep's page."""

import re
import tarfile

import numpy as np
import pytest
from etils import epath
from support.commands import ROOT
from support.text import read_lines

from prope.inference.paired import paired_difference
from prope.inference.statistics import average_seeds
from prope.sweep.page import report_sweep

RESULTS = ROOT / "configs/results"


def signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.4f}"


def interval(values) -> str:
    return f"{signed(values[0])} to {signed(values[1])}" if values else ""


def table_row(cells) -> str:
    return f"| {' | '.join(cells)} |"


def loss_rows(report: dict) -> list[str]:
    """After training, at the length of training."""
    rows = []
    for row in report["table"]:
        difference = row["minus_rope"] or {"loss": None, "interval": None}
        cells = (
            row["config"],
            str(row["runs"]),
            f"{row['eval_loss']:.4f}",
            f"{row['eval_loss_sd']:.4f}",
            signed(difference["loss"]),
            interval(difference["interval"]),
        )
        rows.append(table_row(cells))
    return rows


def length_rows(report: dict) -> list[str]:
    """By length; at the longest, beside the best truncated window of the same checkpoints."""
    groups: dict[str, list[dict]] = {}
    for row in report["lengths"]:
        groups.setdefault(row["group"], []).append(row)
    rows = []
    for name, lengths in groups.items():
        longest = lengths[-1]
        cells = [name, *(f"{row['loss']:.4f}" for row in lengths)]
        if "window" in longest:
            sinks = f" + {longest['sinks']} first" if longest["sinks"] else ""
            cells += [f"{longest['window']}{sinks}", f"{longest['window_loss']:.4f}"]
            cells += [signed(longest["gain"]), interval(longest["interval"])]
        else:
            cells += ["every layer has one", "", "", ""]
        rows.append(table_row(cells))
    return rows


def contrast_rows(report: dict) -> list[str]:
    """The contrasts that were declared, by Holm."""
    rows = []
    for contrast in report["contrasts"]:
        cells = (
            f"{contrast['group']} - {contrast['other']}",
            signed(contrast["difference"]),
            interval(contrast["interval"]),
            f"{contrast['p_value']:.3g}",
        )
        rows.append(table_row(cells))
    return rows


def paired_cells(by_seed: list[float], comparisons: int, digits: int = 4) -> list[str]:
    """The mean of differences by seed, and its 95 % interval: Student's t, by Bonferroni."""
    difference = average_seeds(list(by_seed))._replace(comparisons=comparisons)
    low, high = (f"{end:+.{digits}f}" for end in difference.interval())
    return [f"{difference.difference:+.{digits}f}", f"{low} to {high}"]


def recovery_rows(report: dict) -> list[str]:
    """What stopping pairs costs before and after training, minus the control of the same seed."""
    by_p: dict[str, list[dict]] = {}
    for recovery in report["recovery"]:
        p = re.search(r"rope_percentage=([\d.]+)", recovery["run"])[1]
        by_p.setdefault(p, []).append(recovery)
    contrasts = {contrast["group"]: contrast for contrast in report["contrasts"]}
    rows = []
    for p, found in by_p.items():
        curves = np.array([recovery["gaps"] for recovery in found])
        stopped, *_, trained = curves[:, :, 1].T
        contrast = contrasts[f"p = {p}"]
        assert round(contrast["difference"] - np.mean(trained), 6) == 0
        back = [recovery["tokens"] for recovery in found if recovery["tokens"] is not None]
        cells = (
            p,
            str(len(found)),
            signed(np.mean(stopped)),
            *paired_cells(trained, len(by_p)),
            f"{len(back)} of {len(found)}",
            f"{np.median(back):,.0f}" if back else "",
        )
        rows.append(table_row(cells))
    return rows


def band_rows(workdir: epath.Path) -> list[str]:
    """A model with bands of pairs stopped, beside the model as it is on the same tokens."""
    records = read_lines(workdir / "eval.jsonl")
    whole = {record["seq_len"]: record for record in records if not record.get("encoding")}
    rows = []
    for record in records:
        encoding = record.get("encoding")
        if not encoding:
            continue
        names = ("step", "seq_len", "fingerprint", "windows", "dataset", "split")
        about = {name: record[name] for name in names}
        about |= {"encoding": encoding, "factor": record["factor"]}
        plain = {"encoding": None, "factor": None}
        paired = paired_difference(workdir, workdir, about, second_fields=plain)
        cells = (
            workdir.name,
            str(record["seq_len"]),
            encoding,
            f"{whole[record['seq_len']]['loss']:.4f}",
            signed(paired.difference),
            interval(paired.interval()),
        )
        rows.append(table_row(cells))
    return rows


def unpack(name: str, folder: epath.Path, page: str | None = None) -> str:
    """Unpacks records and returns the text of their page, by default that of the same name."""
    with tarfile.open(RESULTS / f"{name}.tar.xz") as records:
        records.extractall(folder, filter="data")
    return (RESULTS / f"{page or name}.md").read_text()


def assert_shown(rows: list[str], text: str) -> None:
    """Rows of a page may have more columns at their end."""
    lines = text.splitlines()
    assert rows
    assert [row for row in rows if not any(line.startswith(row) for line in lines)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encodings_controlled", "encodings_python", "slow_pairs"])
def test_a_sweep_is_redrawn_from_its_records(name, tmp_path):
    text = unpack(name, tmp_path)
    report = report_sweep(epath.Path(tmp_path))
    assert (tmp_path / "report/index.html").exists()
    assert {run["state"] for run in report["runs"]} == {"finished"}
    lengths = [] if name == "slow_pairs" else length_rows(report)
    assert_shown(loss_rows(report) + contrast_rows(report) + lengths, text)


@pytest.mark.parametrize("model", ["gemma-3-270m", "SmolLM2-135M-Instruct"])
def test_what_real_models_do_without_bands_is_in_their_records(model, tmp_path):
    text = unpack("real_models", tmp_path)
    assert_shown(band_rows(epath.Path(tmp_path) / model), text)


@pytest.mark.parametrize(
    "name", [pytest.param("conversion_1m", marks=pytest.mark.slow), "conversion_smollm2"]
)
def test_conversions_are_redrawn_from_their_records(name, tmp_path):
    text = unpack(name, tmp_path, "real_models")
    report = report_sweep(epath.Path(tmp_path))
    lengths = length_rows(report) if name == "conversion_1m" else []
    assert_shown(recovery_rows(report) + lengths, text)
