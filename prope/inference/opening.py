"""Opens the models that a command evaluates, and keeps their records.

A model is a run at a checkpoint, with its encoding or a changed one, at a length. `records` takes
it through: open all checkpoints, then for each read the parameters, evaluate, append the record.
losses.py evaluates losses, asking.py tasks.
"""

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator

from etils import epath

from prope import sharding
from prope.config import read_pairs
from prope.encodings import INTERVENTIONS, SCALINGS, can_rescale
from prope.errors import UsageError, log, usage_error
from prope.inference.options import ENCODINGS, Options
from prope.inference.paired import sums_folder
from prope.runtime import processes
from prope.runtime.environment import advise_dtype
from prope.runtime.files import append_jsonl, as_path, check_writable, is_url
from prope.spec.kinds import FULL
from prope.spec.layers import parse_band
from prope.spec.model import ModelSpec
from prope.spec.run import Spec
from prope.workdir.checkpoints import list_steps
from prope.workdir.records import find_evaluation, read_jsonl
from prope.workdir.run import Run, find_runs, open_run

_CHANGED_BY_FLAGS = ("model.dtype", "model.rope_pairs", "data.bos_every_window")
_BANDS = 8  # that --intervene tries where it names none


def open_runs(options: Options) -> list[tuple[Run, list[str | None]]]:
    """Opens every checkpoint that the flags name, with the encodings to evaluate; None: its own.

    Raises UsageError where a run or a checkpoint is missing, or nothing is left to evaluate.
    """
    workdirs = processes.call_on_first(lambda: list(map(str, find_runs(options.workdir))))
    several = len(workdirs) > 1
    changed = options.encoding or options.intervene
    opened = []
    for workdir in workdirs:
        steps = list_steps(workdir)
        if several and not steps:
            log.info("%s: left out, for it has no finished checkpoint yet", workdir)
            continue
        for step in steps if options.step == "all" else [options.step]:
            run = open_run(workdir, None if step is None else int(step))
            problem = cannot_change(run.spec.model, changed)
            if several and problem:
                log.info("%s: left out, for %s", workdir, problem)
                continue
            with processes.raise_on_all():
                encodings = choose_encodings(run, options)
            opened.append((run, encodings))
    if not opened:
        which = f", and an encoding that {changed} can change" if changed else ""
        problem = f"no run there has a finished checkpoint{which}; train one first"
        raise usage_error("--workdir", options.workdir, problem)
    if not any(encodings for _, encodings in opened):
        problem = "no run there rotates these pairs; give faster ones, or remove"
        raise usage_error("--intervene", options.intervene, problem)
    return opened


def choose_encodings(run: Run, options: Options) -> list[str | None]:
    """Returns the encoding of the flags, or the interventions that change what the run computes."""
    if options.intervene is None:
        return [options.encoding]
    model = choose_model(run.spec, options)
    encodings = []
    for encoding in parse_interventions(options.intervene, model):
        if changes_rotation(model, encoding, run.spec.data.seq_len):
            encodings.append(encoding)
        else:
            log.info("%s: %s left out, for these pairs do not rotate", run.workdir, encoding)
    return [None, *encodings] if encodings else []  # first as it is, to compare with


