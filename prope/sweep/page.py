"""The page of a sweep: the result beside the paper's, what all runs share, and where they were trained."""

import pathlib

import jax

from prope import model
from prope.config import flat
from prope.errors import RunFailed
from prope.html import page
from prope.html.drawing import Picture
from prope.html.page import Table, plus_minus, tag
from prope.inference.paired import Difference
from prope.sweep.runs import SEED, P, Run, against_reference, check_equal, group_name, groups, reference, table
from prope.workdir.records import read_jsonl

# Perplexity of Gemma 2B trained on 8192 tokens, by p: Barbero et al. (ICLR 2025), Table 2.
PAPER = {
    "Wikipedia": {0.0: 4.8594, 0.25: 4.5302, 0.75: 4.4414, 1.0: 4.4627},
    "FlanV2": {0.0: 6.6429, 0.25: 6.5111, 0.75: 6.4422, 1.0: 6.4429},
}
PAPER_DATA = {"wikipedia/20230601.en": "Wikipedia", "mixture": "FlanV2"}
PAPER_MODEL = {"model.num_layers": 18, "model.embed_dim": 2048, "data.seq_len": 8192, "model.vocab_size": 256_128}

FOOT = (
    "p-RoPE rotates the fastest int(p · d / 2) of the d/2 pairs of lanes of a head; p = 1 is RoPE, p = 0 is NoPE "
    "(Barbero et al., ICLR 2025). Loss is in nats per token, perplexity its exponential; bits per byte are total bits "
    "over the bytes of the text, and compare across tokenizers."
)


def write(directory: pathlib.Path, runs: list[Run], pictures: list[Picture]) -> pathlib.Path:
    """Writes DIR/report/index.html and the pictures as PNG files beside it; returns the page's path."""
    first = [picture for picture in pictures if picture.name == "perplexity"]
    sections = {
        "Result": [result_table(runs), *first],
        **{picture.title: [picture] for picture in pictures if picture not in first},
        "Are the runs equal but for what is swept?": equality(runs),
        "Runs": [run_table(runs)],
        "Machines and time": [machine_table(runs)],
        "Settings that all runs share": [settings_table(runs)],
    }
    swept = ", ".join(runs[0].values) or "nothing"
    finished = sum(run.state == "finished" for run in runs)
    about = f"{describe(runs[0])} Swept: {swept}; {finished} of {len(runs)} runs finished."
    title = f"Sweep {directory.resolve().name}"
    return page.write(directory / "report", title, lead(runs), about, sections, FOOT, "python -m prope.report --sweep")


def paper_column(run: Run) -> tuple[str, bool]:
    """(the paper's dataset that a run is compared with, whether the run has the paper's model and data)."""
    fields = flat(run.config)
    same = fields["data.dataset"] in PAPER_DATA and all(fields[k] == v for k, v in PAPER_MODEL.items())
    return PAPER_DATA.get(fields["data.dataset"], "Wikipedia"), same


def difference_from_rope(by_name: dict[str, list[Run]], name: str) -> tuple[Difference | None, str]:
    """Computes `against_reference` for a group; (None, "") for RoPE's own group or without RoPE."""
    base = reference(by_name[name][0].values)
    return against_reference(by_name[name], by_name[base]) if base in by_name else (None, "")


def result_table(runs: list[Run]) -> Table:
    """The means of every group of runs, beside the paper's perplexity."""
    by_name, rows, errors_over = groups(runs), [], set()
    means = table(runs)
    for row, (name, group) in zip(means, by_name.items(), strict=True):
        config = group[0].config.model
        difference, over = difference_from_rope(by_name, name)
        errors_over |= {over} if over else set()
        rows.append([
            name.removeprefix("p = "), f"{model.rotated_pairs(config)} of {config.head_dim // 2}", row["runs"],
            *(plus_minus(row[key], row[f"{key}_sd"]) for key in ("eval_loss", "perplexity", "bits_per_byte")),
            plus_minus(*difference, "+.4f") if difference else "–",
            plus_minus(PAPER[paper_column(group[0])[0]].get(config.rope_percentage)),
        ])  # fmt: skip
    notes = []
    if errors_over:
        notes.append(f"Loss minus RoPE’s: mean ± standard error over {' or '.join(sorted(errors_over))}.")
        if "documents" in errors_over:
            notes[0] += " The error over documents is that of the evaluation; another seed may differ by more."
    columns = {paper_column(run) for run in runs}
    other = not all(same for _, same in columns)
    if other:
        strong = tag("strong", "These runs have another model or other data")
        notes.append("* Table 2 of the paper: Gemma 2B, windows of 8192 of Gemma’s tokens. " + strong
                     + f" ({describe(runs[0])[:-1]}): compare the order, not the numbers.")  # fmt: skip
    best = min((row["perplexity"] for row in means if row["perplexity"] is not None), default=None)
    head = ["run" if P not in runs[0].values else "p", "rotated pairs", "runs", "validation loss", "perplexity"]
    head += ["bits per byte", "loss minus RoPE’s", f"paper: {' / '.join(sorted({name for name, _ in columns}))}"]
    return Table(
        "Means over finished runs, ± their standard deviation. The lowest perplexity is marked.",
        [*head[:-1], head[-1] + (" *" if other else "")],
        rows,
        best=[i for i, row in enumerate(means) if best is not None and row["perplexity"] == best],
        notes=notes,
    )


