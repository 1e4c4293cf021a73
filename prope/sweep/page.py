"""Reports on a sweep: its page with the result beside the paper's, what all runs share, and where they were trained."""

import datetime
import pathlib
from collections.abc import Sequence

import jax
from etils import epath
from ml_collections import ConfigDict

from prope import model
from prope.config import flat
from prope.cost.flops import num_parameters
from prope.encodings import rotated_pairs
from prope.errors import RunFailed
from prope.html import page
from prope.html.drawing import Picture
from prope.html.page import number
from prope.sweep import interventions
from prope.sweep.maps import effective_lengths
from prope.sweep.pictures import pictures
from prope.sweep.runs import (
    P,
    Run,
    against_reference,
    check_equal,
    groups,
    read_sweep,
    reference,
    table,
)
from prope.workdir.records import read_jsonl

# Perplexity of Gemma 2B trained on 8192 tokens, on Wikipedia and FlanV2: Barbero et al. (ICLR 2025), Table 2.
PAPER = {  # by rope_type, wavelength and p
    ("proportional", 10_000.0, 0.0): (4.8594, 6.6429),
    ("proportional", 10_000.0, 0.25): (4.5302, 6.5111),
    ("proportional", 10_000.0, 0.75): (4.4414, 6.4422),
    ("proportional", 10_000.0, 1.0): (4.4627, 6.4429),
    ("proportional", 500_000.0, 1.0): (4.4485, 6.4593),
    ("reversed", 10_000.0, 0.75): (4.4592, 6.4683),
    ("partial", 10_000.0, 0.75): (4.4537, 6.4562),
}
PAPER_FIELDS = {
    "model.layer_types": (),
    "model.rope_scaling_type": "none",
    "model.logit_scale": "none",
    "model.use_qk_norm": False,
    "model.num_layers": 18,
    "model.embed_dim": 2048,
    "model.num_heads": 8,
    "model.num_kv_heads": 1,
    "model.head_dim": 256,
    "model.hidden_dim": 16_384,
    "data.seq_len": 8192,
}
FLAN = {
    "flan2021",
    "t0",
    "niv2",
    "cot",
    "dialog",
}  # the parts of FlanV2, as configs/gemma_2b_flan.py names folders


def report_sweep(directory: epath.Path) -> dict:
    """Writes the page of a sweep and its pictures; returns what the command prints."""
    runs, printed = read_sweep(directory), []
    changes, rows = interventions.changes(runs), result_rows(runs)
    output = write(directory, runs, rows, pictures(runs) + interventions.pictures(changes), changes)
    for row, full in zip(table(runs), rows, strict=True):
        found = full["difference"]
        apart = found and {
            "loss": found.difference,
            "interval": found.interval(),
            "over": full["over"],
        }
        printed.append(row | {"minus_rope": apart})
    listed = [
        change._asdict()
        | {"difference": change.difference.difference, "interval": change.difference.interval()}
        for change in changes
    ]
    result = {"output": str(output), "runs": [run.record() for run in runs], "table": printed}
    return result | ({"interventions": listed} if listed else {})


def write(
    directory: epath.Path,
    runs: list[Run],
    rows: list[dict],
    pictures: list[Picture],
    changes: Sequence[interventions.Change] = (),
) -> epath.Path:
    """Writes DIR/report/index.html and the pictures as PNG files beside it; returns the page's path."""
    fields = [flat(run.config) for run in runs]
    shapes = jax.eval_shape(lambda: model.init(runs[0].config.model, jax.random.key(0)))
    return page.write(
        directory / "report",
        "sweep",
        pictures,
        title=f"Sweep {directory.resolve().name}",
        lead=lead(rows),
        config=runs[0].config,
        parameters=num_parameters(shapes),
        by_p=all(P in run.values for run in runs),
        rows=rows,
        swept=list(
            dict.fromkeys(name for run in runs for name in run.values)
        ),  # a run may lack those of another grid
        errors_over=sorted({row["over"] for row in rows} - {""}),
        windows=sorted(
            {run.evaluation.get("windows") or 0 for run in runs if run.state == "finished"}
        ),
        paper_data=sorted({row["paper"][0] for row in rows if row["paper"]}),
        effective_lengths=effective_lengths(runs),
        changes=changes,
        equality=equality(runs),
        runs=[{"name": run.name} | run.record() | origin(run) for run in runs],
        training_time=duration(sum(map(training_seconds, runs))),
        settings={k: v for k, v in fields[0].items() if all(other[k] == v for other in fields)},
    )


