"""What the page of a sweep says: the result beside the paper's, what is equal in all runs, and where they were made."""

import pathlib

import jax

from prope import model
from prope.config import flat
from prope.errors import RunFailed
from prope.html.drawing import Picture
from prope.html.page import document, e, figures, html_table, section
from prope.sweep.runs import SEED, P, Run, against_reference, check_equal, group_name, groups, reference, table
from prope.workdir.records import read_jsonl

# Perplexity of Gemma 2B trained on 8192 tokens, by p: Barbero et al. (ICLR 2025), Table 2.
PAPER = {
    "Wikipedia": {0.0: 4.8594, 0.25: 4.5302, 0.75: 4.4414, 1.0: 4.4627},
    "FlanV2": {0.0: 6.6429, 0.25: 6.5111, 0.75: 6.4422, 1.0: 6.4429},
}
PAPER_DATA = {"wikipedia/20230601.en": "Wikipedia", "mixture": "FlanV2"}
PAPER_MODEL = {"model.num_layers": 18, "model.embed_dim": 2048, "data.seq_len": 8192, "model.vocab_size": 256_128}

FOOT = """<p>p-RoPE turns the fastest int(p · d / 2) of the d/2 pairs of lanes of a head; p = 1 is RoPE, p = 0 is NoPE
(Barbero et al., ICLR 2025). Loss is in nats per token, perplexity its exponential; bits per byte are total bits over
the bytes of the text, and compare across tokenizers. Made by <code>python -m prope.report --sweep</code>.</p>
"""


def write(directory: pathlib.Path, runs: list[Run], drawn: list[Picture]) -> pathlib.Path:
    """Writes DIR/report/index.html, and beside it the pictures as PNG files for papers and slides; returns its path."""
    folder = directory / "report"
    folder.mkdir(exist_ok=True)
    shown = figures(folder, drawn)
    result = [results(runs), shown.pop("perplexity", "")]
    parts = [
        section("Result", *result),
        *(section(picture.title, shown[picture.name]) for picture in drawn if picture.name in shown),
        section("Are the runs equal but for what is swept?", equality(runs)),
        section("Runs", run_table(runs)),
        section("Machines and time", machines(runs)),
        section("Settings that all runs share", settings(runs)),
    ]
    swept = ", ".join(f"<code>{e(name)}</code>" for name in runs[0].values) or "nothing"
    done = sum(run.state == "finished" for run in runs)
    head = (
        f'<h1>Sweep {e(directory.resolve().name)}</h1>\n<p class="lead">{lead(runs)}</p>\n'
        f'<p class="soft">{e(about(runs[0]))} Swept: {swept}; {done} of {len(runs)} runs finished.</p>\n'
    )
    output = folder / "index.html"
    output.write_text(document(f"Sweep {directory.resolve().name}: p-RoPE", head, parts, FOOT))
    return output


def spread(value: float | None, by: float | None, digits: int = 4) -> str:
    """A number and, small beside it, how much it varies."""
    if value is None:
        return "–"
    return f"{value:.{digits}f}" + (f" <small>± {by:.{digits}f}</small>" if by is not None else "")


def of_paper(run: Run) -> tuple[str, bool]:
    """(which of the paper's data a run is put beside, whether it is the paper's own model on these data)."""
    fields = flat(run.config)
    same = fields["data.dataset"] in PAPER_DATA and all(fields[k] == v for k, v in PAPER_MODEL.items())
    return PAPER_DATA.get(fields["data.dataset"], "Wikipedia"), same


def results(runs: list[Run]) -> str:
    """The table of the sweep, beside the paper's."""
    found, rows = table(runs), []
    by_name = groups(runs)
    best = min((row["perplexity"] for row in found if row["perplexity"] is not None), default=None)
    marked = not all(of_paper(run)[1] for run in runs)
    sources = sorted({of_paper(run)[0] for run in runs})
    head = ["run" if P not in runs[0].values else "p", "pairs turned", "runs", "validation loss", "perplexity"]
    head += ["bits per byte", "loss minus RoPE’s", f"paper: {' / '.join(sources)}{' *' if marked else ''}"]
    overs = set()
    for row, (name, group) in zip(found, by_name.items(), strict=True):
        base = reference(group[0].values)
        apart = against_reference(group, by_name[base]) if base in by_name else None
        overs |= {apart.over} if apart and apart.over else set()
        pairs = f"{model.rotated_pairs(group[0].config.model)} of {group[0].config.model.head_dim // 2}"
        paper = PAPER[of_paper(group[0])[0]].get(group[0].config.model.rope_percentage)
        cells = [e(name.removeprefix("p = ")), e(pairs), str(row["runs"])]
        cells += [spread(row[key], row[f"{key}_sd"]) for key in ("eval_loss", "perplexity", "bits_per_byte")]
        signed = spread(abs(apart.mean), apart.stderr) if apart else "–"
        cells += [("−" if apart.mean < 0 else "+") + signed if apart else signed, spread(paper, None)]
        rows.append(("best" if best is not None and row["perplexity"] == best else "", cells))
    made = html_table(
        "Means over finished runs, ± their standard deviation. The lowest perplexity is marked.", head, rows
    )
    if overs:
        note = f"Loss minus RoPE’s: mean ± standard error over {' or '.join(sorted(overs))}."
        if "documents" in overs:
            note += " Documents tell how sure the evaluation is, not what another seed would give."
        made += f'<p class="soft">{e(note)}</p>\n'
    if marked:
        made += (
            '<p class="soft">* Table 2 of the paper: Gemma 2B, windows of 8192 of Gemma’s tokens. <strong>These runs '
            f"have another model or other data</strong> ({e(about(runs[0])[:-1])}): compare the order, not the "
            "numbers.</p>\n"
        )
    return made


