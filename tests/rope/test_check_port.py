"""Golden vectors against an oracle; a port's mistake is named, other programs pass."""

import json
import re
import subprocess
import sys
import types
import zipfile

import ml_dtypes
import numpy as np
import oracles
import pytest
from support import write_golden
from support.commands import ROOT, refusal
from support.planted import ROPE_MUTANTS, load_source

from prope.golden import check as golden_check
from prope.golden.check import (
    ARRAYS,
    FLOAT32,
    MISTAKES,
    TOLERANCE,
    check,
    explains,
    load_cases,
    predict,
    read_values,
)
from prope.rope import apply_p_rope

CASES = load_cases()
PROPORTIONAL = [name for name in CASES if name.startswith("proportional")]
PARTIAL = [name for name in CASES if name.startswith("partial")]
LINEAR = [name for name in CASES if name.startswith("linear")]
FEW = [
    "proportional_d16_p0",
    "proportional_d16_p0.25",
    "proportional_d16_p0.75",
    "proportional_d16_p0.75_negative",
]


def settings(name):
    case = CASES[name]
    return case["head_dim"], case["max_wavelength"], case["rope_percentage"]


def golden(names, kinds=ARRAYS):
    return {name: {kind: CASES[name][kind] for kind in kinds} for name in names}


@pytest.fixture(autouse=True, scope="module")
def predictions_are_kept():
    """Every mistake is computed once for each case: most tests look through all of them."""
    known = {}

    def predict_once(case, mistake, error=0.0):
        key = (id(case), tuple(mistake.items()), error)
        if key not in known:
            known[key] = predict(case, mistake, error)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(golden_check, "predict", predict_once)
        yield


def mistake_in(values):
    return check(values)[1]["mistake"]


