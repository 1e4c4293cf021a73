"""Pictures, pages, and a sweep of random numbers."""

import html.parser
import json
import math

import jax
import numpy as np

from prope import parameters
from prope.spec.run import Spec
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.run import write_config
from support.text import write_lines


def draw_picture(picture):
    """The Matplotlib figure of a picture."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=picture.size, layout="constrained")
    picture.draw(figure)
    return figure


def map_values(picture) -> dict[str, np.ndarray]:
    """Values of a picture's maps, by title."""
    maps = [axes for axes in draw_picture(picture).axes if axes.images]
    return {axes.get_title(): np.asarray(axes.images[0].get_array()) for axes in maps}


class Page(html.parser.HTMLParser):
    """What a browser would see: tables as rows of texts, tags with attributes, all text."""

    def __init__(self, path):
        super().__init__()
        self.tables = []
        self.tags = []
        self.text = ""
        self.open = []
        self.feed(path.read_text())
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "img", "source"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if any(tag in self.open for tag in ("th", "td")):
            self.tables[-1][-1][-1] += data


SWEEP_PERCENTAGES = (0.0, 0.25, 1.0)


SWEEP_SEEDS = (0, 1)


SWEEP_STEPS = (1, 5, 10)  # that are logged


def write_sweep(directory):
    """A sweep of random numbers: three values of p and two seeds, everything evaluated."""
    rng = np.random.default_rng(0)
    entries = []
    for p in SWEEP_PERCENTAGES:
        for seed in SWEEP_SEEDS:
            workdir = directory / f"rope_percentage={p:g},seed={seed}"
            _write_sweep_run(workdir, p, seed, rng)
            values = {"rope_percentage": p, "seed": seed}
            entries.append({"name": workdir.name, "values": values})
    started = {
        "devices": 8,
        "device_kind": "TPU v5p",
        "commit": "0123456789abcdef+changes",
        "jax": "0.10.2",
    }
    first = directory / entries[0]["name"]
    write_lines(first / "starts.jsonl", [{"step": 0}, started])
    entries.append({"name": "to come", "values": {}})
    (directory / "sweep.json").write_text(json.dumps({"runs": entries}))


def _write_sweep_run(workdir, p, seed, rng):
    workdir.mkdir()
    fields = {"model.rope_percentage": p, "seed": seed, "num_steps": 10}
    sizes = {"num_layers": 1, "embed_dim": 8, "num_heads": 1, "hidden_dim": 8}
    fields |= {f"model.{name}": size for name, size in sizes.items()}
    spec = Spec().replace(fields | {"data.tokenizer": "<b>.model"})
    write_config(workdir, spec)
    shapes = parameters.shapes(spec.model)
    with Checkpoints(workdir) as checkpoints:
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        identity = {"config": spec.to_dict(), "init_hash": f"{seed:016x}"}
        checkpoints.save(10, state, state, identity, {"examples": 0})
    metrics = []
    for step in SWEEP_STEPS:
        record = {"step": step, "loss": rng.uniform(2, 3), "batch_hash": f"{seed}{step}"}
        # A step of 16 x 256 tokens a second.
        metrics.append(record | {"tokens_per_second": 4096.0})
    write_lines(workdir / "metrics.jsonl", metrics)
    evaluation = {"step": 10, "dataset": "python_docs"}
    shorter = evaluation | {"seq_len": 1024, "max_windows": 3, "loss": 9.0}
    records = [evaluation | _draw_evaluation(seq_len, rng) for seq_len in (256, 512)]
    earlier = records[-1] | {"step": 5}
    rescaled = {"seq_len": 2048, "encoding": "yarn", "factor": 8.0, "loss": 8.0}
    records = [earlier, shorter, *records, records[-1] | rescaled]
    write_lines(workdir / "eval.jsonl", records)


def _draw_evaluation(seq_len, rng):
    loss = rng.uniform(1, 2)
    by_position = []
    for start in (0, 64):
        record = {"from": start, "to": start + 64, "loss": rng.uniform(1, 2), "tokens": 9}
        by_position.append(record)
    by_distance = []
    for task in ("copy", "recall"):
        for start in (8, 16):
            record = {"task": task, "from": start, "to": 2 * start}
            by_distance.append(record | {"accuracy": rng.uniform(), "answers": 5})
    return {
        "split": "validation",
        "seq_len": seq_len,
        "max_windows": None,
        "loss": loss,
        "loss_stderr": 0.01,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss / math.log(2),
        "unigram_bits_per_byte": 2 * loss / math.log(2),
        "by_position": by_position,
        "accuracy_by_distance": by_distance,
    }
