"""Packs the text of configs/unrotated_or_fast.py, trains all arms at once, prints the tables.

    python configs/results/unrotated_or_fast.py pack --source=LINUX.tar.xz --output=DATA
    python configs/results/unrotated_or_fast.py train --workdir=W --data=DATA [--size=pilot]
    python configs/results/unrotated_or_fast.py tables --workdir=W

pack needs Debian's package linux-source-6.1 (/usr/src/linux-source-6.1.tar.xz) and the library of
the Python that runs it: C source, documentation and Python, 32 MB; whole subsystems are held out.

train runs six arms x four seeds as one program: the ordinary step, vmapped. The arms of a seed
share its weights and batches. Every run is an ordinary one, W/config=ARM,seed=N, that goes on from
its checkpoint, here or by prope.train. When four seeds are done, the same command trains the next
four. --seconds saves and stops after so long; --page and --size train the arms of another page.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import lzma
import pathlib
import runpy
import sys
import sysconfig
import tarfile
import time

import numpy as np
from etils import epath

from prope.errors import UsageError, usage_error

FILE = pathlib.Path(__file__).parents[1] / "unrotated_or_fast.py"
PAGE = runpy.run_path(str(FILE))
TOGETHER = 4  # seeds
# Of the source's archive: folder, pattern, MB of text to train on, folders that are held out.
KERNEL = (
    ("kernel mm fs net lib block ipc", ".c", 14, ("fs/ext4", "net/ipv4", "kernel/sched")),
    ("Documentation", ".rst", 9, ("Documentation/filesystems", "Documentation/networking")),
)
LIBRARY = (9, ("asyncio", "email", "json"))  # MB of Python's library, packages that are held out
HELD_OUT_MB = 1.0  # of each of the three


# --- Text -----------------------------------------------------------------------------------------


def pack(source: str, output: str, library: str = sysconfig.get_path("stdlib")) -> dict:
    """Writes DATA/train.jsonl.xz and validation.jsonl.xz; returns their bytes of text."""
    if not pathlib.Path(source).is_file():
        remedy = "apt-get install linux-source-6.1 brings it, as /usr/src/linux-source-6.1.tar.xz"
        raise usage_error("--source", source, "no such file", remedy)
    found = [{"train": [], "validation": []} for _ in range(3)]
    with tarfile.open(source) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            for (folders, ending, _, held_out), texts in zip(KERNEL, found[:2], strict=True):
                inside = name.startswith(tuple(f"{folder}/" for folder in folders.split()))
                if member.isfile() and inside and name.endswith(ending):
                    text = archive.extractfile(member).read().decode("utf-8", "replace")
                    texts[split_of(name, held_out)].append((name, text))
    for path in pathlib.Path(library).rglob("*.py"):
        name = str(path.relative_to(library))
        if not {"site-packages", "dist-packages", "test", "tests"} & set(name.split("/")):
            text = path.read_text("utf-8", "replace")
            found[2][split_of(name, LIBRARY[1])].append((name, text))
    sizes = [size for _, _, size, _ in KERNEL] + [LIBRARY[0]]
    folder = pathlib.Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    totals = {}
    for split in ("train", "validation"):
        documents = []
        for texts, size in zip(found, sizes, strict=True):
            documents += choose(texts[split], size if split == "train" else HELD_OUT_MB)
        totals[split] = sum(len(text.encode()) for text in documents)
        with lzma.open(folder / f"{split}.jsonl.xz", "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    return totals


def split_of(name: str, held_out: tuple[str, ...]) -> str:
    """Returns the split of a file, which is that of its whole folder."""
    is_held_out = name.startswith(tuple(f"{folder}/" for folder in held_out))
    return "validation" if is_held_out else "train"


def choose(texts: list[tuple[str, str]], megabytes: float) -> list[str]:
    """Returns files in the order of their names' hashes until there are as many bytes."""
    texts.sort(key=lambda text: hashlib.sha256(text[0].encode()).digest())
    chosen = []
    total = 0
    for _, text in texts:
        size = len(text.encode())
        if size > 2000 and total + size <= megabytes * 1e6:
            chosen.append(text)
            total += size
    return chosen


# --- Training -------------------------------------------------------------------------------------


def arm_phases(specs) -> dict[str, np.ndarray]:
    """Returns, by kind of layer, the phases per token of every arm, uint32 [arms, 2, P].

    Arms may differ in how the layers of a kind rotate, which all do alike, and in nothing else.
    """
    from prope.rope import phase_per_token

    phases = {}
    for spec in specs:
        assert spec.model.layers == specs[0].model.layers
        for kind in dict.fromkeys(spec.model.kinds):
            layers = [layer for layer in spec.model.layers if layer.kind == kind]
            rows = np.concatenate([layer.frequencies for layer in layers])
            assert (rows == rows[0]).all()
            phases.setdefault(kind, []).append(phase_per_token(tuple(rows[0].tolist())))
    return {kind: np.stack(of_arms) for kind, of_arms in phases.items()}