# --- The golden files ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_golden_values_are_the_formula_s(name):
    """Partial rotary rotates its lanes as RoPE a head of that width; linear scaling, positions."""
    case = CASES[name]
    d, theta, p = settings(name)
    factor = case.get("rope_scaling_factor", 1)
    assert factor == (8 if name in LINEAR else 1)
    width = d
    if name in PARTIAL:
        width = 2 * (int(p * d) // 2)
        p = 1
    freqs = oracles.frequencies(width, theta, p) / factor
    freqs = np.append(freqs, np.zeros((d - width) // 2))
    angles = case["positions"][:, None] * freqs
    expected = {"frequencies": freqs, "cos": np.cos(angles), "sin": np.sin(angles)}
    for kind in ("queries", "keys"):
        lanes = case[kind][None, :, None, :width]
        rotated = oracles.rotation(lanes, case["positions"][None] / factor, theta, p)[0, :, 0]
        expected[f"rotated_{kind}"] = np.append(rotated, case[kind][:, width:], axis=1)
    expected["scores"] = expected["rotated_queries"] @ expected["rotated_keys"].T
    np.testing.assert_allclose(case["frequencies"], freqs, rtol=1e-14)
    for kind in ARRAYS:
        bound = 1e-8 if kind == "scores" else 1e-9
        np.testing.assert_allclose(case[kind], expected[kind], rtol=0, atol=bound)
    assert np.any(case["queries"] != case["keys"])
    assert case["queries"].max() == 1.5


def test_the_golden_files_can_be_written_again(tmp_path):
    write_golden.main(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["linear.json", "partial.json", "proportional.json"]
    for file in files:
        assert file.read_bytes() == (ROOT / "prope/golden" / file.name).read_bytes()
    source = (ROOT / "tests/support/write_golden.py").read_text()
    assert "prope" not in re.findall(r"^(?:import|from) (\w+)", source, re.M)


def test_the_golden_files_are_installed(tmp_path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    build += ["--directory", tmp_path]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        for name in ("linear", "partial", "proportional"):
            assert json.loads(wheel.read(f"prope/golden/{name}.json"))


def test_no_jax_is_imported():
    code = "import prope.golden.check, prope.runtime.files, sys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# --- prope, and copies of it with a planted error -----------------------------------------------


def computed(module, names, kinds=ARRAYS):
    """What prope.rope, or a copy of it, computes for these cases."""
    values = {}
    for name in names:
        case = CASES[name]
        positions = case["positions"].astype(np.int32)
        freqs = module.frequencies(*settings(name))
        cos, sin = np.asarray(module.rotation_table(positions, freqs))
        arrays = {"frequencies": freqs, "cos": cos, "sin": sin}
        for kind in ("queries", "keys"):
            inputs = np.float32(case[kind])[None, :, None]
            rotated = module.apply_p_rope(inputs, positions[None], *settings(name))
            arrays[f"rotated_{kind}"] = np.asarray(rotated)[0, :, 0].astype(float)
        arrays["scores"] = arrays["rotated_queries"] @ arrays["rotated_keys"].T
        values[name] = {kind: arrays[kind] for kind in kinds}
    return values


@pytest.mark.parametrize(
    "kinds", [ARRAYS, ("rotated_queries",), ("cos", "sin"), ("frequencies",), ("scores",)]
)
def test_prope_passes(kinds):
    verdict, result = check(computed(sys.modules["prope.rope"], FEW, kinds))
    assert verdict.startswith("equal to p-RoPE in 4 of 19 cases within")
    assert result["equal"] and result["mistake"] is None
    assert result["max_error"] < TOLERANCE
    assert result["encoding"] == "proportional"


UNKNOWN = "no known mistake explains it"
PLANTED = {
    "wrong denominator": "the exponent is divided by the number of rotated lanes, not by head_dim",
    "prefix pairing": "prefix pairing: the rotated lanes are paired among themselves, "
    "not over the head",
    "interleaved pairing": "interleaved lanes are read, halves are written",
    "slow end kept": "the slow end is kept: the fastest pairs are dropped",
    "bfloat16 positions": "bfloat16 positions",
    "bfloat16 frequencies": "bfloat16 frequencies",
    "p applied twice": "p is applied twice",
    "p = 0 read as unset": "p = 0 is read as unset",
    "a sign of the rotation": "the sign of the second lane's sine is wrong",
    "float32 angles": FLOAT32,
    "low word of the fraction dropped": FLOAT32,
    "quarter turns rounded down": UNKNOWN,
    "sine of negative positions": "the sign of a negative position is lost",
}


@pytest.mark.parametrize("name", ROPE_MUTANTS)
def test_every_planted_error_is_named(name):
    file = ROOT / "prope/rope.py"
    source = file.read_text().replace(*ROPE_MUTANTS[name])
    mutant = load_source("prope.rope", file, source)
    # The first case, p = 0, shows one error only.
    values = computed(mutant, FEW if name.startswith("p = 0") else FEW[1:])
    assert mistake_in(values) == PLANTED[name]
    keys = {case: {"rotated_keys": arrays["rotated_keys"]} for case, arrays in values.items()}
    verdict, result = check(keys)
    assert result["mistake"] == PLANTED[name] and not result["equal"]
    assert verdict.startswith("not p-RoPE in ")
    assert f"({result['worst_case']}/rotated_keys[" in verdict


# --- Ports written by hand ----------------------------------------------------------------------


def bfloat16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


IN_PLACE = "in place: the second lane is computed from the first one, already rotated"
ROTATED_FIRST = "halves are read, and the lanes that rotate are written first"
SCALED = "linear scaling by 8 in every layer, not in Gemma 3's full layers alone"
FLOAT16 = "float16 table of cos and sin"
EXCHANGED = "cos and sin are exchanged in the pairs that rotate"
# What each port changes, for d = head_dim, n rotated pairs and positions m. `width` is the
# exponent's denominator; `distance` is that of a pair's lanes, 0: they are neighbours.
PORTS = {
    "partial rotary instead of p-RoPE: denominator and pairing": lambda c: {
        "width": 2 * c.n,
        "distance": c.n,
    },
    "interleaved lanes: lane 2k pairs with 2k + 1": lambda c: {"distance": 0},
    "p is ignored: every pair is rotated": lambda c: {"n": c.d // 2},
    "nothing is rotated, as where p is read as a percentage": lambda c: {
        "n": int(c.p / 100 * c.d // 2)
    },
    "the number of rotated pairs is rounded up": lambda c: {"n": -int(-c.p * c.d // 2)},
    "max_wavelength is 10000 for every case": lambda c: {"theta": 1e4},
    "bfloat16 angles": lambda c: {"round_angles": bfloat16},
    "the rotation has the wrong direction": lambda c: {"m": -c.m},
    IN_PLACE: lambda c: {"in_place": True},
    ROTATED_FIRST: lambda c: {"rotated_first": True},
    SCALED: lambda c: {"factor": 8},
    FLOAT16: lambda c: {"table": np.float16},
    EXCHANGED: lambda c: {"exchanged": True},
    "cos and sin are exchanged": lambda c: {"exchanged": True, "stored": c.d // 2},
}
PARTIAL_PORTS = {
    "p-RoPE instead of partial rotary: denominator and pairing": lambda c: {},
    "the exponent is divided by head_dim, not by the number of rotated lanes": lambda c: {
        "distance": c.n
    },
    "pairing over the head: lane k pairs with k + head_dim/2, not within the prefix": lambda c: {
        "width": 2 * c.n
    },
    "interleaved lanes: lane 2k pairs with 2k + 1": lambda c: {"width": 2 * c.n, "distance": 0},
}
LINEAR_PORTS = {"linear scaling is left out": lambda c: {"factor": 1}}


def right(c):
    return {}


def ported(port, name, dtype=np.float64, table=np.asarray, sign=1):
    """The rotated inputs of a case by p-RoPE with a port's changes, with angles of `dtype`."""
    case = CASES[name]
    d, theta, p = settings(name)
    c = types.SimpleNamespace(
        d=d,
        theta=theta,
        p=p,
        n=case["rotated_pairs"],
        m=case["positions"],
        width=d,
        distance=d // 2,
        factor=case.get("rope_scaling_factor", 1),
        stored=None,
        round_angles=np.asarray,
        table=table,
        exchanged=False,
        in_place=False,
        rotated_first=False,
    )
    vars(c).update(port(c))
    first = np.arange(c.stored or c.n)  # the other pairs are stored with frequency 0, or not at all
    freqs = c.theta ** (-2 * first / c.width) / c.factor * (first < c.n)
    angles = c.round_angles(c.m[:, None] * freqs).astype(dtype)
    cos = c.table(np.cos(angles)).astype(np.float64)
    sin = c.table(np.sin(angles)).astype(np.float64)
    if c.exchanged:
        cos, sin = sin, cos
    second = first + c.distance
    if c.distance == 0 < c.n:
        first = 2 * first
        second = first + 1
    outputs = {}
    for kind in ("queries", "keys"):
        x = case[kind]
        out = x.copy()
        out[:, first] = x[:, first] * cos - sign * x[:, second] * sin
        read = out if c.in_place else x
        out[:, second] = x[:, second] * cos + read[:, first] * sin
        if c.rotated_first:
            others = np.setdiff1d(np.arange(d), [first, second])
            out = out[:, np.concatenate([first, second, others])]
        outputs[f"rotated_{kind}"] = out
    return outputs


@pytest.mark.parametrize(
    ("names", "ports", "mistake"),
    [(PROPORTIONAL, PORTS, mistake) for mistake in PORTS]
    + [(PARTIAL, PARTIAL_PORTS, mistake) for mistake in PARTIAL_PORTS]
    + [(LINEAR, LINEAR_PORTS, mistake) for mistake in LINEAR_PORTS],
)
def test_a_port_s_mistake_is_named(names, ports, mistake):
    values = {name: ported(ports[mistake], name, np.float32) for name in names}
    for float32_angles in (False, True):  # which allows no other mistake
        result = check(values, float32_angles)[1]
        assert result["mistake"] == mistake and not result["equal"]


GEMMA4 = "proportional_d512_theta1000000_p0.25"
# Ports of Gemma 4 made them: 64 frequencies for a prefix of 128 lanes, or 128 for 512.
PUBLIC = {
    PLANTED["prefix pairing"]: lambda c: {"distance": c.n},
    PLANTED["wrong denominator"]: lambda c: {"width": 2 * c.n},
}
BOTH = "partial rotary instead of p-RoPE: denominator and pairing"
GEMMA3 = "linear_d256_theta1000000_factor8"


@pytest.mark.parametrize(
    ("name", "mistake", "kinds"),
    [
        (GEMMA3, "linear scaling is left out", ("rotated_queries",)),
        (GEMMA3, "linear scaling is left out", ("frequencies",)),
        (GEMMA4, SCALED, ("frequencies",)),
        (GEMMA4, ROTATED_FIRST, ("rotated_keys",)),
        (GEMMA4, FLOAT16, ("cos", "sin")),
        (GEMMA4, EXCHANGED, ("cos", "sin")),
        (GEMMA4, IN_PLACE, ("scores",)),
        *((GEMMA4, mistake, ("rotated_keys",)) for mistake in (*PUBLIC, BOTH)),
        *((GEMMA4, mistake, ("scores",)) for mistake in (*PUBLIC, BOTH)),
    ],
)
def test_a_mistake_is_named_from_one_layer_s_arrays(name, mistake, kinds):
    """Frequencies and tables as they are, the others by a port that makes the mistake."""
    case = CASES[name]
    n = case["rotated_pairs"]
    port = {**PORTS, **LINEAR_PORTS, **PUBLIC}[mistake]
    arrays = {"frequencies": case["frequencies"] * (8 if name == GEMMA3 else 1 / 8)}
    tables = (case["cos"], case["sin"])
    if mistake == EXCHANGED:
        pairs = (tables, tables[::-1])
        tables = [np.append(other[:, :n], own[:, n:], axis=1) for own, other in pairs]
    if mistake == FLOAT16:
        tables = [table.astype(np.float16) for table in tables]
    arrays |= dict(zip(("cos", "sin"), tables, strict=True))
    arrays |= ported(port, name, np.float32)
    arrays["scores"] = arrays["rotated_queries"] @ arrays["rotated_keys"].T
    values = {name: {kind: np.asarray(arrays[kind], np.float64) for kind in kinds}}
    assert mistake_in(values) == mistake


def test_mistakes_in_single_lanes_are_named():
    exact = {name: ported(right, name) for name in PROPORTIONAL}
    assert check(exact)[1]["equal"]
    values = {name: ported(right, name, sign=-1) for name in PROPORTIONAL}
    assert mistake_in(values) == "the sign of the first lane's sine is wrong"
    values = {name: ported(right, name, np.float32, table=bfloat16) for name in PROPORTIONAL}
    assert mistake_in(values) == "bfloat16 table of cos and sin"
    rounded = {}
    cleared = {}
    for name, arrays in exact.items():
        half = CASES[name]["head_dim"] // 2
        still = np.arange(2 * half) % half >= CASES[name]["rotated_pairs"]
        rounded[name] = {kind: bfloat16(array) for kind, array in arrays.items()}
        cleared[name] = {kind: np.where(still, 0, array) for kind, array in arrays.items()}
    assert mistake_in(rounded) == "the rotated values are rounded to bfloat16"
    assert mistake_in(cleared) == "lanes that are not rotated are set to zero"


@pytest.mark.parametrize("float32_angles", [False, True])
def test_an_unknown_mistake_is_placed(float32_angles):
    values = {name: ported(right, name) for name in PROPORTIONAL}
    values["proportional_d64_p0.75"]["rotated_keys"][2, 40] += 0.5
    verdict, result = check(values, float32_angles)
    assert result["mistake"] == UNKNOWN and not result["equal"]
    assert result["max_error"] == pytest.approx(0.4)
    assert "(proportional_d64_p0.75/rotated_keys[2, 40] is off by 4.0e-01)" in verdict


@pytest.mark.parametrize("names", [PROPORTIONAL, PARTIAL, [*PROPORTIONAL, *LINEAR]])
def test_no_two_mistakes_look_alike_in_all_cases(names):
    exact = golden(names)
    assert check(exact)[1]["cannot_exclude"] == []
    for mistake, change in MISTAKES.items():
        values = {name: predict(CASES[name], change) for name in names}
        expected = None if explains(change, exact) else mistake
        assert mistake_in(values) == expected
    unseen = [mistake for mistake, change in MISTAKES.items() if explains(change, exact)]
    assert len(unseen) <= 8


def test_what_cannot_be_excluded_is_told():
    def blind(name, kinds):
        return set(check(golden([name], kinds))[1]["cannot_exclude"])

    denominator = PLANTED["wrong denominator"]
    prefix = PLANTED["prefix pairing"]
    both = "partial rotary instead of p-RoPE: denominator and pairing"
    assert {denominator, prefix, both} <= blind("proportional_d16_p1", ARRAYS)
    assert not {denominator, prefix} & blind("proportional_d16_p0.25", ARRAYS)
    assert prefix in blind("proportional_d16_p0.25", ("frequencies", "cos", "sin"))


# --- Other projects' programs -------------------------------------------------------------------


def as_tensors(torch, case):
    """Queries and keys [1, 1, T, d]."""
    return [torch.tensor(case[kind]).float()[None, None] for kind in ("queries", "keys")]


def test_transformers_passes_with_float32_angles(libraries, tmp_path):
    """Its frequencies of p-RoPE, rotated by its functions of Gemma."""
    transformers, torch = libraries
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.gemma.modeling_gemma import apply_rotary_pos_emb

    arrays = {}
    for name in PROPORTIONAL:
        case = CASES[name]
        d, theta, p = settings(name)
        rope = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": p}
        config = transformers.GemmaConfig(
            hidden_size=d, num_attention_heads=1, head_dim=d, rope_parameters=rope
        )
        inv_freq = ROPE_INIT_FUNCTIONS["proportional"](config, device=None)[0]
        angles = torch.tensor(case["positions"]).float()[:, None] * inv_freq
        angles = torch.cat([angles, angles], dim=-1)[None]
        cos = angles.cos()
        sin = angles.sin()
        queries, keys = apply_rotary_pos_emb(*as_tensors(torch, case), cos, sin)
        arrays[f"{name}/inv_freq"] = inv_freq
        arrays[f"{name}/cos"] = cos
        arrays[f"{name}/sin"] = sin
        arrays[f"{name}/rotated_queries"] = queries
        arrays[f"{name}/rotated_keys"] = keys
    np.savez(tmp_path / "values.npz", **arrays)
    values = read_values(tmp_path / "values.npz")
    assert mistake_in(values) == FLOAT32
    verdict, result = check(values, float32_angles=True)
    assert result["equal"] and verdict.startswith("equal to p-RoPE in 11 of 19 cases")
    assert 1e-2 < result["max_error"] < 0.2
    exact = {name: {"frequencies": arrays["frequencies"]} for name, arrays in values.items()}
    assert check(exact)[1]["equal"], "float32 frequencies are equal without the flag"


def test_neox_in_transformers_passes_as_partial_rotary(libraries):
    transformers, torch = libraries
    from transformers.models.gpt_neox import modeling_gpt_neox as neox_model

    values = {}
    for name in set(PARTIAL) - {"partial_d16_p0"}:  # NeoX reads 0 as no factor
        d, theta, p = settings(name)
        rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": p}
        config = transformers.GPTNeoXConfig(
            hidden_size=d, num_attention_heads=1, rope_parameters=rope
        )
        positions = torch.tensor(CASES[name]["positions"]).long()[None]
        inputs = as_tensors(torch, CASES[name])
        cos, sin = neox_model.GPTNeoXRotaryEmbedding(config)(inputs[0], positions)
        queries, keys = neox_model.apply_rotary_pos_emb(*inputs, cos, sin)
        values[name] = {
            "rotated_queries": queries[0, 0].numpy(),
            "rotated_keys": keys[0, 0].numpy(),
        }
    verdict, result = check(values, float32_angles=True)
    assert result["equal"] and verdict.startswith("equal to partial rotary in 5 of 19 cases")


# --- The files that are read, and the command ---------------------------------------------------

NAME = "proportional_d16_p0.25"
QUERIES = f"{NAME}/rotated_queries"
GOOD = CASES[NAME]["rotated_queries"]


# (A port's arrays, what the line names).
@pytest.mark.parametrize(
    ("arrays", "names"),
    [
        ({}, ["proportional_d16_p0/rotated_queries"]),
        ({"rotated_queries": GOOD}, ["rotated_queries", "CASE/ARRAY"]),
        ({f"{NAME}/rotated_query": GOOD}, [f"{NAME}/rotated_query:", QUERIES]),
        ({QUERIES: GOOD.T}, [QUERIES, "(6, 16)", "(16, 6)"]),
        ({f"{NAME}/cos": GOOD[:, :2]}, ["cos", "(6, 2)", "rotated pairs"]),
        ({QUERIES: np.where(GOOD > 1, np.inf, GOOD)}, [QUERIES, "finite"]),
        ({QUERIES: GOOD.astype(str)}, [QUERIES, "<U"]),
        ({QUERIES: GOOD.astype(object)}, ["values.npz", ".npz"]),
    ],
)
def test_bad_values_are_refused(arrays, names, tmp_path):
    np.savez(tmp_path / "values.npz", **arrays)
    line = refusal(lambda: read_values(tmp_path / "values.npz"))
    assert all(name in line for name in names), line


def test_every_form_of_an_array_is_read(tmp_path):
    name = "partial_d16_p0.25"
    case = CASES[name]
    for cos, sin in (
        (np.append(case["cos"], case["cos"], axis=1), np.append(case["sin"], case["sin"], axis=1)),
        (np.repeat(case["cos"], 2, axis=1), np.repeat(case["sin"], 2, axis=1)),
    ):
        arrays = {
            f"{name}/cos": cos.astype(np.float32)[None, :, None],
            f"{name}/sin": sin,
            f"{name}/inv_freq": case["frequencies"][:2],
            f"{name}/rotated_keys": case["rotated_keys"][None, None],
        }
        np.savez(tmp_path / "values.npz", **arrays)
        verdict, result = check(read_values(tmp_path / "values.npz"))
        assert result["equal"]
        assert verdict.startswith("equal to partial rotary in 1 of 19 cases within")


def test_deepmind_s_gemma_passes_with_float32_angles(gemma_rope):
    values = {}
    for name in PROPORTIONAL:
        _, theta, p = settings(name)
        positions = CASES[name]["positions"].astype(np.int32)[None]
        values[name] = {}
        for kind in ("queries", "keys"):
            inputs = np.float32(CASES[name][kind])[None, :, None]
            rotated = gemma_rope(inputs, positions, base_frequency=theta, rope_proportion=p)
            values[name][f"rotated_{kind}"] = np.asarray(rotated)[0, :, 0]
    assert mistake_in(values) == FLOAT32
    assert check(values, float32_angles=True)[1]["equal"]


def test_the_command_prints_a_verdict(run_command, start_command, tmp_path):
    """This library's own rotation is a port like any other."""
    name = "proportional_d64_p0.3"
    case = CASES[name]
    d, theta, right = settings(name)
    inputs = np.float32(case["queries"])[None, :, None]
    positions = case["positions"].astype(np.int32)[None]
    for file, p in (("right", right), ("wrong", 1.0)):
        rotated = np.asarray(apply_p_rope(inputs, positions, d, theta, p))[0, :, 0]
        np.savez(tmp_path / file, **{f"{name}/rotated_queries": rotated})
    done = run_command("prope.check_port", f"--values={tmp_path}/right.npz")
    assert done.code == 0 and done.result["equal"]
    assert done.result["rope_percentage"] == 0.3
    assert done.stderr.startswith("equal to p-RoPE in 1 of 19 cases within ")
    assert done.stderr.count("\n") == 1
    command = start_command("prope.check_port", f"--values={tmp_path}/wrong.npz")
    code, stdout, stderr = command.wait()
    result = json.loads(stdout.splitlines()[-1])
    assert code == 1 and not result["equal"]
    assert result["mistake"] == "p is ignored: every pair is rotated"
    assert stderr.startswith("not p-RoPE in 1 of 19 cases: p is ignored")
    assert stderr.count("\n") == 1


def test_the_command_refuses_what_it_cannot_read(run_command, tmp_path):
    (tmp_path / "text.npz").write_text("no zip")
    np.savez(tmp_path / "whole.npz", a=np.ones(9))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:100])
    np.save(tmp_path / "array.npy", np.ones(3))
    files = ("none.npz", "text.npz", "cut.npz", "array.npy", "")
    places = [*(f"{tmp_path}/{name}".rstrip("/") for name in files), "https://a/b.npz"]
    for argument in ("--nofloat32_angles", *(f"--values={place}" for place in places)):
        done = run_command("prope.check_port", argument)
        assert done.code == 2
        named = "--values" if argument.startswith("--no") else argument
        assert done.error.startswith("error: ") and named in done.error
