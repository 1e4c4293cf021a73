"""Tables of configs/results are those of the records beside them, which redraw the sweep's page."""

import json
import pathlib
import re
import runpy
import tarfile

import numpy as np
import pytest
from etils import epath
from scipy import stats
from support.commands import ROOT
from support.text import read_lines

from prope.inference.paired import paired_difference, read_difference
from prope.inference.statistics import Difference, average_seeds, holm
from prope.pages.sweep import report_sweep

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
            f"{contrast['sign_flip_p_value']:.3g}",
        )
        rows.append(table_row(cells))
    return rows


def far_contrast_rows(folder: pathlib.Path, report: dict, seq_len: int) -> list[str]:
    """The same contrasts in longer windows than those of training, and the seeds that agree."""
    pairs = [(contrast["group"], contrast["other"]) for contrast in report["contrasts"]]
    found = []
    for pair in pairs:
        group, other = (
            [read_loss(run, seq_len) for run in sorted(folder.glob(f"config={name},seed=*"))]
            for name in pair
        )
        found.append(average_seeds([a - b for a, b in zip(group, other, strict=True)]))
    p_values = holm([difference.p_value for difference in found])
    rows = []
    for pair, difference, p_value in zip(pairs, found, p_values, strict=True):
        same_sign = sum(value * difference.difference > 0 for value in difference.values)
        cells = (" - ".join(pair), *paired_cells(difference.values, len(pairs)))
        cells += (f"{p_value:.3g}", f"{same_sign} of {difference.samples}")
        rows.append(table_row(cells))
    return rows


def paired_cells(by_seed: list[float], comparisons: int, digits: int = 4) -> list[str]:
    """The mean of differences by seed, and its 95 % interval: Student's t, by Bonferroni."""
    difference = average_seeds(list(by_seed))._replace(comparisons=comparisons)
    low, high = (f"{end:+.{digits}f}" for end in difference.interval())
    return [f"{difference.difference:+.{digits}f}", f"{low} to {high}"]


def recovery_rows(report: dict, folder: pathlib.Path | None = None) -> list[str]:
    """What stopping pairs costs before and after training, minus the control of the same seed.

    With a folder of runs, intervals are over documents of the mean over its runs.
    """
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
            *(document_cells(folder, p) if folder else paired_cells(trained, len(by_p))),
            f"{len(back)} of {len(found)}",
            f"{np.median(back):,.0f}" if back else "",
        )
        rows.append(table_row(cells))
    return rows


def document_cells(folder: pathlib.Path, p: str) -> list[str]:
    """The cost of a conversion of SmolLM2: the mean over orders of the text, and over documents."""
    about = {"step": 200, "fingerprint": "3dec684da8a0f72c"}
    orders = [
        read_difference(folder / f"rope_percentage={p},seed={seed}", control, about)
        for seed, control in enumerate(sorted(folder.glob("rope_percentage=1,seed=*")))
    ]
    sums = orders[0]._replace(loss=np.mean([order.loss for order in orders], axis=0))
    mean, stderr = sums.mean_and_stderr()
    documents = int((sums.tokens.sum(axis=1) > 0).sum())
    difference = Difference(mean, stderr, documents, comparisons=3)
    return [signed(mean), interval(difference.interval())]


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


def learning_rate_columns(folder: pathlib.Path) -> dict[str, list[str]]:
    """By method, the final loss at each learning rate, from the lowest."""
    columns: dict[str, dict[float, str]] = {}
    for workdir in folder.glob("config=*"):
        name = r"config=(.+)-rates,learning_rate=([\d.]+),seed=101"
        method, rate = re.fullmatch(name, workdir.name).groups()
        record = read_lines(workdir / "eval.jsonl")[-1]
        assert record["step"] == 300
        columns.setdefault(method, {})[float(rate)] = f"{record['loss']:.3f}"
    return {
        method: [by_rate[rate] for rate in sorted(by_rate)] for method, by_rate in columns.items()
    }