def make_step(spec, optimizer):
    """Makes (params, opt_state, batch, phases) -> (params, opt_state, metrics) of all models.

    It is the step of prope.train, vmapped: state and metrics are [arms, seeds, ..], batches
    [seeds, ..] and phases those of `arm_phases`.
    """
    import jax

    from prope.encodings import Tables
    from prope.rope import phase_table
    from prope.step import make_train_step

    step = make_train_step(spec, optimizer)

    def step_of_arm(params, opt_state, batch, phases):
        positions = batch["positions"][:1]  # which all windows have
        tables = {kind: phase_table(positions, of_arm)[None] for kind, of_arm in phases.items()}
        return step(params, opt_state, batch, Tables(tables, {}))

    of_seeds = jax.vmap(step_of_arm, in_axes=(0, 0, 0, None))
    return jax.vmap(of_seeds, in_axes=(0, 0, None, 0))


def get_spec(page: dict, name: str, seed: int, data: str):
    """Returns the spec of one run of a page, as its `get_config` names it."""
    from prope.config import resolve

    config = page["get_config"](name)
    config.seed = seed
    if config.data.dataset == "mixture":
        text, *others = config.data.mixture
        config.data.mixture = (text | {"data_dir": data}, *others)
    return resolve(config)


def train(page: str, size: str, workdir: str, data: str = "", seconds: float = 1e9) -> dict:
    """Trains the next four seeds of all arms of a page; returns what it did.

    `page` has get_config and get_sweep(size), whose "config" are the arms.
    """
    from prope.workdir.checkpoints import list_steps

    end = time.monotonic() + seconds
    loaded = runpy.run_path(page)
    names = [config.rpartition(":")[2] for config in loaded["get_sweep"](size)["config"]]
    first = 0
    while True:
        specs = {
            f"config={name},seed={seed}": get_spec(loaded, name, seed, data)
            for name in names
            for seed in range(first, first + TOGETHER)
        }
        places = {name: epath.Path(workdir) / name for name in specs}
        last = next(iter(specs.values())).num_steps
        if not all(last in list_steps(place) for place in places.values()):
            break
        first += TOGETHER
    return train_together(specs, places, end)


