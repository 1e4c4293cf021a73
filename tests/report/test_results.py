"""Tables of configs/results are those of the records beside them, which redraw the sweep's page."""

import pathlib
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


def read_loss(workdir: pathlib.Path, seq_len: int) -> float:
    """The loss of a run's evaluation on 131,072 tokens, in windows of this length."""
    records = read_lines(workdir / "eval.jsonl")
    (loss,) = [
        record["loss"]
        for record in records
        if record["seq_len"] == seq_len
        and record.get("max_tokens") == 131_072
        and record.get("window") is None
    ]
    return loss


def slow_pairs_rows(folder: pathlib.Path) -> list[str]:
    """Of each wavelength and length: losses at it and at 8 times it, and the latter minus RoPE's.

    The intervals of a wavelength and length hold together.
    """
    settings: dict[tuple[str, str], dict[str, dict[str, pathlib.Path]]] = {}
    for workdir in sorted(folder.glob("config=*,seed=*")):
        name, seed = re.fullmatch(r"config=(.+),seed=(\d+)", workdir.name).groups()
        method, wavelength, length = name.split("-")
        setting = settings.setdefault((wavelength, length), {})
        setting.setdefault(method, {})[seed] = workdir
    rows = []
    for (wavelength, length), methods in settings.items():
        T = int(length)
        rope = {seed: read_loss(workdir, 8 * T) for seed, workdir in methods["rope"].items()}
        for method, by_seed in methods.items():
            near = np.mean([read_loss(workdir, T) for workdir in by_seed.values()])
            far = {seed: read_loss(workdir, 8 * T) for seed, workdir in by_seed.items()}
            minus_rope = ["", ""]
            if method != "rope":
                differences = [loss - rope[seed] for seed, loss in far.items()]
                minus_rope = paired_cells(differences, len(methods) - 1, digits=3)
            means = [f"{near:.3f}", f"{np.mean(list(far.values())):.3f}"]
            cells = [wavelength, length, method, str(len(by_seed)), *means, *minus_rope]
            rows.append(table_row(cells))
    return rows


def converted_length_rows(folder: pathlib.Path, report: dict) -> list[str]:
    """Of converted models: `length_rows`, then the loss at the longest minus that of p = 1."""
    losses: dict[str, dict[str, float]] = {}
    for workdir in sorted(folder.glob("rope_percentage=*")):
        p, seed = re.fullmatch(r"rope_percentage=([\d.]+),seed=(\d+)", workdir.name).groups()
        losses.setdefault(f"p = {p}", {})[seed] = read_loss(workdir, 4096)
    control = losses.pop("p = 1")
    rows = []
    for row in length_rows(report):
        group = row.split(" | ")[0].strip("| ")
        cells = ["", ""]
        if group in losses:
            differences = [loss - control[seed] for seed, loss in losses[group].items()]
            cells = paired_cells(differences, len(losses))
        rows.append(f"{row} {' | '.join(cells)} |")
    return rows


def converted_smollm2_rows(folder: pathlib.Path) -> list[str]:
    """By p: the loss at each length on the same tokens, and that at 8192 minus the control's."""
    losses: dict[str, list[dict[int, float]]] = {}
    for workdir in sorted(folder.glob("rope_percentage=*")):
        p = re.match(r"rope_percentage=([\d.]+)", workdir.name)[1]
        records = read_lines(workdir / "eval.jsonl")
        (longest,) = [record for record in records if record["seq_len"] == 16_384]
        by_length = {
            record["seq_len"]: record["loss"]
            for record in records
            if record["fingerprint"] == longest["fingerprint"] and not record.get("window")
        }
        losses.setdefault(p, []).append(by_length)
    rows = []
    for p, by_seed in sorted(losses.items(), reverse=True):
        means = [np.mean([found[T] for found in by_seed]) for T in sorted(by_seed[0])]
        minus_control = ["", ""]
        if p != "1":
            pairs = zip(by_seed, losses["1"], strict=True)
            differences = [found[8192] - control[8192] for found, control in pairs]
            minus_control = paired_cells(differences, len(losses) - 1)
        rows.append(table_row([p, *(f"{mean:.4f}" for mean in means), *minus_control]))
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


def unpack(name: str, folder: epath.Path, page: str | None = None) -> list[str]:
    """Unpacks records and returns the lines of their page, by default that of the same name."""
    with tarfile.open(RESULTS / f"{name}.tar.xz") as records:
        records.extractall(folder, filter="data")
    return (RESULTS / f"{page or name}.md").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encodings_controlled", "encodings_python", "slow_pairs"])
def test_a_sweep_is_redrawn_from_its_records(name, tmp_path):
    lines = unpack(name, tmp_path)
    report = report_sweep(epath.Path(tmp_path))
    assert (tmp_path / "report/index.html").exists()
    assert {run["state"] for run in report["runs"]} == {"finished"}
    rows = loss_rows(report) + contrast_rows(report)
    rows += slow_pairs_rows(tmp_path) if name == "slow_pairs" else length_rows(report)
    assert [row for row in rows if row not in lines] == []


@pytest.mark.parametrize("model", ["gemma-3-270m", "SmolLM2-135M-Instruct"])
def test_what_real_models_do_with_their_pairs_is_in_their_records(model, tmp_path):
    lines = unpack("real_models", tmp_path)
    rows = band_rows(epath.Path(tmp_path) / model)
    assert len(rows) >= 6
    assert [row for row in rows if row not in lines] == []


@pytest.mark.slow
def test_conversions_of_small_models_are_redrawn_from_their_records(tmp_path):
    lines = unpack("conversion_1m", tmp_path, "real_models")
    report = report_sweep(epath.Path(tmp_path))
    rows = recovery_rows(report) + converted_length_rows(tmp_path, report)
    assert len(rows) == 7
    assert [row for row in rows if row not in lines] == []


def test_conversions_of_smollm2_are_redrawn_from_their_records(tmp_path):
    lines = unpack("conversion_smollm2", tmp_path, "real_models")
    report = report_sweep(epath.Path(tmp_path))
    rows = recovery_rows(report) + converted_smollm2_rows(tmp_path)
    assert len(rows) == 8
    assert [row for row in rows if row not in lines] == []
