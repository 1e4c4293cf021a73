"""Prints the tables of configs/results/which_pairs.md, and draws its figure, from records.

    python configs/results/which_pairs.py WORK [WORK ..] [FIGURE.png]

WORK is what which_pairs.sh left, named as the model; the runs that it trained are in `training`.
Losses are in nats per token; differences are paired by document, with 95 % intervals of each row
alone.
"""

import hashlib
import json
import pathlib
import sys

from prope.inference.paired import paired_difference
from prope.inference.statistics import holm
from prope.pages.drawing import Picture, legend, line, panels, styles
from prope.workdir.records import SAME_WINDOWS, read_jsonl

TEXTS = {"files": "articles", "python_source": "Python source"}
CHOOSERS = {1024: "16 articles x 1024", 8192: "8 articles x 8192"}
DECLARED = ((1024, 0.5), (1024, 0.25), (1024, 0.125), (8192, 0.5))  # change minus fast and norm


class Evaluations:
    """The evaluations of one model: as it is, and with choices of pairs."""

    def __init__(self, work: pathlib.Path):
        self.work = work
        self.as_it_is = {}  # by folder, text and length: the record and its folder
        self.chosen = {}  # by these and the choice: rule, per, keep, text that chose
        choices = {}
        for path in self._files("pairs*.json"):
            pairs = json.loads(path.read_text())
            text = pairs["text"]
            chooser = f"{text['sequences']} {TEXTS[text['source']]} x {text['seq_len']}"
            if pairs["rule"] in ("fast", "slow", "uniform"):
                chooser = "none"
            name = (pairs["rule"], pairs["per"], pairs["keep"], chooser)
            digest = hashlib.sha256(pairs["rope_pairs"].encode()).hexdigest()[:12]
            choices.setdefault(digest, {})[name] = True
        for path in self._files("eval.jsonl"):
            for record in read_jsonl(path):
                digest = record.get("changed", {}).get("model.rope_pairs")
                about = (TEXTS[record["dataset"]], record["seq_len"])
                names = choices.get(digest, ())
                keys = [(self.as_it_is, about)] if digest is None else []
                keys += [(self.chosen, (*about, *name)) for name in names]
                for found, key in keys:  # the fullest evaluation counts
                    if key not in found or found[key][0]["windows"] < record["windows"]:
                        found[key] = (record, path.parent)
        self.as_it_is = dict(sorted(self.as_it_is.items(), key=_place))
        self.chosen = dict(sorted(self.chosen.items(), key=_place))

    def _files(self, pattern: str) -> list[pathlib.Path]:
        found = sorted(self.work.glob(f"**/{pattern}"))
        return [path for path in found if path.relative_to(self.work).parts[0] != "training"]

    def difference(self, one: tuple, other: tuple, positions: tuple | None = None):
        """Returns the first record's loss minus the second's, at positions of their windows."""
        (record, place), (second, other_place) = one, other
        about = {name: record.get(name) for name in ("step", "dataset", *SAME_WINDOWS, "changed")}
        about["split"] = record["split"]
        changed = {"changed": second.get("changed")}
        options = {"about": about, "second_fields": changed, "positions": positions}
        return paired_difference(place, other_place, **options)


def _place(item: tuple) -> tuple:
    """Orders evaluations by text, articles first, and by length."""
    text, length, *_ = item[0]
    return text != "articles", length


def signed(value: float) -> str:
    """Writes a number with its sign."""
    return f"{value:+.4f}"