def train_together(specs: dict, places: dict, end: float) -> dict:
    """Trains runs, which are [arms, seeds] in this order, to their last step, or until `end`."""
    import jax
    import jax.numpy as jnp

    from prope import sharding
    from prope.data.mixture import open_windows
    from prope.data.windows import prefetch, train_batch
    from prope.kernels.choice import matmul_precision
    from prope.runtime.files import append_jsonl
    from prope.runtime.startup import Startup
    from prope.step import init_state, prepare
    from prope.train import State, data_state, resume
    from prope.workdir.checkpoints import Checkpoints
    from prope.workdir.hashes import hash_arrays
    from prope.workdir.run import open_workdir, write_config

    prepared = prepare(next(iter(specs.values())), jax.devices()[:1])
    spec, mesh, optimizer, _ = prepared
    seeds = list(dict.fromkeys(one.seed for one in specs.values()))
    stacked = (len(specs) // len(seeds), len(seeds))
    phases = arm_phases(list(specs.values())[:: len(seeds)])
    windows = open_windows(spec.data, spec.model.vocab_size, "train")
    Startup().use_cache()  # of compiled programs
    step_together = jax.jit(make_step(spec, optimizer), donate_argnums=(0, 1))

    @functools.cache
    def init(seed):  # all arms of a seed begin alike
        return jax.jit(functools.partial(init_state, spec.replace({"seed": seed}), optimizer))()

    def read(step):
        batches = [train_batch(windows, seed, spec.batch_size, step) for seed in seeds]
        return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}

    def take(state, arm, seed):
        return jax.tree.map(lambda leaf: leaf[arm, seed], tuple(state))

    with contextlib.ExitStack() as opened, sharding.use(mesh), matmul_precision(spec.model.dtype):
        checkpoints = {}
        for name, one in specs.items():
            opened.enter_context(open_workdir(places[name], one))
            write_config(places[name], one)
            found = Checkpoints(places[name], one.checkpoint)
            checkpoints[name] = opened.enter_context(found)
        common = set.intersection(*(set(found.steps()) for found in checkpoints.values()))
        start = max(common, default=0)
        states = []
        for name, one in specs.items():
            for step in checkpoints[name].steps():
                if step > start:  # that others do not have: all were stopped while they saved
                    checkpoints[name].set_aside(step)
            if start:
                states.append(resume(one, checkpoints[name], prepared, windows))
                if states[-1].step != start:
                    problem = f"{places[name]}: checkpoint {start} is damaged and was set aside"
                    raise UsageError(f"{problem}: run the same command again")
            else:
                params, opt_state = init(one.seed)
                states.append(State(0, params, opt_state, hash_arrays(params)))
        hashes = [state.init_hash for state in states]
        state = jax.tree.map(
            lambda *leaves: jnp.stack(leaves).reshape(*stacked, *leaves[0].shape),
            *[(state.params, state.opt_state) for state in states],
        )
        del states
        seconds = []
        records = []
        for step, batch in enumerate(prefetch(read, start, spec.num_steps), start + 1):
            begun = time.monotonic()
            *state, metrics = step_together(*state, batch, phases)
            losses = np.asarray(metrics["loss"])
            seconds.append(time.monotonic() - begun)
            median = float(np.median(seconds[1:] or seconds))
            is_last = step == spec.num_steps or time.monotonic() > end
            if step % spec.log_every == 0 or is_last:
                tokens = losses.size * spec.batch_size * spec.data.seq_len / median
                print(f"step {step}: {losses.mean():.4f}, {tokens:,.0f} tokens/s", file=sys.stderr)
                records.append((step, losses.ravel().tolist(), median))
            if step % spec.checkpoint_every == 0 or is_last:
                for number, (name, one) in enumerate(specs.items()):
                    params, opt_state = take(state, *divmod(number, len(seeds)))
                    identity = {"config": one.to_dict(), "init_hash": hashes[number]}
                    data = data_state(one, windows, step)
                    checkpoints[name].save(step, params, opt_state, identity, data)
                    lines = [
                        {"step": at, "loss": of_runs[number], "step_seconds": taken}
                        for at, of_runs, taken in records
                    ]
                    append_jsonl(places[name] / "metrics.jsonl", *lines)
                records = []
            if is_last:
                break
    return {
        "runs": len(specs),
        "seeds": seeds,
        "step": step,
        "of": spec.num_steps,
        "first_step_seconds": round(seconds[0], 2),
        "step_seconds": round(median, 4),
    }


# --- Tables ---------------------------------------------------------------------------------------


def training_rows(workdir: pathlib.Path) -> list[str]:
    """By arm: seeds, the loss of its last batch with its deviation over seeds, seconds per step."""
    by_arm = {}
    for place in sorted(workdir.glob("config=*,seed=*")):
        arm = place.name.removeprefix("config=").partition(",")[0].partition("-")[0]
        by_arm.setdefault(arm, []).append(_read_lines(place / "metrics.jsonl")[-1])
    rows = []
    for arm in PAGE["ARMS"]:
        losses = [record["loss"] for record in by_arm[arm]]
        (step,) = {record["step"] for record in by_arm[arm]}
        seconds = np.median([record["step_seconds"] for record in by_arm[arm]])
        deviation = f"{np.std(losses, ddof=1):.3f}"
        cells = (len(losses), step, f"{np.mean(losses):.3f}", deviation, f"{seconds:.1f}")
        rows.append(_row(arm, *cells))
    return rows


class Records:
    """What the runs of a folder were asked, by arm and seed."""

    def __init__(self, workdir: pathlib.Path):
        self.evaluations, self.tasks = {}, {}
        for place in sorted(workdir.glob("config=*,seed=*")):
            arm, seed = place.name.removeprefix("config=").split(",seed=")
            run = (arm.partition("-")[0], int(seed))
            self.evaluations[run] = _read_lines(place / "eval.jsonl")
            self.tasks[run] = _read_lines(place / "longcontext.jsonl")
            self.length = json.loads((place / "config.json").read_text())["data"]["seq_len"]
        self.seeds = sorted({seed for _, seed in self.evaluations})
        self.runs = {(arm, seed) for arm in PAGE["ARMS"] for seed in self.seeds}
        assert self.runs == set(self.evaluations), "every seed has all arms"

    def losses(self, text: str, times: int, window: int | None = None) -> dict:
        """By arm and seed, the loss in windows of so many times the length of training."""
        return {
            run: _one(
                record["loss"]
                for record in self.evaluations[run]
                if record.get("dataset") == "files"
                and (record["split"] == "validation") == (text == "held out")
                and record["seq_len"] == times * self.length
                and record.get("window") == window
            )
            for run in self.runs
        }

    def right(self, task: str, times: int) -> dict:
        """By arm and seed, the share of right answers."""
        return {
            run: _one(
                record["accuracy"]
                for record in self.tasks[run]
                if record["task"] == task and record["seq_len"] == times * self.length
            )
            for run in self.runs
        }

    def contrast(self, values: dict, weights: dict[str, float]) -> list[float]:
        """Weighs the arms of every seed, [seeds]."""
        return [
            sum(weight * values[arm, seed] for arm, weight in weights.items())
            for seed in self.seeds
        ]