def lead(runs: list[Run]) -> str:
    """The result in one sentence, with as much certainty as the runs give it."""
    rows = [row for row in table(runs) if row["perplexity"] is not None]
    if not rows:
        return "No run has finished yet."
    best = min(rows, key=lambda row: row["perplexity"])
    name = group_name({k: best[k] for k in runs[0].values if k != SEED})
    text = f"{name} has the lowest validation perplexity, {best['perplexity']:.4f}"
    difference, over = difference_from_rope(groups(runs), name)
    if difference is None:
        return text + "."
    loss, stderr = difference
    text += f"; its loss is {abs(loss):.4f} nats per token {'below' if loss < 0 else 'above'} RoPE’s"
    if stderr is None:
        return text + ". One run of each cannot tell whether that is more than chance."
    certainty = "more" if abs(loss) > 2 * stderr else "not more"
    return f"{text}, {certainty} than two standard errors (± {stderr:.4f} over {over})."


def describe(run: Run) -> str:
    """Model, data and length of a run, in a sentence."""
    config = run.config
    shapes = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))
    return (
        f"{model.num_parameters(shapes) / 1e6:,.1f} M parameters, {config.data.dataset}, "
        f"{'bytes' if config.data.tokenizer == 'byte' else 'SentencePiece'}, windows of {config.data.seq_len} tokens, "
        f"{config.num_steps:,} steps of {config.batch_size * config.data.seq_len:,} tokens."
    )


def equality(runs: list[Run]) -> list[str]:
    """Paragraphs on what the configs and the logged hashes prove to be equal."""
    try:
        equal = check_equal(runs)
    except RunFailed as error:
        return [tag("span", f"No: {error}.", "bad")]
    fields = {name: {repr(flat(run.config)[name]) for run in runs} for name in flat(runs[0].config)}
    differing = [name for name, values in fields.items() if len(values) > 1]
    others = [name for name in differing if not {name, name.rpartition(".")[2]} & runs[0].values.keys()]
    return [
        f"Config: all fields are equal but those swept{' and ' if others else ''}{', '.join(others)}.",
        verdict("Initial weights", equal["init"], len(runs), "hash to the same value in all runs of a seed"),
        verdict("Batches", equal["batches"], len(runs), "hash to the same values at every step that was logged, up to "
                f"{equal['steps']:,}"),
    ]  # fmt: skip


def verdict(name: str, compared: int, total: int, proof: str) -> str:
    """Whether hashes prove that something is equal, and for how many runs."""
    if not compared:
        return f"{name}: not proven; no two runs that should agree have logged hashes."
    return f"{name}: " + tag("span", "equal", "good") + f". Those of {compared} of {total} runs {proof}."


def run_table(runs: list[Run]) -> Table:
    """State, losses and the hash of the initial weights of every run."""
    rows = []
    for run in runs:
        record = run.record()
        state = record["state"] if record["state"] == "finished" else tag("span", record["state"], "bad")
        losses = [plus_minus(record[name]) for name in ("loss", "eval_loss", "perplexity", "bits_per_byte")]
        rows.append([run.name, state, f"{record['step']:,}", *losses, tag("code", record["init_hash"] or "–")])
    head = ["run", "state", "step", "training loss", "validation loss", "perplexity", "bits per byte", "init_hash"]
    return Table("The training loss is that of the last batch that was logged.", head, rows, text=[1])


def machine_table(runs: list[Run]) -> Table:
    """The machines on which the runs were trained, and how long that took."""
    rows = []
    for run in runs:
        starts = read_jsonl(run.workdir / "starts.jsonl")
        last = starts[-1] if starts else {}
        device = f"{last['devices']} × {last['device_kind']}" if {"devices", "device_kind"} <= last.keys() else "–"
        commit = str(last.get("commit") or "–")
        commit = commit[:10] + ("+changes" if commit.endswith("+changes") else "")
        seconds, pace = training_seconds(run), ["–", "–"]
        if seconds:
            tokens = run.metrics[-1]["step"] * run.config.batch_size * run.config.data.seq_len
            pace = [f"{tokens / seconds:,.0f}", duration(seconds)]
        machine = last.get("host_cpu") or last.get("machine") or "–"
        rows.append([run.name, device, machine, last.get("jax") or "–", tag("code", commit), len(starts) or "–", *pace])
    head = ["run", "devices", "machine", "jax", "commit", "starts", "tokens/s", "time in training"]
    total = duration(sum(map(training_seconds, runs)))
    return Table(f"Together {total} of training, without starting, evaluating and saving.", head, rows, [1, 2, 3, 4])


def training_seconds(run: Run) -> float:
    """Seconds of training: the tokens between logged steps over the speed that was logged."""
    tokens, before, seconds = run.config.batch_size * run.config.data.seq_len, 0, 0.0
    for record in run.metrics:
        if record.get("tokens_per_second"):
            seconds += (record["step"] - before) * tokens / record["tokens_per_second"]
        before = record["step"]
    return seconds


def duration(seconds: float) -> str:
    """'1 h 05 min' or '3 min 20 s'."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def settings_table(runs: list[Run]) -> Table:
    """The config fields that the runs share, folded away."""
    first, *others = (flat(run.config) for run in runs)
    shared = {k: v for k, v in first.items() if all(other[k] == v for other in others)}
    rows = [[tag("code", name), tag("code", value)] for name, value in shared.items()]
    return Table("Fields of the config.", ["field", "value"], rows, text=[1], folded=f"{len(shared)} fields")
