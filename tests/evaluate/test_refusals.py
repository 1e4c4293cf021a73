"""What prope.evaluate and prope.sample refuse: one line that names the flag, before any device."""

import shutil

import jax
import pytest
from support.models import DENSE4, E4, small
from support.runs import edit_run, evaluate_run, make_run
from support.text import refusal

from prope.inference.generation import Sampling, continue_prompts, read_prompts
from prope.inference.opening import parse_interventions

# What is given, and what the line must name: flag and value, or what else is wrong.
EVALUATE = [
    ({"factor": 4.0}, "--factor=4.0: "),
    ({"intervene": "stop", "factor": 2.0}, "--factor=2.0: "),
    ({"intervene": "stop", "encoding": "yarn"}, "--encoding=yarn: "),
    ({"max_windows": 3, "max_tokens": 9999}, "--max_windows=3: "),
    ({"window": ["64", "x"]}, "--window=64,x: 'x'"),
    ({"window": ["0"]}, "--window=0: '0'"),
    ({"window": ["8"], "sinks": ["-1"]}, "--sinks=-1: '-1'"),
    ({"sinks": ["4"]}, "--sinks=4: has no effect without --window"),
    ({"seq_len": "2y"}, "--seq_len=2y: '2y'"),
    ({"seq_len": "64,,2x"}, "--seq_len=64,,2x: ''"),
    ({"seq_len": "0x"}, "--seq_len=0x: '0x'"),
    ({"step": "last"}, "--step=last: "),
    ({"step": "0"}, "it has 7, 9"),
    ({"workdir": "none"}, "--workdir=none: "),
    ({"seq_len": "1x,4x", "max_tokens": 100}, "--max_tokens=100: "),
    ({"seq_len": "48,4x", "max_tokens": 9999}, "--seq_len=48,4x: 48 does not divide"),
    ({"seq_len": "100000000"}, "--seq_len=100000000: "),
    ({"dataset": "synthetic/copy", "split": "all"}, "--split=all: "),
    ({"dataset": "synthetic/copy", "max_tokens": 640}, "--max_tokens=640: "),
]


@pytest.mark.parametrize(("flags", "named"), EVALUATE)
def test_what_cannot_be_evaluated(base, flags, named, monkeypatch):
    monkeypatch.setattr(jax, "devices", None)  # which would initialise them
    assert named in refusal(evaluate_run, **{"workdir": base / "runs"} | flags)


# Of layers 0 to 5, sliding but for 2 and 5; these have 16 pairs, the others 8.
INTERVENE = [
    "halt:1-2",
    "stop,",
    "stop:20-18",
    "stop:15-16",
    "stop:-1",
    "stop:8@sliding",
    "stop:0@0-6",
    "stop:0@3-2",
    "remove@local",
    "stop@full:1",
    "stop:1@full+",
]


@pytest.mark.parametrize("text", INTERVENE)
def test_bands_that_no_layer_has(text):
    assert f"--intervene={text}: " in refusal(parse_interventions, text, small(**DENSE4))


BANDS = [
    ("stop", ()),
    ("stop", (3, 2)),
    ("stop", (0, 32)),
    ("stop", (0, 1.5)),
    ("stop", ("0-1@4",)),  # which takes the keys of layer 1
    ("none", (0, 3)),
]


@pytest.mark.parametrize(("kind", "band"), BANDS)
def test_bands_that_a_config_cannot_have(kind, band):
    fields = {"rope_scaling_type": kind, "scaled_pairs": band}
    assert "config.model.scaled_pairs=" in refusal(small, **E4, **fields)


SCALED = {"model.rope_scaling_type": "linear", "model.rope_scaling_factor": 2.0}
ROPE_ID = {
    "model.rope_percentage": 1.0,
    "model.rope_type": "rope_id",
    "model.original_seq_len": 128,
}
UNCHANGED = [
    ({}, "intervene", "stop:0-1"),  # no pair of p = 0 rotates
    (SCALED, "intervene", "remove:0-1"),
    (ROPE_ID, "encoding", "yarn"),
]


@pytest.mark.parametrize(("fields", "flag", "value"), UNCHANGED)
def test_runs_whose_encoding_cannot_change_are_left_out(runs, base, fields, flag, value):
    """Among several runs it is passed over; a single one is refused."""
    edit_run(runs / "nope", base, **fields)
    assert f"--{flag}={value}: " in refusal(evaluate_run, runs / "nope", **{flag: value})
    (record,) = evaluate_run(runs, **{flag: value})
    assert record["workdir"] == str(runs / "rope")


def test_runs_none_of_which_can_be_evaluated(runs, base):
    for name in ("nope", "rope"):
        edit_run(runs / name, base, **ROPE_ID)
    assert f"--workdir={runs}: " in refusal(evaluate_run, runs, encoding="yarn")
    for name in ("nope", "rope"):
        shutil.rmtree(runs / name / "checkpoints")
    assert f"--workdir={runs}: " in refusal(evaluate_run, runs)


SAMPLE = [
    ({"step": 0}, "--step=0: "),
    ({"prompt": []}, "--prompt=TEXT"),
    ({"prompt": ["a\udcff"]}, r"--prompt='a\udcff': "),
    ({"prompts": "nowhere.txt"}, "nowhere.txt: cannot be read"),
    ({"prompts": "/dev/null"}, "/dev/null: "),
    ({"prompts": "not_utf_8.txt"}, "not_utf_8.txt: cannot be read"),
    ({"workdir": "small"}, "config.data.tokenizer=byte: has 260 ids"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Runs, one with fewer ids than its tokenizer, and a file of bytes that are no text."""
    folder = tmp_path_factory.mktemp("places")
    make_run(folder / "run")
    make_run(folder / "small", vocab_size=200)
    (folder / "not_utf_8.txt").write_bytes(b"good\n\xff\n")
    return folder


@pytest.mark.parametrize(("flags", "named"), SAMPLE)
def test_what_cannot_be_sampled(places, flags, named, monkeypatch):
    monkeypatch.chdir(places)
    monkeypatch.setattr(jax, "devices", None)
    flags = {"workdir": "run", "step": None, "prompt": ["x"], "prompts": None} | flags

    def sample():
        texts = read_prompts(flags["prompt"], flags["prompts"])
        continue_prompts(flags["workdir"], flags["step"], texts, Sampling(4), seed=0)

    assert named in refusal(sample)


OUT_OF_RANGE = ["top_p=0", "top_p=1.1", "top_p=nan", "top_k=0", "length=0"]
OUT_OF_RANGE += ["temperature=-1", "temperature=nan", "temperature=inf"]


@pytest.mark.parametrize("flag", OUT_OF_RANGE)
def test_a_refusal_ends_the_command_with_2_before_a_device_is_touched(places, flag, run_command):
    flags = (f"--workdir={places / 'run'}", "--prompt=x", f"--{flag}")
    outcome = run_command("prope.sample", *flags, JAX_PLATFORMS="cpu,none")
    assert outcome.code == 2
    assert f"--{flag.partition('=')[0]}" in outcome.error