def lead(runs: list[Run]) -> str:
    """The result in one sentence, with as much certainty as the runs give it."""
    rows = [row for row in table(runs) if row["perplexity"] is not None]
    if not rows:
        return "No run has finished yet."
    best = min(rows, key=lambda row: row["perplexity"])
    by_name = groups(runs)
    name = group_name({k: best[k] for k in runs[0].values if k != SEED})
    said = f"{e(name)} has the lowest validation perplexity, {best['perplexity']:.4f}"
    base = reference(by_name[name][0].values)
    apart = against_reference(by_name[name], by_name[base]) if base in by_name else None
    if apart is None:
        return said + "."
    said += f"; its loss is {abs(apart.mean):.4f} nats per token {'below' if apart.mean < 0 else 'above'} RoPE’s"
    if apart.stderr is None:
        return said + ". One run of each does not tell whether that is more than chance."
    sure = "more" if abs(apart.mean) > 2 * apart.stderr else "not more"
    return f"{said}, {sure} than two standard errors (± {apart.stderr:.4f} over {e(apart.over)})."


def about(run: Run) -> str:
    """What a run is, in a sentence."""
    shapes = jax.eval_shape(lambda: model.init(run.config.model, jax.random.key(0)))
    config = run.config
    return (
        f"{model.num_parameters(shapes) / 1e6:,.1f} M parameters, {config.data.dataset}, "
        f"{'bytes' if config.data.tokenizer == 'byte' else 'SentencePiece'}, windows of {config.data.seq_len} tokens, "
        f"{config.num_steps:,} steps of {config.batch_size * config.data.seq_len:,} tokens."
    )


def equality(runs: list[Run]) -> str:
    """What the logged hashes and the configs prove."""
    try:
        equal = check_equal(runs)
    except RunFailed as error:
        return f'<p class="bad">No: {e(error)}.</p>\n'
    fields = {name: {repr(flat(run.config)[name]) for run in runs} for name in flat(runs[0].config)}
    differing = [name for name, values in fields.items() if len(values) > 1]
    swept = [name for name in differing if name in runs[0].values or name.rpartition(".")[2] in runs[0].values]
    others = [name for name in differing if name not in swept]
    said = ", ".join(f"<code>{e(name)}</code>" for name in others)
    made = [
        f"<p>Config: all fields are equal but those swept{f' and {said}' if said else ''}.</p>\n",
        verdict("Initial weights", equal["init"], len(runs), "hash to the same value in all runs of a seed"),
        verdict("Batches", equal["batches"], len(runs), f"hash to the same values at every step that was logged, up to "
                f"{equal['steps']:,}"),
    ]  # fmt: skip
    return "".join(made)


def verdict(what: str, compared: int, total: int, says: str) -> str:
    """Whether hashes prove that something is equal, and for how many runs."""
    if not compared:
        return f"<p>{what}: not proven; no two runs that should agree have logged hashes.</p>\n"
    return f'<p>{what}: <span class="good">equal</span>. Those of {compared} of {total} runs {says}.</p>\n'


def run_table(runs: list[Run]) -> str:
    """Every run, and what its weights hashed to at the start."""
    rows = []
    for run in runs:
        r = run.record()
        state = e(r["state"]) if r["state"] == "finished" else f'<span class="bad">{e(r["state"])}</span>'
        cells = [
            e(run.name),
            state,
            f"{r['step']:,}",
            *(spread(r[k], None) for k in ("loss", "eval_loss", "perplexity")),
        ]
        cells += [spread(r["bits_per_byte"], None), f"<code>{e(r['init_hash'] or '–')}</code>"]
        rows.append(("", cells))
    head = ["run", "state", "step", "training loss", "validation loss", "perplexity", "bits per byte", "init_hash"]
    return html_table("The training loss is that of the last batch that was logged.", head, rows, text=[1])


def machines(runs: list[Run]) -> str:
    """On what the runs were made, and how long they trained."""
    rows = []
    for run in runs:
        starts = read_jsonl(run.workdir / "starts.jsonl")
        last = starts[-1] if starts else {}
        device = f"{last['devices']} × {last['device_kind']}" if {"devices", "device_kind"} <= last.keys() else "–"
        code = str(last.get("commit") or "–")
        cells = [
            e(run.name),
            e(device),
            e(last.get("host_cpu") or last.get("machine") or "–"),
            e(last.get("jax") or "–"),
        ]
        cells += [f"<code>{e(code[:10] + ('+changes' if code.endswith('+changes') else ''))}</code>"]
        rows.append(("", [*cells, str(len(starts)) if starts else "–", *pace(run)]))
    head = ["run", "devices", "machine", "jax", "commit", "starts", "tokens/s", "time in training"]
    total = duration(sum(training_seconds(run) for run in runs))
    return html_table(
        f"Together {total} of training, without starting, evaluating and saving.", head, rows, [1, 2, 3, 4]
    )


def pace(run: Run) -> list[str]:
    """Tokens a second, and the time, of training."""
    seconds = training_seconds(run)
    if not seconds:
        return ["–", "–"]
    tokens = run.metrics[-1]["step"] * run.config.batch_size * run.config.data.seq_len
    return [f"{tokens / seconds:,.0f}", duration(seconds)]


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


def settings(runs: list[Run]) -> str:
    """The config that the runs share, folded away."""
    first = flat(runs[0].config)
    shared = {k: v for k, v in first.items() if all(flat(run.config)[k] == v for run in runs)}
    rows = [("", [f"<code>{e(name)}</code>", f"<code>{e(value)}</code>"]) for name, value in shared.items()]
    inner = html_table("Fields of the config.", ["field", "value"], rows, text=[1])
    return f"<details><summary>{len(shared)} fields</summary>\n{inner}</details>\n"
