"""Golden vectors against an oracle, and the check of ports: every mistake is named, other programs pass."""

import json
import re
import subprocess
import sys
import zipfile

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import write_golden
from conftest import ROOT
from makers import ROPE_MUTANTS as MUTANTS
from makers import load_source as load
from oracles import rotation as oracle

from prope.encodings import partial_frequencies
from prope.golden.check import (
    ARRAYS,
    MISTAKES,
    TOLERANCE,
    check,
    explains,
    load_cases,
    predict,
    read_values,
)
from prope.rope import frequencies, rotate, rotation_table

CASES = load_cases()
PROPORTIONAL = [name for name in CASES if name.startswith("proportional")]
PARTIAL = [name for name in CASES if name.startswith("partial")]
FEW = [
    "proportional_d16_p0",
    "proportional_d16_p0.25",
    "proportional_d16_p0.75",
    "proportional_d16_p0.75_negative",
]


def settings(name):
    case = CASES[name]
    return case["head_dim"], case["max_wavelength"], case["rope_percentage"]


def neox(x, positions, theta, p):
    """Partial rotary by its definition: the first int(p d) lanes are rotated as a head of their own."""
    r = int(p * x.shape[-1])
    if not r:
        return x
    rotated = oracle(x[None, :, None, :r], positions[None], theta)[0, :, 0]
    return np.concatenate([rotated, x[:, r:]], axis=1)