def parse_interventions(text: str, model: ModelSpec) -> list[str]:
    """Parses --intervene: stop:16-19,remove are stop:16-19, and remove:0-3 .. of every eighth.

    stop@full is every eighth of the pairs of full layers; stop:4@full+0-3@1 are two bands at once.
    """
    encodings = []
    for entry in text.split(","):
        kind_and_place, colon, bands = entry.strip().partition(":")
        kind, at, place = kind_and_place.partition("@")
        try:
            if kind not in INTERVENTIONS or (at and colon):
                kinds = ", ".join(INTERVENTIONS)
                raise ValueError(f"is not {kinds}, alone or with a band of pairs or layers")
            if colon:
                joined = "+".join(str(parse_band(model, band)) for band in bands.split("+"))
                encodings.append(f"{kind}:{joined}")
                continue
            P = parse_band(model, f"0{at}{place}").num_pairs
            width = -(-P // _BANDS)
            for first in range(0, P, width):
                last = min(first + width, P) - 1
                encodings.append(f"{kind}:{parse_band(model, f'{first}-{last}{at}{place}')}")
        except ValueError as error:
            remedy = "give a list such as stop:0-1,stop:2-3@full,remove@sliding,remove:0@3"
            raise usage_error("--intervene", text, f"{entry!r}: {error}", remedy) from None
    return list(dict.fromkeys(encodings))


# --- Another model at test time -------------------------------------------------------------------


def for_this_machine(model: ModelSpec, dtype: str | None) -> ModelSpec:
    """Returns the model with attention for this machine, which need not be the one that trained.

    It is computed in `dtype`; None: as in training.
    """
    dtype = dtype or model.dtype
    return dataclasses.replace(model, attention="auto", global_attention=None, dtype=dtype)


def rescale(model: ModelSpec, encoding: str, length: int, factor: float = 1.0) -> ModelSpec:
    """Returns the model with the scaling or intervention that --encoding or --intervene names.

    The logits keep their scale, except that yarn has one of its own. Where the run was trained with
    the same scaling, its factor stays, and is multiplied by `factor`. `length` is the original one
    where the model names none.
    """
    scaling, _, band = encoding.partition(":")
    problem = cannot_change(model, encoding)
    if problem:
        flag = "--intervene" if band else "--encoding"
        raise usage_error(flag, encoding, problem, "leave it out: the run keeps its encoding")
    own = 1.0 if model.rope_scaling_type == "none" else model.rope_scaling_factor
    is_scaled = "rope_scaling_factor" in SCALINGS[scaling]
    fields = {
        "rope_scaling_type": scaling,
        "rope_scaling_factor": own * factor if is_scaled else own,
        "logit_scale_factor": model.logit_factor,
    }
    if band:
        fields["scaled_pairs"] = tuple(band.split("+"))
    if scaling == "yarn":
        fields["logit_scale"] = "yarn"
        fields["logit_scale_factor"] = (model.logit_factor or 1.0) * factor
    if "original_seq_len" in SCALINGS[scaling] and model.original_seq_len is None:
        fields["original_seq_len"] = length
    return dataclasses.replace(model, **fields)


def choose_model(spec: Spec, options: Options) -> ModelSpec:
    """Returns a run's model for this machine, in --dtype, of which --pairs alone rotate."""
    return keep_pairs(for_this_machine(spec.model, options.dtype), options.pairs)


def keep_pairs(model: ModelSpec, pairs: str | None) -> ModelSpec:
    """Returns the model of which --pairs alone rotate: those of a file, or named; None: its own."""
    if pairs is None:
        return model
    if model.rope_pairs:
        problem = f"the run has config.model.rope_pairs={model.rope_pairs[:40]} of its own"
        raise usage_error("--pairs", pairs, problem, "leave it out")
    text = read_pairs("--pairs", pairs) if pairs.endswith(".json") else pairs
    try:
        return dataclasses.replace(model, rope_pairs=text)
    except UsageError as error:
        _, _, problem = str(error).partition(": ")
        raise usage_error("--pairs", pairs, problem) from None


def cannot_change(model: ModelSpec, encoding: str | None) -> str:
    """Says why a run's encoding cannot be changed to this one; empty where it can."""
    scaling = model.rope_scaling_type
    if encoding is None:
        return ""
    if not can_rescale(model.rope_type, encoding):
        return f"rope_type={model.rope_type} has no wavelength, which {encoding} needs"
    if encoding in ENCODINGS and FULL not in model.kinds:
        return "all its layers have a window, and scalings are of layers without"
    if encoding == "yarn" and model.logit_scale == "drope":
        return "the run has logit_scale=drope, and yarn has another one"
    goes_on = encoding in ENCODINGS and encoding == scaling
    if scaling != "none" and not goes_on:
        return f"the run has rope_scaling_type={scaling}, which goes with no other scaling"
    return ""


def changes_rotation(model: ModelSpec, encoding: str, length: int) -> bool:
    """Returns whether an intervention changes anything: a pair that stands cannot be stopped."""
    if encoding.startswith("remove"):
        return True
    changed = rescale(model, encoding, length, factor=2.0)
    both = zip(changed.layers, model.layers, strict=True)
    return any((after.frequencies != before.frequencies).any() for after, before in both)


def parse_lengths(text: str | None, trained: int) -> list[int]:
    """Parses --seq_len: 512,0.5x,8x are 512 tokens, and half and eight times those of training."""
    lengths = []
    for entry in ["1x"] if text is None else text.split(","):
        match = re.fullmatch(r"\s*([0-9]+|[0-9]*\.[0-9]+(?=x))(x?)\s*", entry)
        unit = trained if match and match[2] else 1
        length = int(float(match[1]) * unit) if match else 0
        if length == 0:
            problem = f"{entry!r} is neither a number of tokens nor a multiple, such as 2x"
            raise usage_error("--seq_len", text, problem)
        lengths.append(length)
    return list(dict.fromkeys(lengths))


def specs_by_length(spec: Spec, options: Options, encoding: str | None) -> dict[int, Spec]:
    """Returns the spec of a run for each length, with the encoding rescaled to it."""
    trained = spec.data.seq_len
    length = spec.data.position_range or trained
    plain = choose_model(spec, options)
    if encoding:
        original = rescale(plain, encoding, length).original_seq_len or trained
        if plain.rope_scaling_type != "none":  # from the original length to that of training
            original = length
    specs = {}
    for T in parse_lengths(options.seq_len, trained):
        model = plain
        if encoding:
            # The formula of dynamic has the length.
            growth = 1.0 if encoding == "dynamic" else max(T / original, 1.0)
            model = rescale(plain, encoding, length, options.factor or growth)
        # As many tokens at a time as at the training's length, so that memory suffices.
        batch_size = max(spec.eval.batch_size * trained // max(T, trained), 1)
        batches = dataclasses.replace(spec.eval, batch_size=options.batch_size or batch_size)
        specs[T] = dataclasses.replace(spec, model=model, eval=batches)
    return specs


# --- Records --------------------------------------------------------------------------------------


def results_folder(workdir: epath.PathLike, root: epath.PathLike, output: str | None) -> epath.Path:
    """Returns where results about a run go: its directory or, with `output`, one below that.

    `root` is the directory that --workdir names; the run lies in it.
    """
    if output is None:
        return epath.Path(workdir)
    below = epath.Path(workdir).relative_to(as_path("--workdir", root))
    return as_path("--output", output) / below


def check_folder(folder: epath.Path, output: str | None) -> None:
    """Raises UsageError, in all processes, where no results can be written into a folder."""

    def check():
        flag = "--workdir" if output is None else "--output"
        check_writable(flag, folder)
        if not is_url(folder) and not os.access(folder, os.W_OK):
            problem = "cannot be written; give --output, a folder for the results"
            raise usage_error(flag, folder, problem)

    processes.call_on_first(check)


def _cache_key(run: Run, encoding: str | None, evaluation) -> dict:
    """Returns the fields that a record needs for this evaluation, to be used again."""
    key = {
        "step": run.step,
        "dataset": evaluation.dataset,
        "seq_len": evaluation.seq_len,
        "fingerprint": evaluation.selection.fingerprint,
        "windows": len(evaluation.selection.indices),
    }
    model = evaluation.spec.model
    if encoding:
        key["encoding"] = encoding
        key["factor"] = model.rope_scaling_factor
        key["logit_factor"] = model.logit_factor
    if model.test_window is not None:
        key |= {"window": model.test_window, "sinks": model.test_sinks}
    ours = evaluation.spec.flat()
    theirs = run.spec.flat()
    changed = {name: ours[name] for name in _CHANGED_BY_FLAGS if ours[name] != theirs[name]}
    if "model.rope_pairs" in changed:  # of all heads, they are long
        changed["model.rope_pairs"] = hashlib.sha256(model.rope_pairs.encode()).hexdigest()[:12]
    if changed:
        key["changed"] = changed
    return key


def _find_record(files: Iterable[epath.Path], cache_key: dict) -> dict | None:
    known = [record for file in files for record in read_jsonl(file)]
    return find_evaluation(known, **cache_key)


def records(
    options: Options, open_evaluations: Callable[[Run, str | None], list], file: str, **fields
) -> Iterator[dict]:
    """Yields the record of each evaluation, computed where the run's `file` does not have it.

    Args:
      options: the flags.
      open_evaluations: opens what evaluates the parameters of a run with an encoding: all, before
        the first is computed.
      file: the name of the records in the run's directory, or its `results_folder`.
      fields: more values of new records.
    """
    plan = []
    for run, encodings in open_runs(options):
        with processes.raise_on_all():
            cases = [(name, one) for name in encodings for one in open_evaluations(run, name)]
        plan.append((run, cases))
    for run, cases in plan:
        folder = results_folder(run.workdir, options.workdir, options.output)
        files = dict.fromkeys((run.workdir / file, folder / file))  # often the same one
        params = None  # read when the first record is not there yet
        for encoding, evaluation in cases:
            model = evaluation.spec.model
            cache_key = _cache_key(run, encoding, evaluation)
            record = cache_key | {
                "split": evaluation.split,
                "dtype": model.dtype,
                "rope_percentage": model.rope_percentage,
                "rotated_pairs": model.rotated_pairs,
            }
            run_identity = {"init_hash": run.init_hash, "workdir": str(run.workdir)}
            where = f"{evaluation.seq_len} tokens a window of {evaluation.dataset}"
            description = f"step {run.step} of {run.workdir}, {where}"
            find = functools.partial(_find_record, files, cache_key)
            cached = None if options.again else processes.call_on_first(find)
            if cached:
                log.info("%s is in %s", description, file)
                yield record | cached | run_identity
                continue
            rotation = model.describe_rotation()
            log.info("evaluating %s, in %s; %s", description, model.dtype, rotation)
            if params is None:
                check_folder(folder, options.output)
                # Without --step, those of the newest undamaged checkpoint.
                run, params = run.restore_newest_valid(Run.params)
                record["step"] = run.step
                advise_dtype(model.dtype)
            result = evaluation.evaluate(params, sharding.make_mesh(), sums_folder(folder, record))
            record |= fields | result | run_identity
            if processes.is_first():
                append_jsonl(folder / file, record)
            yield record