def _read_lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _one(found):
    (value,) = set(found)
    return value


UNROTATED = {"partial": 0.5, "p_rope": 0.5, "rope": -0.5, "fast": -0.5}
SLOW = {"rope": 0.5, "partial": 0.5, "fast": -0.5, "p_rope": -0.5}
# Unrotated lanes beside slow pairs minus unrotated lanes beside none.
INTERACTION = {"partial": 1, "rope": -1, "p_rope": -1, "fast": 1}


def _row(*cells) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def arm_rows(records: Records) -> list[str]:
    """By arm: losses of both texts at 1x and 8x, and right answers in %; means over seeds."""
    losses = [records.losses(text, times) for text in ("held out", "articles") for times in (1, 8)]
    right = [records.right(task, times) for task in ("niah", "lookup") for times in (1, 8)]
    rows = []
    for arm in PAGE["ARMS"]:
        cells = [arm, len(records.seeds)]
        for values, form in [(x, "{:.3f}") for x in losses] + [(x, "{:.1%}") for x in right]:
            mean = np.mean([values[arm, seed] for seed in records.seeds])
            cells.append(form.format(mean).replace("%", " %"))
        rows.append(_row(*cells))
    return rows


def contrast_rows(records: Records) -> list[str]:
    """The precondition, alone; then the four that were declared, by Holm and Bonferroni."""
    from prope.inference.statistics import average_seeds, holm

    near = records.losses("held out", 1)
    cut = records.losses("held out", 1, window=records.length // 4)
    gain = {run: cut[run] - near[run] for run in near}
    niah, lookup = (records.right(task, 8) for task in ("niah", "lookup"))
    right = {run: (niah[run] + lookup[run]) / 2 for run in niah}
    declared = {
        "unrotated, right at 8x": (right, UNROTATED),
        "slow pairs, right at 8x": (right, SLOW),
        "interaction, right at 8x": (right, INTERACTION),
        "unrotated, loss at 1x": (near, UNROTATED),
    }
    alone = average_seeds(records.contrast(gain, {"rope": 1}))
    found = [average_seeds(records.contrast(*one)) for one in declared.values()]
    found = [one._replace(comparisons=len(found)) for one in found]
    adjusted = [1.0 if one.p_value is None else one.p_value for one in found]
    rows = [_row("precondition: rope's gain from far keys", *_cells(alone), "", "")]
    for name, one, p in zip(declared, found, holm(adjusted), strict=True):
        rows.append(_row(name, *_cells(one), f"{p:.3g}", f"{one.sign_flip_p_value or 1:.3g}"))
    return rows


def _cells(difference) -> list[str]:
    ends = difference.interval()
    interval = "{:+.4f} to {:+.4f}".format(*ends) if ends else "equal in all seeds"
    return [f"{difference.difference:+.4f}", interval]


def main() -> None:
    """Runs one of the three commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("pack", "train", "tables"))
    parser.add_argument("--source", default="/usr/src/linux-source-6.1.tar.xz")
    parser.add_argument("--output", default="data/unrotated_or_fast")
    parser.add_argument("--data", default="data/unrotated_or_fast")
    parser.add_argument("--workdir", default="runs/unrotated_or_fast")
    parser.add_argument("--page", default=str(FILE), help="another page, such as longcontext.py")
    parser.add_argument("--size", default="full")
    parser.add_argument("--seconds", type=float, default=1e9)
    flags = parser.parse_args()
    if flags.command == "pack":
        print(json.dumps(pack(flags.source, flags.output)))
    elif flags.command == "train":
        has_text = pathlib.Path(flags.data, "train.jsonl.xz").is_file()
        if flags.page == str(FILE) and flags.size != "tiny" and not has_text:
            raise usage_error("--data", flags.data, "has no train.jsonl.xz", "pack makes it")
        done = train(flags.page, flags.size, flags.workdir, flags.data, flags.seconds)
        print(json.dumps(done))
    else:
        print("\n".join(training_rows(pathlib.Path(flags.workdir))))
        records = Records(pathlib.Path(flags.workdir))
        print("\n".join(arm_rows(records) + contrast_rows(records)))


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