@pytest.mark.parametrize("name", CASES)
def test_the_golden_values_are_the_formula_s(name):
    case = CASES[name]
    d, theta, p = settings(name)
    k = np.arange(case["rotated_pairs"])
    if name in PROPORTIONAL:
        rotate = lambda x: oracle(x[None, :, None], case["positions"][None], theta, p)[0, :, 0]  # noqa: E731
        freqs = frequencies(d, theta, p)
    else:
        rotate = lambda x: neox(x, case["positions"], theta, p)  # noqa: E731
        freqs = np.append(theta ** (-k / max(len(k), 1)), np.zeros(d // 2 - len(k)))
    angles = case["positions"][:, None] * freqs
    queries, keys = rotate(case["queries"]), rotate(case["keys"])
    expected = (freqs, np.cos(angles), np.sin(angles), queries, keys, queries @ keys.T)
    np.testing.assert_allclose(case["frequencies"], freqs, rtol=1e-14)
    for kind, values in zip(ARRAYS, expected, strict=True):
        np.testing.assert_allclose(
            case[kind], values, rtol=0, atol=1e-8 if kind == "scores" else 1e-9
        )
    assert np.any(case["queries"] != case["keys"]) and case["queries"].max() == 1.5


def test_the_golden_files_can_be_written_again(tmp_path):
    write_golden.main(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["partial.json", "proportional.json"]
    for file in files:
        assert file.read_bytes() == (ROOT / "prope/golden" / file.name).read_bytes()
    assert sum(file.stat().st_size for file in files) < 100_000
    assert "prope" not in re.findall(
        r"^(?:import|from) (\w+)", (ROOT / "tests/write_golden.py").read_text(), re.M
    )


def test_the_golden_files_are_installed(tmp_path):
    pytest.importorskip("hatchling")
    build = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        tmp_path,
    ]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = [
            name
            for name in wheel.namelist()
            if name.startswith("prope/golden/") and name.endswith(".json")
        ]
        assert json.loads(wheel.read("prope/golden/partial.json"))
    assert len(names) == 2


def test_no_jax_is_imported():
    code = "import prope.golden.check, prope.runtime.files, sys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def computed(module, names, kinds=ARRAYS):
    """What prope.rope, or a copy of it, computes for these cases."""
    values = {}
    for name in names:
        case, positions = CASES[name], CASES[name]["positions"].astype(np.int32)[None]

        def apply(x, positions=positions, name=name):
            inputs = np.float32(x)[None, :, None]
            return np.asarray(module.apply_p_rope(inputs, positions, *settings(name)))

        queries, keys = apply(case["queries"])[0, :, 0], apply(case["keys"])[0, :, 0]
        freqs = module.frequencies(*settings(name))
        cos, sin = np.asarray(module.rotation_table(positions[0], freqs))
        everything = (freqs, cos, sin, queries, keys, queries.astype(float) @ keys.T)
        values[name] = {
            kind: array for kind, array in zip(ARRAYS, everything, strict=True) if kind in kinds
        }
    return values


@pytest.mark.parametrize(
    "kinds", [ARRAYS, ("rotated_queries",), ("cos", "sin"), ("frequencies",), ("scores",)]
)
def test_prope_passes(kinds):
    verdict, result = check(computed(sys.modules["prope.rope"], FEW, kinds))
    assert verdict.startswith("equal to p-RoPE in 4 cases within") and result["mistake"] is None
    assert (
        result["equal"] and result["max_error"] < TOLERANCE and result["encoding"] == "proportional"
    )


@pytest.mark.parametrize("name", PARTIAL)
def test_prope_s_partial_rotary_passes_after_a_permutation_of_lanes(name):
    """prope pairs lanes over the whole head: pair k is moved from lanes k and k + n to k and k + P."""
    case, (d, _, _) = CASES[name], settings(name)
    pairs, n = np.arange(d // 2), case["rotated_pairs"]
    lanes = np.append(
        np.where(pairs < n, pairs, pairs + n), np.where(pairs < n, pairs + n, pairs + d // 2)
    )
    freqs = partial_frequencies(*settings(name))
    table = rotation_table(case["positions"].astype(np.int32)[None], freqs)
    rotated = rotate(jnp.float32(case["queries"][None, :, None, lanes]), table)[0, :, 0]
    values = {
        "frequencies": freqs,
        "cos": np.asarray(table[0, 0]),
        "rotated_queries": np.empty((len(rotated), d)),
    }
    values["rotated_queries"][:, lanes] = rotated
    assert check({name: values})[1]["equal"]


NAMED = {
    "wrong denominator": "the exponent is divided by the number of rotated lanes, not by head_dim",
    "prefix pairing": "prefix pairing: the rotated lanes are paired among themselves, not over the head",
    "interleaved pairing": "interleaved lanes are read, halves are written",
    "slow end kept": "the slow end is kept: the fastest pairs are dropped",
    "a sign of the rotation": "the sign of the second lane's sine is wrong",
    "float32 angles": "float32 angles (transformers and gemma have them, too; --float32_angles accepts them)",
    "low word of the fraction dropped": "the angle loses bits: exact below position 65536, not above",
    "quarter turns rounded down": "imprecise cos or sin",
    "sine of negative positions": "the sign of a negative position is lost",
}  # the others have their own name


@pytest.mark.parametrize("name", MUTANTS)
def test_every_planted_error_is_named(name):
    file = ROOT / "prope/rope.py"
    mutant = load("prope.rope", file, file.read_text().replace(*MUTANTS[name]))
    values = computed(mutant, FEW if name.startswith("p = 0") else FEW[1:])
    assert check(values)[1]["mistake"] == NAMED.get(
        name, name.replace("p applied", "p is applied").replace("0 read", "0 is read")
    )
    rotated = {case: {"rotated_keys": arrays["rotated_keys"]} for case, arrays in values.items()}
    verdict, result = check(rotated)
    assert result["mistake"] == check(values)[1]["mistake"] and not result["equal"]
    assert (
        verdict.startswith("not p-RoPE in ")
        and f"{result['worst_case']}/rotated_keys is off by" in verdict
    )


def fastest(d, theta, p, denominator=None, exponent=2):
    return theta ** (-exponent * np.arange(int(p * d // 2)) / (denominator or d))


def halves(freqs, m, d):
    k = np.arange(len(freqs))
    return m * freqs, k, k + int(d // 2)


def inside(freqs, m):
    k = np.arange(len(freqs))
    return m * freqs, 2 * k, 2 * k + 1


# Ports written by hand, as (angles, first lanes, second lanes) of (head_dim, theta, p, positions [T, 1]).
PORTS = {
    "interleaved lanes: lane 2k pairs with 2k + 1": lambda d, b, p, m: inside(fastest(d, b, p), m),
    "partial rotary instead of p-RoPE: denominator and pairing": lambda d, b, p, m: halves(
        fastest(d, b, p, 2 * int(p * d // 2)), m, 2 * int(p * d // 2)
    ),
    "the order of the frequencies is reversed": lambda d, b, p, m: halves(
        fastest(d, b, p)[::-1], m, d
    ),
    "the exponent lacks its factor of 2": lambda d, b, p, m: halves(
        fastest(d, b, p, exponent=1), m, d
    ),
    "p is the share that is not rotated": lambda d, b, p, m: halves(fastest(d, b, 1 - p), m, d),
    "p is ignored: every pair is rotated": lambda d, b, p, m: halves(fastest(d, b, 1), m, d),
    "nothing is rotated": lambda d, b, p, m: halves(np.zeros(0), m, d),
    "the number of rotated pairs is rounded up": lambda d, b, p, m: halves(
        b ** (-2 * np.arange(-int(-p * d // 2)) / d), m, d
    ),
    "max_wavelength is 10000 for every case": lambda d, b, p, m: halves(fastest(d, 1e4, p), m, d),
    "max_wavelength is 500000 for every case": lambda d, b, p, m: halves(fastest(d, 5e5, p), m, d),
    "max_wavelength is 1000000 for every case": lambda d, b, p, m: halves(fastest(d, 1e6, p), m, d),
    "positions begin one too high": lambda d, b, p, m: halves(fastest(d, b, p), m + 1, d),
    "positions begin one too low": lambda d, b, p, m: halves(fastest(d, b, p), m - 1, d),
    "the rotation is applied twice": lambda d, b, p, m: halves(fastest(d, b, p), m * 2, d),
    "angles are taken as degrees": lambda d, b, p, m: halves(fastest(d, b, p), m * np.pi / 180, d),
    "the rotation has the wrong direction": lambda d, b, p, m: halves(fastest(d, b, p), -m, d),
}


def ported(port, name, dtype=np.float64, table=np.asarray, cos_of=np.cos, sin_of=np.sin):
    """The rotated inputs of a case by a port of PORTS, whose angles are of `dtype`."""
    d, theta, p = settings(name)
    case, positions = CASES[name], CASES[name]["positions"][:, None].astype(dtype)
    angles, first, second = port(d, dtype(theta), p, positions)
    cos, sin = (table(f(angles.astype(dtype))).astype(np.float64) for f in (cos_of, sin_of))
    outputs = {}
    for kind in ("queries", "keys"):
        out = case[kind].copy()
        out[:, first] = case[kind][:, first] * cos - case[kind][:, second] * sin
        out[:, second] = case[kind][:, second] * cos + case[kind][:, first] * sin
        outputs[f"rotated_{kind}"] = out
    return outputs


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("mistake", PORTS)
def test_a_port_s_mistake_is_named(mistake, dtype):
    values = {name: ported(PORTS[mistake], name, dtype) for name in PROPORTIONAL}
    assert check(values)[1]["mistake"] == mistake


# The same for partial rotary.
PARTIAL_PORTS = {
    "p-RoPE instead of partial rotary: denominator and pairing": lambda d, b, p, m: halves(
        fastest(d, b, p), m, d
    ),
    "the exponent is divided by head_dim, not by the number of rotated lanes": lambda d, b, p, m: (
        halves(fastest(d, b, p), m, p * d)
    ),
    "pairing over the head: lane k pairs with k + head_dim/2, not within the prefix": lambda d, b, p, m: (
        halves(fastest(d, b, p, p * d), m, d)
    ),
    "interleaved lanes: lane 2k pairs with 2k + 1": lambda d, b, p, m: inside(
        fastest(d, b, p, p * d), m
    ),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("mistake", PARTIAL_PORTS)
def test_a_mistake_of_partial_rotary_is_named(mistake, dtype):
    values = {name: ported(PARTIAL_PORTS[mistake], name, dtype) for name in PARTIAL}
    assert check(values)[1]["mistake"] == mistake


def correct(d, theta, p, m):
    return halves(fastest(d, theta, p), m, d)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
def test_a_narrow_table_is_named(kind, dtype):
    values = {
        name: ported(correct, name, dtype, table=lambda x: x.astype(kind)) for name in PROPORTIONAL
    }
    assert check(values)[1]["mistake"] == f"{np.dtype(kind).name} table of cos and sin"


def test_what_is_done_to_queries_or_lanes_only_is_named():
    right = {name: ported(correct, name) for name in PROPORTIONAL}
    assert check(right)[1]["equal"]
    for wrong, other in (("keys", "queries"), ("queries", "keys")):
        values = {
            name: arrays | {f"rotated_{wrong}": CASES[name][wrong]}
            for name, arrays in right.items()
        }
        assert check(values)[1]["mistake"] == f"{other} are rotated, {wrong} are not"
    values = {name: ported(correct, name, sin_of=lambda x: -np.sin(x)) for name in PROPORTIONAL}
    assert check(values)[1]["mistake"] == "the rotation has the wrong direction"
    for kind in ("queries", "keys"):
        for name in PROPORTIONAL:  # the second half as it should be
            second = slice(settings(name)[0] // 2, None)
            values[name][f"rotated_{kind}"][:, second] = right[name][f"rotated_{kind}"][:, second]
    assert check(values)[1]["mistake"] == "the sign of the first lane's sine is wrong"
    for name, arrays in right.items():
        still = (
            np.arange(settings(name)[0]) % (settings(name)[0] // 2) >= CASES[name]["rotated_pairs"]
        )
        values[name] = {kind: np.where(still, 0, array) for kind, array in arrays.items()}
    assert check(values)[1]["mistake"] == "lanes that are not rotated are set to zero"
    narrow = lambda x: x.astype(ml_dtypes.bfloat16).astype(float)  # noqa: E731
    values = {
        name: {kind: narrow(array) for kind, array in arrays.items()}
        for name, arrays in right.items()
    }
    assert check(values)[1]["mistake"] == "the rotated values are rounded to bfloat16"


def test_two_mistakes_at_once_are_named():
    """GPT-J's rotation: partial, and interleaved."""
    gptj = lambda d, theta, p, m: inside(fastest(d, theta, p, 2 * int(p * d // 2)), m)  # noqa: E731
    verdict, result = check({name: ported(gptj, name) for name in PROPORTIONAL})
    assert (
        "partial rotary instead of p-RoPE: denominator and pairing and interleaved lanes: lane 2k"
        in verdict
    )
    assert result["mistake"].count(" or ") <= 1


def test_an_unknown_mistake_is_placed():
    values = {name: ported(correct, name) for name in PROPORTIONAL}
    values["proportional_d64_p0.75"]["rotated_keys"][2, 40] += 0.5
    verdict, result = check(values)
    assert result["mistake"] == "no known mistake explains it" and result[
        "max_error"
    ] == pytest.approx(0.4)
    assert (
        "(proportional_d64_p0.75/rotated_keys is off by 4.0e-01 at position 1048575, column 40)"
        in verdict
    )


@pytest.mark.parametrize("names", [PROPORTIONAL, PARTIAL])
def test_no_two_mistakes_look_alike_in_all_cases(names):
    seen = 0
    golden = {name: {kind: CASES[name][kind] for kind in ARRAYS} for name in names}
    assert check(golden)[1]["cannot_exclude"] == []
    for mistake, change in MISTAKES.items():
        values = {}
        for name in names:
            d, _, p = settings(name)
            values[name] = predict(CASES[name], **change(d, p, CASES[name]["rotated_pairs"]))
        found = check(values)[1]["mistake"]
        assert found == (None if explains((mistake,), golden) else mistake)
        seen += found is not None
    assert seen >= len(MISTAKES) - 5


def test_what_cannot_be_excluded_is_told():
    def blind(name, *kinds):
        return {
            m.split(":")[0]
            for m in check({name: {kind: CASES[name][kind] for kind in kinds}})[1]["cannot_exclude"]
        }

    denominator = "the exponent is divided by the number of rotated lanes, not by head_dim"
    assert {denominator, "prefix pairing", "partial rotary instead of p-RoPE"} <= blind(
        "proportional_d16_p1", *ARRAYS
    )
    assert not {denominator, "prefix pairing"} & blind("proportional_d16_p0.25", *ARRAYS)
    assert "prefix pairing" in blind("proportional_d16_p0.25", "frequencies", "cos", "sin")


def transformers_ports():
    """Cases rotated by transformers' own functions: Gemma's for p-RoPE, GPT-NeoX's for partial rotary."""
    torch = pytest.importorskip("torch", reason="the hf extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.gemma.modeling_gemma import apply_rotary_pos_emb

    values = {}
    for name in PROPORTIONAL:
        case, (d, theta, p) = CASES[name], settings(name)
        parameters = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": p}
        config = transformers.GemmaConfig(
            hidden_size=d, num_attention_heads=1, head_dim=d, rope_parameters=parameters
        )
        inv_freq = ROPE_INIT_FUNCTIONS["proportional"](config, device=None)[0]
        angles = torch.tensor(case["positions"], dtype=torch.float32)[:, None] * inv_freq
        cos, sin = (f(torch.cat([angles, angles], dim=-1))[None] for f in (torch.cos, torch.sin))
        inputs = [
            torch.tensor(case[kind], dtype=torch.float32)[None, None]
            for kind in ("queries", "keys")
        ]
        queries, keys = apply_rotary_pos_emb(*inputs, cos, sin)
        values[name] = {
            "inv_freq": inv_freq,
            "cos": cos,
            "sin": sin,
            "rotated_queries": queries,
            "rotated_keys": keys,
        }
    return {
        f"{name}/{kind}": tensor.numpy()
        for name, arrays in values.items()
        for kind, tensor in arrays.items()
    }


def test_transformers_passes_with_float32_angles(tmp_path):
    np.savez(tmp_path / "values.npz", **transformers_ports())
    values = read_values(tmp_path / "values.npz")
    assert check(values)[1]["mistake"] == NAMED["float32 angles"]
    verdict, result = check(values, float32_angles=True)
    assert (
        result["equal"]
        and 1e-2 < result["max_error"] < 0.2
        and verdict.startswith("equal to p-RoPE in 11 cases")
    )
    exact = {name: {"frequencies": arrays["frequencies"]} for name, arrays in values.items()}
    assert check(exact)[1]["equal"], "float32 frequencies are equal without the flag"


def test_gemma_passes_with_float32_angles(gemma_rope):
    values = {}
    for name in PROPORTIONAL:
        _, theta, p = settings(name)
        positions = CASES[name]["positions"].astype(np.int32)[None]
        values[name] = {
            f"rotated_{kind}": np.asarray(
                gemma_rope(
                    np.float32(CASES[name][kind])[None, :, None],
                    positions,
                    base_frequency=theta,
                    rope_proportion=p,
                )
            )[0, :, 0]
            for kind in ("queries", "keys")
        }
    assert check(values)[1]["mistake"] == NAMED["float32 angles"]
    assert check(values, float32_angles=True)[1]["equal"]


def test_neox_in_transformers_passes_as_partial_rotary():
    torch = pytest.importorskip("torch", reason="the hf extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    from transformers.models.gpt_neox import modeling_gpt_neox as neox_model

    values = {}
    for name in set(PARTIAL) - {"partial_d16_p0"}:  # NeoX reads 0 as no factor
        case, (d, theta, p) = CASES[name], settings(name)
        config = transformers.GPTNeoXConfig(
            hidden_size=d,
            num_attention_heads=1,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": theta,
                "partial_rotary_factor": p,
            },
        )
        positions = torch.tensor(case["positions"], dtype=torch.int64)[None]
        inputs = [
            torch.tensor(case[kind], dtype=torch.float32)[None, None]
            for kind in ("queries", "keys")
        ]
        cos, sin = neox_model.GPTNeoXRotaryEmbedding(config)(inputs[0], positions)
        queries, keys = neox_model.apply_rotary_pos_emb(*inputs, cos, sin)
        values[name] = {
            "rotated_queries": queries[0, 0].numpy(),
            "rotated_keys": keys[0, 0].numpy(),
        }
    verdict, result = check(values, float32_angles=True)
    assert result["equal"] and verdict.startswith("equal to partial rotary in 5 cases")