def row(*cells) -> str:
    """Writes a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def cells_of(difference) -> tuple[str, str]:
    """Writes a difference and its interval."""
    ends = difference.interval() or ()  # none of a single document
    return signed(difference.difference), " to ".join(map(signed, ends))


def loss_rows(model: Evaluations) -> list[str]:
    """Every choice minus the model as it is."""
    rows = []
    for name, found in model.chosen.items():
        text, length, rule, per, keep, chooser = name
        plain = model.as_it_is[text, length]
        if found[0]["windows"] != plain[0]["windows"]:  # one, while pairs were chosen
            continue
        parts = (1024, 4096, 8192) if length == 8192 else (length,)
        for part in parts:
            positions = None if part == length else (0, part)
            difference = model.difference(found, plain, positions)
            cells = (f"{keep:g}", rule, per, chooser)
            shown = f"{part} of {length}" if part < length else length
            head = (model.work.name, text, shown, difference.samples)
            rows.append(row(*head, *cells, *cells_of(difference)))
    return rows


def contrast_rows(model: Evaluations) -> list[str]:
    """The declared contrasts, with p-values by Holm over the family of a model."""
    found = []
    for (text, length, rule, per, keep, chooser), one in model.chosen.items():
        is_declared = (length, keep) in DECLARED and chooser == CHOOSERS[length]
        if is_declared and (text, rule, per) == ("articles", "change", "head"):
            for other in ("fast", "norm"):
                chosen_by = "none" if other == "fast" else chooser
                second = model.chosen[text, length, other, per, keep, chosen_by]
                difference = model.difference(one, second)
                found.append((length, keep, f"change - {other}", difference))
    adjusted = holm([difference.p_value for *_, difference in found])
    return [
        row(model.work.name, length, f"{keep:g}", name, *cells_of(difference), f"{p:.2g}")
        for (length, keep, name, difference), p in zip(found, adjusted, strict=True)
    ]


def losses_as_it_is(model: Evaluations) -> list[str]:
    """The model with all its pairs."""
    rows = []
    for (text, length), (record, _) in model.as_it_is.items():
        counts = (record["windows"], record["documents"], f"{record['tokens']:,}")
        rows.append(row(model.work.name, text, length, *counts, f"{record['loss']:.4f}"))
    return rows


def training_rows(work: pathlib.Path) -> list[str]:
    """Loss by steps of training, minus that of the control of the same order of the text.

    Runs are folders of `work`, named as "change_0.25,seed=0"; the control is named "control".
    """
    runs = {}
    for path in sorted(work.glob("*,seed=*/eval.jsonl")):
        records = {r["step"]: r for r in read_jsonl(path) if r["seq_len"] == 1024}
        runs[path.parent.name] = {n: r["loss"] for n, r in records.items()}  # of step 0 the last
    rows = []
    for name, losses in runs.items():
        arm, _, seed = name.partition(",seed=")
        control = runs[f"control,seed={seed}"]
        steps = {n: losses[n] - (0 if arm == "control" else control[n]) for n in losses}
        write = "{:.4f}".format if arm == "control" else signed
        rows.append(row(arm, seed, *(write(steps[n]) if n in steps else "" for n in (0, 25, 50))))
    return rows


def training_contrasts(model: Evaluations) -> list[str]:
    """`change` minus `norm` for a quarter of the pairs, trained alike, paired by document."""
    rows = []
    for step in (25, 50):
        trained = []
        for rule in ("change", "norm"):
            place = model.work / "training" / f"{rule}_0.25,seed=0"
            records = [r for r in read_jsonl(place / "eval.jsonl") if r["step"] == step]
            trained.append((records[-1], place))
        difference = model.difference(*trained)
        rows.append(row("change - norm, 0.25", step, difference.samples, *cells_of(difference)))
    return rows


def draw(models: list[Evaluations]) -> Picture:
    """Draws what each rule costs by the share of pairs that rotate, a panel a model and text."""
    cases = [(model, *about) for model in models for about in model.as_it_is]
    rules = ["change", "fast", "norm"]
    style = styles(rules)

    def draw(figure):
        axes = panels(figure, len(cases))
        for place, (model, text, length) in zip(axes.ravel(), cases, strict=True):
            for rule in rules:
                points = {1.0: (0.0, None)}
                for name, one in model.chosen.items():
                    keep, chooser = name[4:]
                    is_shown = chooser in (CHOOSERS[length], "none")
                    if name[:4] == (text, length, rule, "head") and is_shown:
                        plain = model.as_it_is[text, length]
                        difference = model.difference(one, plain)
                        points[keep] = (difference.difference, difference.reach)
                line(place, dict(sorted(points.items())), style[rule], rule)
            place.set_xscale("log", base=2)
            place.set_yscale("symlog", linthresh=0.01)
            place.set_xticks([1 / 8, 1 / 4, 1 / 2, 1], ["1/8", "1/4", "1/2", "1"])
            costs = [0, 0.01, 0.1, 1, 3]
            place.set_yticks(costs, [f"{cost:g}" for cost in costs])
            place.minorticks_off()
            place.set_ylim(-0.005, 5)
            place.set_title(f"{model.work.name}\n{text}, {length} tokens", fontsize=9)
            place.set(xlabel="share of the pairs that rotate")
        axes[0, 0].set_ylabel("loss minus that as it is, nats per token")
        legend(axes[0, -1])

    size = (2.6 * len(cases) + 0.8, 3.6)
    return Picture("which_pairs", "Which pairs", "Loss by rule and share.", "", draw, size)


def main(arguments: list[str]) -> None:
    """Prints all rows, and draws the figure where a file is named."""
    works = [pathlib.Path(name) for name in arguments if not name.endswith(".png")]
    models = [Evaluations(work) for work in works]
    for table in (losses_as_it_is, loss_rows, contrast_rows):
        for model in models:
            print("\n".join(table(model)))
        print()
    for model in models:
        if (model.work / "training").is_dir():
            print("\n".join(training_rows(model.work / "training") + training_contrasts(model)))
    if arguments and arguments[-1].endswith(".png"):
        pathlib.Path(arguments[-1]).write_bytes(draw(models).render())


if __name__ == "__main__":
    main(sys.argv[1:])