def slow_pairs_rows(folder: pathlib.Path) -> list[str]:
    """For each wavelength and length: losses at it and at 8 times it, and the latter minus RoPE's.

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
    """For converted models: `length_rows`, then the loss at the longest minus that of p = 1."""
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
    losses: dict[str, dict[str, dict[int, float]]] = {}
    for workdir in sorted(folder.glob("rope_percentage=*")):
        name = r"rope_percentage=([\d.]+),seed=(\d+)"
        p, seed = re.fullmatch(name, workdir.name).groups()
        records = read_lines(workdir / "eval.jsonl")
        (longest,) = [record for record in records if record["seq_len"] == 16_384]
        by_length = {
            record["seq_len"]: record["loss"]
            for record in records
            if record["fingerprint"] == longest["fingerprint"] and not record.get("window")
        }
        losses.setdefault(p, {})[seed] = by_length
    rows = []
    for p, by_seed in sorted(losses.items(), reverse=True):
        means = {}
        for T in sorted(by_seed["0"]):
            of_seeds = [found[T] for found in by_seed.values()]
            means[T] = np.mean(of_seeds)
        minus_control = ["", ""]
        if p != "1":
            costs = [found[8192] - losses["1"][seed][8192] for seed, found in by_seed.items()]
            orders = f"{signed(min(costs))} to {signed(max(costs))}"
            minus_control = [signed(np.mean(costs)), orders]
        at_lengths = [f"{mean:.4f}" for mean in means.values()]
        cells = [p, *at_lengths, *minus_control]
        rows.append(table_row(cells))
    return rows


def cut_smollm2_rows(folder: pathlib.Path, max_tokens: int, sinks: int) -> list[str]:
    """By p: the loss in windows of 8192 with all keys, and with attention cut to the last ones."""
    losses: dict[str, dict[int, list[float]]] = {}
    for workdir in sorted(folder.glob("rope_percentage=*")):
        p = re.match(r"rope_percentage=([\d.]+)", workdir.name)[1]
        by_cut = losses.setdefault(p, {})
        records = read_lines(workdir / "eval.jsonl")
        (text,) = {record["fingerprint"] for record in records if record.get("window")}
        for record in records:
            if record["fingerprint"] != text:
                continue
            assert record["max_tokens"] == max_tokens
            cut = record.get("window", 8192)
            assert record.get("sinks", sinks) == sinks
            of_seeds = by_cut.setdefault(cut, [])
            of_seeds.append(record["loss"])
    rows = []
    for p, by_cut in sorted(losses.items(), reverse=True):
        cells = [p]
        for cut in sorted(by_cut, reverse=True):
            mean = np.mean(by_cut[cut])
            cells.append(f"{mean:.4f}")
        rows.append(table_row(cells))
    return rows


def largest_difference(folder: pathlib.Path, other: pathlib.Path) -> float:
    """From the losses that two runs have in common, on the windows that they saw while training."""
    pair = []
    for workdir in (folder, other):
        records = read_lines(workdir / "eval.jsonl")
        while_training = [
            (record["step"], record["loss"])
            for record in records
            if record.get("max_windows") == 16
        ]
        pair.append(while_training)
    ours, theirs = np.array(pair)
    assert len(ours) >= 9
    difference = np.abs(ours - theirs)
    steps, losses = difference.T
    assert not steps.any()
    return losses.max()


def usage_rows(analysis: dict) -> list[str]:
    """For each kind of layers: norms of the slow quarter of the pairs over the fast, and heads."""
    heads = analysis["heads"]
    rows = []
    for kind in analysis["kinds"]:
        layers = [analysis["layers"][layer] for layer in kind["layers"]]
        of_kind = [head for head in heads if head["layer"] in kind["layers"]]
        positional = sum(head["kind"] in ("diagonal", "previous_token") for head in of_kind)
        sinks = sum(head["kind"] == "first_token" for head in of_kind)
        queries, keys, values = (
            np.mean([np.mean(layer[norms], 0) for layer in layers], 0)
            for norms in ("query_norms", "key_norms", "value_norms")
        )
        cells = (
            pathlib.PurePath(analysis["workdir"]).name,
            "full" if kind["sliding_window"] is None else "sliding",
            *(f"{slow_over_fast(norms):.2f}" for norms in (queries, keys, values)),
            describe_longest(analysis, kind, queries),
            describe_longest(analysis, kind, keys),
            f"{positional} of {len(of_kind)}",
            str(sinks),
            f"{np.mean([head['first_token'] for head in of_kind]):.2f}",
        )
        rows.append(table_row(cells))
    return rows


def describe_longest(analysis: dict, kind: dict, norms: np.ndarray) -> str:
    """The pair with the largest norm, and how far it turns over the window or the context."""
    pair = int(np.argmax(norms))
    frequency = analysis["frequencies"][kind["layers"][0]][pair]
    length = kind["sliding_window"] or analysis["trained_on"]
    return f"{pair}: {frequency * length:.2f}"


def slow_over_fast(norms: np.ndarray) -> float:
    """The mean norm of the slowest quarter of the pairs over that of the fastest."""
    quarters = norms.reshape(4, -1).mean(axis=1)
    return quarters[3] / quarters[0]


def channel_rows(analysis: dict) -> list[str]:
    """The strongest pairs of single heads, and the loss without their rotation and without them."""
    rows = []
    for channel in analysis["channels"]:
        stopped = channel["stopped"]
        removed = channel["removed"]
        cells = (
            pathlib.PurePath(analysis["workdir"]).name,
            f"{channel['layer']}.{channel['head']}.{channel['pair']}",
            f"{channel['largest_rotation']:.2f}",
            f"{channel['to_first']:+.1f}",
            f"{channel['to_others']:+.1f}",
            f"{stopped['difference']:+.4f} ± {stopped['stderr']:.4f}",
            f"{removed['difference']:+.4f} ± {removed['stderr']:.4f}",
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


def search_row(folder: epath.Path) -> str:
    """A small set of pairs that must rotate, and what stopping the others adds."""
    found = json.loads((folder / "search.json").read_text())
    records = read_lines(folder / "search_evaluations.jsonl")
    losses = {record.get("encoding"): record["loss"] for record in records}
    assert len(records) == found["evaluations"]
    (of_kind,) = found["rotating"]
    of_p_rope = found["p_rope"]
    as_it_is = losses[None]
    loss = losses[found["encoding"]]
    loss_of_p_rope = losses[of_p_rope["encoding"]]
    cells = (
        folder.name,
        of_kind["layers"],
        f"{of_kind['rotating']} of {of_kind['of']}",
        of_kind["pairs"],
        f"{as_it_is:.4f}",
        signed(loss - as_it_is),
        interval(found["minus_unchanged"]["interval"]),
        signed(loss_of_p_rope - as_it_is),
        signed(loss_of_p_rope - loss),
        interval(of_p_rope["minus_found"]["interval"]),
        str(len(records)),
    )
    return table_row(cells)


def unpack(name: str, folder: epath.Path, page: str | None = None) -> list[str]:
    """Unpacks records and returns the lines of their page, by default that of the same name."""
    with tarfile.open(RESULTS / f"{name}.tar.xz") as records:
        records.extractall(folder, filter="data")
    return (RESULTS / f"{page or name}.md").read_text().splitlines()


# The index; the paper's figures; hashes of texts; contrasts that are declared for runs to come.
WITHOUT_RECORDS = {"README", "gemma_2b", "wiki_sample_articles", "unrotated_or_fast"}


def test_a_page_has_records_beside_it_or_says_that_there_are_none():
    for page in RESULTS.glob("*.md"):
        text = page.read_text()
        if page.stem not in WITHOUT_RECORDS:
            records = re.findall(r"`(\w+\.tar\.xz)`", text)
            assert records or re.search(r"no records [\w ]*kept", text, re.I), page
            assert all((RESULTS / name).exists() for name in records), page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encodings_controlled", "encodings_python", "slow_pairs"])
def test_a_sweep_is_redrawn_from_its_records(name, tmp_path):
    lines = unpack(name, tmp_path)
    report = report_sweep(epath.Path(tmp_path))
    assert (tmp_path / "report/index.html").exists()
    assert {run["state"] for run in report["runs"]} == {"finished"}
    rows = loss_rows(report) + contrast_rows(report)
    if name == "slow_pairs":
        rows += slow_pairs_rows(tmp_path) + far_contrast_rows(tmp_path, report, 4096)
    else:
        rows += length_rows(report)
    assert [row for row in rows if row not in lines] == []


@pytest.mark.parametrize("model", ["gemma-3-270m", "SmolLM2-135M-Instruct"])
def test_what_real_models_do_with_their_pairs_is_in_their_records(model, tmp_path):
    lines = unpack("real_models", tmp_path)
    folder = epath.Path(tmp_path) / model
    bands = [row for run in sorted(folder.parent.glob(f"{model}*")) for row in band_rows(run)]
    assert len(bands) >= 6
    analysis = json.loads((folder / "analysis/analysis.json").read_text())
    rows = bands + usage_rows(analysis) + channel_rows(analysis) + [search_row(folder)]
    assert [row for row in rows if row not in lines] == []


def test_learning_rates_are_in_their_records(tmp_path):
    lines = unpack("learning_rates", tmp_path, "encodings_controlled")
    columns = learning_rate_columns(tmp_path)
    table = lines[lines.index("| method | 3e-3 | 6e-3 | 1.2e-2 |") + 2 :]
    assert len(columns) == 8
    for row in table[:8]:
        method, *cells = row.strip("| ").split(" | ")
        assert cells == columns[method]


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
    rows = recovery_rows(report, tmp_path) + converted_smollm2_rows(tmp_path)
    rows += cut_smollm2_rows(tmp_path, 131_072, sinks=0)
    rows += cut_smollm2_rows(tmp_path / "cpu", 65_536, sinks=4)
    assert len(rows) == 15
    assert [row for row in rows if row not in lines] == []


def test_a_conversion_on_a_cpu_has_the_losses_of_that_on_a_gpu(tmp_path):
    unpack("conversion_smollm2", tmp_path, "real_models")
    on_cpu = list((tmp_path / "cpu").iterdir())
    assert len(on_cpu) == 4
    for workdir in on_cpu:
        on_gpu = tmp_path / workdir.name
        assert largest_difference(on_gpu, workdir) < 0.0011


def source_windows_row(workdir: pathlib.Path) -> str:
    """The losses of a model trained on windows of 2048 bytes: cut to fewer keys, whole, at 512."""
    losses = {}
    for record in read_lines(workdir / "eval.jsonl"):
        if "max_tokens" in record:
            losses[record["seq_len"], record.get("window")] = f"{record['loss']:.4f}"
    keys = [(2048, 128), (2048, 256), (2048, 512), (2048, None), (512, None)]
    seed = workdir.name.partition("seed=")[2]
    of_keys = [losses[key] for key in keys]
    return table_row([seed, *of_keys])


def test_training_on_longer_windows_is_in_its_records(tmp_path):
    lines = unpack("source_windows", tmp_path, "encodings_python")
    rows = [source_windows_row(workdir) for workdir in sorted(tmp_path.glob("config=*"))]
    assert len(rows) == 2
    assert [row for row in rows if row not in lines] == []


def test_which_pairs_must_rotate_is_in_its_records(tmp_path):
    lines = unpack("which_pairs", tmp_path)
    script = runpy.run_path(str(ROOT / "configs/results/which_pairs.py"))
    models = [script["Evaluations"](tmp_path / name) for name in ("SmolLM2-135M", "Gemma-3-270M")]
    tables = [script[name] for name in ("losses_as_it_is", "loss_rows", "contrast_rows")]
    rows = [row for table in tables for model in models for row in table(model)]
    rows += script["training_contrasts"](models[0])
    rows += script["training_rows"](tmp_path / "SmolLM2-135M/training")
    assert len(rows) > 30
    assert [row for row in rows if row not in lines] == []
    assert script["draw"](models).render().startswith(b"\x89PNG")


def test_the_pilot_of_six_arms_is_in_its_records(tmp_path):
    lines = unpack("unrotated_or_fast", tmp_path)
    script = runpy.run_path(str(RESULTS / "unrotated_or_fast.py"))
    rows = script["training_rows"](pathlib.Path(tmp_path))
    assert len(rows) == 6
    assert [row for row in rows if row not in lines] == []


def test_a_table_of_tasks_has_the_seeds_that_have_all_methods(tmp_path):
    """By hand: differences 0.4, 0.5 and 0.6 of three seeds have Student's t of 5 / 0.5774."""
    shares = {
        "p_rope_swa": (0.5, 0.7, 0.9, 0.4),
        "rope_swa": (0.1, 0.2, 0.3),
        "rnope_swa": (0.1,) * 3,
    }
    for method, of_seeds in shares.items():
        for seed, share in enumerate(of_seeds):
            place = tmp_path / f"config={method}-10000,seed={seed}"
            place.mkdir()
            (place / "config.json").write_text('{"data": {"seq_len": 128}}')
            records = [
                {"task": task, "seq_len": 1024, "accuracy": share, "guess": 0.25, "control": None}
                for task in ("niah", "lookup")
            ]
            (place / "longcontext.jsonl").write_text("\n".join(map(json.dumps, records)))
    script = runpy.run_path(str(RESULTS / "longcontext.py"))
    found = script["read"](tmp_path)
    assert script["share_rows"](found)[1:] == [
        "| 10,000 | p_rope_swa | 3 | 70 | 70 |",
        "| 10,000 | guess |  | 25 | 25 |",
        "| 10,000 | rnope_swa | 3 | 10 | 10 |",
        "| 10,000 | rope_swa | 3 | 20 | 20 |",
    ]
    reach = stats.t.ppf(1 - 0.05 / 4, 2) * 0.1 / 3**0.5
    first, second = script["contrast_rows"](found)
    ends = f"{0.5 - reach:+.3f} to {0.5 + reach:+.3f}"
    p = 2 * stats.t.sf(0.5 / (0.1 / 3**0.5), 2)
    assert first == f"| 10,000 | p_rope_swa - rope_swa | +0.500 | {ends} | {2 * p:.3g} | 0.25 |"
    assert second.startswith("| 10,000 | p_rope_swa - rnope_swa | +0.600 |")
