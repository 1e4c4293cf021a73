"""Opens the models that a command evaluates, and keeps their records.

A model is a run at a checkpoint, with its encoding or a changed one, at a length. evaluation.py
computes losses of them, asking.py asks them tasks.
"""

import os
import re
from collections.abc import Callable, Iterator

from etils import epath
from ml_collections import ConfigDict

from prope import sharding
from prope.config import flat
from prope.encodings import (
    INTERVENTIONS,
    SCALINGS,
    can_rescale,
    describe,
    layer_frequencies,
    logit_factor,
    parse_band,
    rotated_pairs,
)
from prope.errors import log, usage_error
from prope.inference.options import ENCODINGS, Options
from prope.inference.paired import sums_folder
from prope.runtime import processes
from prope.runtime.environment import advise_dtype
from prope.runtime.files import append_jsonl, as_path, check_writable, is_url
from prope.runtime.validate import validate
from prope.stack.layers import layer_windows
from prope.workdir.checkpoints import list_steps
from prope.workdir.records import find_evaluation, read_jsonl
from prope.workdir.run import Run, find_runs, open_run

_CHANGED_BY_FLAGS = ("model.dtype", "data.bos_every_window")
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
            problem = cannot_change(run.config.model, changed)
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


def choose_encodings(run: Run, options: Options) -> list[str | None]:
    """Returns the encoding of the flags, or the interventions that change what the run computes."""
    if options.intervene is None:
        return [options.encoding]
    encodings = []
    for encoding in parse_interventions(options.intervene, run.config.model):
        if changes_rotation(run.config, encoding):
            encodings.append(encoding)
        else:
            log.info("%s: %s left out, for these pairs do not rotate", run.workdir, encoding)
    return [None, *encodings] if encodings else []  # first as it is, to compare with


def parse_interventions(text: str, model: ConfigDict) -> list[str]:
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


def changes_rotation(config: ConfigDict, encoding: str) -> bool:
    """Returns whether an intervention changes anything: a pair that stands cannot be stopped."""
    changed = config.copy_and_resolve_references()
    rescale(changed, encoding)
    changed.model.rope_scaling_factor = 2.0
    both = zip(layer_frequencies(changed.model), layer_frequencies(config.model), strict=True)
    return encoding.startswith("remove") or any((after != before).any() for after, before in both)


def cannot_change(model: ConfigDict, encoding: str | None) -> str:
    """Says why a run's encoding cannot be changed to this one; empty where it can."""
    scaling = model.rope_scaling_type
    if encoding is None:
        return ""
    if not can_rescale(model.rope_type, encoding):
        return f"rope_type={model.rope_type} has no wavelength, which {encoding} needs"
    if encoding in ENCODINGS and None not in layer_windows(model):
        return "all its layers have a window, and scalings are of layers without"
    if encoding == "yarn" and model.logit_scale == "drope":
        return "the run has logit_scale=drope, and yarn has another one"
    goes_on = encoding in ENCODINGS and encoding == scaling
    if scaling != "none" and not goes_on:
        return f"the run has rope_scaling_type={scaling}, which goes with no other scaling"
    return ""


def rescale(config: ConfigDict, encoding: str | None) -> None:
    """Sets the scaling that --encoding or --intervene names, for the length of the training.

    The logits keep their scale, except that yarn has one of its own. Where the run was trained with
    the same scaling, its factor stays, and is multiplied by that of the flags.
    """
    if encoding is None:
        return
    model = config.model
    scaling, _, band = encoding.partition(":")
    problem = cannot_change(model, encoding)
    if problem:
        flag = "--intervene" if band else "--encoding"
        raise usage_error(flag, encoding, problem, "leave it out: the run keeps its encoding")
    if band:
        model.scaled_pairs = tuple(band.split("+"))
    model.logit_scale_factor = logit_factor(model)
    if model.rope_scaling_type == "none":
        model.rope_scaling_factor = 1.0
    model.rope_scaling_type = scaling
    if scaling == "yarn" and model.logit_scale == "none":
        model.logit_scale = "yarn"
        model.logit_scale_factor = 1.0
    if "original_seq_len" in SCALINGS[scaling] and model.original_seq_len is None:
        model.original_seq_len = config.data.position_range or config.data.seq_len


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