def paper_result(config: ConfigDict) -> tuple[str, float] | None:
    """Finds the paper's (dataset, perplexity) for a run; None unless dataset, model and length are the paper's."""
    fields, data = flat(config), config.data
    parts = {pathlib.PurePath(source.get("data_dir", "")).name for source in data.mixture}
    dataset = {
        "wikipedia/20230601.en": "Wikipedia",
        "mixture": "FlanV2" if parts == FLAN else None,
    }.get(data.dataset)
    model = config.model
    perplexities = PAPER.get((model.rope_type, model.max_wavelength, model.rope_percentage))
    same = data.tokenizer != "byte" and all(
        fields[name] == value for name, value in PAPER_FIELDS.items()
    )
    return (
        (dataset, perplexities[dataset == "FlanV2"]) if dataset and same and perplexities else None
    )


def result_rows(runs: list[Run]) -> list[dict]:
    """Extends the rows of `table` by group, rotated pairs, difference from RoPE, and the paper's perplexity."""
    rows, by_name = table(runs), groups(runs)
    best = min((row["perplexity"] for row in rows if row["perplexity"] is not None), default=None)
    for row, (name, group) in zip(rows, by_name.items(), strict=True):
        config, base = group[0].config, reference(group[0].values, by_name)
        row |= {
            "group": name,
            "pairs": f"{rotated_pairs(config.model)} of {config.model.head_dim // 2}",
        }
        row |= {"reference": base, "paper": paper_result(config)}
        row["difference"], row["over"] = (
            against_reference(group, by_name[base]) if base else (None, "")
        )
        row["best"] = best is not None and row["perplexity"] == best
    return rows


def lead(rows: list[dict]) -> str:
    """States the result in one sentence, with as much certainty as the runs give it."""
    best = next((row for row in rows if row["best"]), None)
    if best is None:
        return "No run has finished yet."
    text = f"{best['group']} has the lowest validation perplexity, {best['perplexity']:.4f}"
    if best["difference"] is None:  # RoPE, or there is no RoPE
        of_best = [row for row in rows if row["reference"] == best["group"] and row["difference"]]
        close = [
            row["group"]
            for row in of_best
            if row["difference"].stderr and not row["difference"].distinguishable
        ]
        return f"{text}." + (f" Not distinguishable from it: {', '.join(close)}." if close else "")
    loss, stderr, _ = difference = best["difference"]
    below = f"its loss is {abs(loss):.4f} nats per token {'below' if loss < 0 else 'above'} RoPE’s"
    if stderr is None:
        return f"{text}; {below}. One run of each cannot tell whether that is more than chance."
    low, high = (number(end, "+.4f") for end in difference.interval())
    if difference.distinguishable:
        return f"{text}; {below} (95 % interval over {best['over']}: {low} to {high})."
    interval = f"the 95 % interval of the loss difference over {best['over']}, {low} to {high} nats per token"
    return f"{text}, but is not distinguishable from RoPE: {interval}, holds 0."


def equality(runs: list[Run]) -> dict:
    """Compares configs and logged hashes.

    Returns {"error": why runs may not be compared, "fields": those that differ though they are not swept, "proofs":
    (name, number of runs whose hashes were compared, result)}.
    """
    try:
        equal = check_equal(runs)
    except RunFailed as error:
        return {"error": str(error)}
    configs = [flat(run.config) for run in runs]
    differing = [name for name in configs[0] if len({repr(fields[name]) for fields in configs}) > 1]
    proofs = (
        ("Initial weights", equal["init"], "hash to the same value in all runs of a seed"),
        (
            "Batches",
            equal["batches"],
            f"hash to the same values at every logged step, up to {equal['steps']:,}",
        ),
    )
    swept = {name for run in runs for name in run.values}
    fields = [name for name in differing if not {name, name.rpartition(".")[2]} & swept]
    return {"error": None, "fields": fields, "proofs": proofs}


def origin(run: Run) -> dict:
    """Describes the machine on which a run was last started, and how long it trained."""
    starts = read_jsonl(run.workdir / "starts.jsonl")
    last = starts[-1] if starts else {}
    commit, seconds = str(last.get("commit") or "–"), training_seconds(run)
    tokens = (
        run.metrics[-1]["step"] * run.config.batch_size * run.config.data.seq_len if seconds else 0
    )
    return {
        "devices": f"{last['devices']} × {last['device_kind']}"
        if {"devices", "device_kind"} <= last.keys()
        else "–",
        "machine": last.get("machine") or "–",
        "jax": last.get("jax") or "–",
        "starts": len(starts) or "–",
        "commit": commit[:10] + ("+changes" if commit.endswith("+changes") else ""),
        "pace": tokens / seconds if seconds else None,
        "training_time": duration(seconds) if seconds else "–",
    }


def training_seconds(run: Run) -> float:
    """Sums the tokens between logged steps over the logged speed."""
    tokens, before, seconds = run.config.batch_size * run.config.data.seq_len, 0, 0.0
    for record in run.metrics:
        if record.get("tokens_per_second"):
            seconds += (record["step"] - before) * tokens / record["tokens_per_second"]
        before = record["step"]
    return seconds


def duration(seconds: float) -> str:
    """Formats seconds as hours:minutes:seconds, 0:03:20."""
    return str(datetime.timedelta(seconds=round(seconds)))