def configs_by_length(
    config: ConfigDict, options: Options, encoding: str | None
) -> dict[int, ConfigDict]:
    """Makes the config of a run for each length, with the encoding rescaled to it."""
    config = config.copy_and_resolve_references()
    model = config.model
    model.attention = "auto"  # for this machine, which need not be the one that trained
    model.global_attention = None
    is_scaled = model.rope_scaling_type != "none"
    model.dtype = options.dtype or model.dtype
    rescale(config, encoding)
    validate(config)
    trained = config.data.seq_len
    original = model.original_seq_len or trained
    if is_scaled:  # from the original length to that of training
        original = config.data.position_range or trained
    configs = {}
    for T in parse_lengths(options.seq_len, trained):
        configs[T] = config_T = config.copy_and_resolve_references()
        if encoding and "rope_scaling_factor" in SCALINGS[model.rope_scaling_type]:
            growth = max(T / original, 1.0)
            if encoding == "dynamic":
                growth = 1.0  # its formula has the length
            factor = options.factor or growth
            config_T.model.rope_scaling_factor *= factor
            if encoding == "yarn":
                config_T.model.logit_scale_factor *= factor
        # As many tokens at a time as at the training's length, so that memory suffices.
        batch_size = max(config.eval.batch_size * trained // max(T, trained), 1)
        config_T.eval.batch_size = options.batch_size or batch_size
    return configs


def _cache_key(run: Run, encoding: str | None, evaluation) -> dict:
    """Returns the fields that a record needs for this evaluation, to be used again."""
    key = {
        "step": run.step,
        "dataset": evaluation.dataset,
        "seq_len": evaluation.seq_len,
        "fingerprint": evaluation.selection.fingerprint,
        "windows": len(evaluation.selection.indices),
    }
    model = evaluation.config.model
    if encoding:
        key |= {
            "encoding": encoding,
            "factor": model.rope_scaling_factor,
            "logit_factor": logit_factor(model),
        }
    if model.test_window is not None:
        key |= {"window": model.test_window, "sinks": model.test_sinks}
    ours, theirs = flat(evaluation.config), flat(run.config)
    changed = {name: ours[name] for name in _CHANGED_BY_FLAGS if ours[name] != theirs[name]}
    if changed:
        key["changed"] = changed
    return key


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
            model = evaluation.config.model
            cache_key = _cache_key(run, encoding, evaluation)
            record = cache_key | {
                "split": evaluation.split,
                "dtype": model.dtype,
                "rope_percentage": model.rope_percentage,
                "rotated_pairs": rotated_pairs(model),
            }
            run_identity = {"init_hash": run.init_hash, "workdir": str(run.workdir)}
            where = f"{evaluation.seq_len} tokens a window of {evaluation.dataset}"
            description = f"step {run.step} of {run.workdir}, {where}"

            def find(files=files, cache_key=cache_key) -> dict | None:
                known = [record for path in files for record in read_jsonl(path)]
                return find_evaluation(known, **cache_key)

            cached = None if options.again else processes.call_on_first(find)
            if cached:
                log.info("%s is in %s", description, file)
                yield record | cached | run_identity
                continue
            log.info("evaluating %s, in %s; %s", description, model.dtype, describe(model))
            if params is None:
                check_folder(folder, options.output)
                # Without --step, those of the newest undamaged checkpoint.
                run, params = run.first_undamaged(Run.params)
                record["step"] = run.step
                advise_dtype(model.dtype)
            result = evaluation.evaluate(params, sharding.make_mesh(), sums_folder(folder, record))
            record |= fields | result | run_identity
            if processes.is_first():
                append_jsonl(folder / file, record)
            yield record
