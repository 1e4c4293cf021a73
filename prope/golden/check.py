"""Names what a port computes, from its values alone.

Each known mistake predicts the values of a case, in float64. It explains a port whose values all agree with the
prediction, but for the rounding that float32 angles bring.
"""

import functools
import importlib.resources
import io
import itertools
import json
import zipfile
from collections.abc import Callable

import numpy as np
from etils import epath

from prope.errors import UsageError, nearest

TOLERANCE = 3e-7  # of an array's scale: the rounding of float32 values
_ANGLE = 2.0**-21  # relative error of a float32 angle, those of the power and the product included
_LONG = 2**16  # an angle of 32 bits that loses some is exact below
_FLOAT32 = "float32 angles (transformers and gemma have them, too; --float32_angles accepts them)"
ARRAYS = ("frequencies", "cos", "sin", "rotated_queries", "rotated_keys", "scores")
_INPUTS = (
    "head_dim",
    "max_wavelength",
    "rope_percentage",
    "encoding",
    "positions",
    "queries",
    "keys",
)

Values = dict[str, dict[str, np.ndarray]]  # by case and array

# What an encoding rotates, of (head_dim, p): pairs, denominator of the exponent, distance of a pair's lanes.
_ENCODINGS = {
    "proportional": lambda d, p: (int(p * d // 2), d, d // 2),
    "partial": lambda d, p: (int(p * d) // 2, max(int(p * d) // 2 * 2, 1), int(p * d) // 2),
}


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounds to the nearest bfloat16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return (
        ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000)
        .astype(np.uint32)
        .view(np.float32)
        .astype(np.float64)
    )


# What each mistake changes of `predict`, of (head_dim, p, rotated pairs).
MISTAKES: dict[str, Callable[[int, float, int], dict]] = {
    "the exponent is divided by the number of rotated lanes, not by head_dim": lambda d, p, n: {
        "denominator": 2 * n
    },
    "the exponent is divided by head_dim, not by the number of rotated lanes": lambda d, p, n: {
        "denominator": d
    },
    "prefix pairing: the rotated lanes are paired among themselves, not over the head": lambda d, p, n: {
        "half": n
    },
    "pairing over the head: lane k pairs with k + head_dim/2, not within the prefix": lambda d, p, n: {
        "half": d // 2
    },
    "partial rotary instead of p-RoPE: denominator and pairing": lambda d, p, n: {
        "encoding": "partial"
    },
    "p-RoPE instead of partial rotary: denominator and pairing": lambda d, p, n: {
        "encoding": "proportional"
    },
    "interleaved lanes: lane 2k pairs with 2k + 1": lambda d, p, n: {"interleaved": "both"},
    "interleaved lanes are read, halves are written": lambda d, p, n: {"interleaved": "read"},
    "the slow end is kept: the fastest pairs are dropped": lambda d, p, n: {"slow": True},
    "the order of the frequencies is reversed": lambda d, p, n: {
        "freq": lambda f: np.append(f[:n][::-1], f[n:])
    },
    "the exponent lacks its factor of 2": lambda d, p, n: {"exponent": 1},
    "p = 0 is read as unset": lambda d, p, n: {"p": p or 1.0},
    "p is applied twice": lambda d, p, n: {"p": p * p},
    "p is the share that is not rotated": lambda d, p, n: {"p": 1 - p},
    "p is ignored: every pair is rotated": lambda d, p, n: {"p": 1.0},
    "nothing is rotated": lambda d, p, n: {"p": 0.0},
    "the number of rotated pairs is rounded up": lambda d, p, n: {"p": np.ceil(p * d / 2) * 2 / d},
    **{
        f"max_wavelength is {theta} for every case": lambda d, p, n, theta=theta: {"theta": theta}
        for theta in (10_000, 500_000, 1_000_000)
    },
    "bfloat16 positions": lambda d, p, n: {"position": _bfloat16},
    "bfloat16 frequencies": lambda d, p, n: {"freq": _bfloat16},
    "bfloat16 table of cos and sin": lambda d, p, n: {"table": _bfloat16},
    "float16 table of cos and sin": lambda d, p, n: {
        "table": lambda x: x.astype(np.float16).astype(np.float64)
    },
    "the rotated values are rounded to bfloat16": lambda d, p, n: {"output": _bfloat16},
    "positions begin one too high": lambda d, p, n: {"position": lambda m: m + 1},
    "positions begin one too low": lambda d, p, n: {"position": lambda m: m - 1},
    "the rotation is applied twice": lambda d, p, n: {"position": lambda m: 2 * m},
    "angles are taken as degrees": lambda d, p, n: {"position": np.radians},
    "the sign of a negative position is lost": lambda d, p, n: {"position": np.abs},
    "the rotation has the wrong direction": lambda d, p, n: {"signs": (-1, -1)},
    "the sign of the first lane's sine is wrong": lambda d, p, n: {"signs": (-1, 1)},
    "the sign of the second lane's sine is wrong": lambda d, p, n: {"signs": (1, -1)},
    "lanes that are not rotated are set to zero": lambda d, p, n: {"fill": 0.0},
    "queries are rotated, keys are not": lambda d, p, n: {"which": ("queries",)},
    "keys are rotated, queries are not": lambda d, p, n: {"which": ("keys",)},
}


@functools.cache
def load_cases() -> dict[str, dict]:
    """Reads the golden files: cases by name, with arrays as float64, and what the errors of each are relative to."""
    files = [
        importlib.resources.files("prope.golden") / f"{encoding}.json" for encoding in _ENCODINGS
    ]
    cases = {
        name: case for file in files for name, case in json.loads(file.read_text("utf-8")).items()
    }
    for case in cases.values():
        case.update(
            {
                name: np.array(value, np.float64)
                for name, value in case.items()
                if isinstance(value, list)
            }
        )
        queries, keys, freqs = case["queries"].max(), case["keys"].max(), case["frequencies"]
        scales = (
            np.where(freqs > 0, freqs, 1.0),
            1.0,
            1.0,
            queries,
            keys,
            case["head_dim"] * queries * keys,
        )
        case["scale"] = dict(zip(ARRAYS, scales, strict=True))
    return cases


def input_file() -> bytes:
    """Returns what a port needs as an .npz of arrays CASE/NAME."""
    types = {"positions": np.int32, "queries": np.float32, "keys": np.float32}
    cases = load_cases().items()
    arrays = {
        f"{name}/{key}": np.asarray(case[key], types.get(key))
        for name, case in cases
        for key in _INPUTS
    }
    np.savez(buffer := io.BytesIO(), **arrays)
    return buffer.getvalue()


def read_values(path: epath.Path) -> Values:
    """Reads a port's arrays; raises UsageError where there are none, or one does not fit its case."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = dict(file.items())
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(
            f"--values={path}: cannot be read as an .npz file ({type(error).__name__})"
        ) from None
    values, cases = {}, load_cases()
    for key, array in arrays.items():
        name, _, kind = key.replace("inv_freq", "frequencies").partition("/")
        if name not in cases or kind not in (*ARRAYS, *_INPUTS):
            known = [f"{case}/{kind}" for case in cases for kind in ARRAYS]
            raise UsageError(
                f"{path}: {key}: must be CASE/ARRAY{nearest(key, known)}, of {', '.join(ARRAYS)}"
            )
        if kind in ARRAYS:
            values.setdefault(name, {})[kind] = _fit(f"{path}: {key}", array, cases[name], kind)
    if not values:
        raise UsageError(
            f"{path}: holds nothing to check; add arrays such as {next(iter(cases))}/rotated_queries"
        )
    return values


def _fit(what: str, array: np.ndarray, case: dict, kind: str) -> np.ndarray:
    """Returns an array in the shape of the golden one."""
    if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        raise UsageError(
            f"{what}: must hold finite numbers; its type is {array.dtype}, or it holds nan or inf"
        )
    shape, array = case[kind].shape, np.squeeze(array).astype(np.float64)
    if kind == "frequencies" and array.size == case["rotated_pairs"]:
        array = np.append(array, np.zeros(shape[0] - array.size))
    if kind in ("cos", "sin") and array.shape == (
        shape[0],
        2 * shape[1],
    ):  # once for each lane of a pair
        array = (
            array[:, ::2] if np.array_equal(array[:, ::2], array[:, 1::2]) else array[:, : shape[1]]
        )
    if array.shape != shape:
        raise UsageError(
            f"{what}: must have shape {shape}, apart from axes of length 1; got {array.shape}"
        )
    return array


def predict(
    case: dict,
    error: float = 0.0,
    *,
    encoding=None,
    p=None,
    theta=None,
    denominator=None,
    exponent=2,
    slow=False,
    half=None,
    interleaved="",
    freq=np.asarray,
    position=np.asarray,
    table=np.asarray,
    output=np.asarray,
    fill=1.0,
    signs=(1, 1),
    which=("queries", "keys"),
) -> dict[str, np.ndarray]:
    """Computes a case's values in float64, with frequencies off by a relative `error` and what a mistake changes."""
    d, p = case["head_dim"], case["rope_percentage"] if p is None else p
    pairs, divisor, distance = _ENCODINGS[encoding or case["encoding"]](d, p)
    k = np.arange(d // 2)
    moves = k >= d // 2 - pairs if slow else k < pairs
    powers = float(theta or case["max_wavelength"]) ** (-exponent * k / (denominator or divisor))
    freqs = freq(np.where(moves, powers, 0.0)) * (1 + error)
    angles = position(case["positions"])[:, None] * freqs
    cos, sin = table(np.cos(angles)), table(np.sin(angles))
    cos = np.where(moves, cos, fill)
    half = distance if half is None else half
    read = np.append(np.where(k < half, k, k + half), np.where(k < half, k + half, k + d // 2))
    read = np.append(2 * k, 2 * k + 1) if interleaved else read
    written = slice(None) if interleaved == "read" else np.argsort(read)
    results = {"frequencies": freqs, "cos": cos, "sin": sin}
    for name in ("queries", "keys"):
        first, second = np.split(case[name][:, read], 2, axis=1)
        halves = first * cos - signs[0] * second * sin, second * cos + signs[1] * first * sin
        rotated = np.concatenate(halves, axis=1)[:, written]
        results[f"rotated_{name}"] = output(rotated if name in which else case[name])
    return results | {"scores": results["rotated_queries"] @ results["rotated_keys"].T}


def explains(mistakes: tuple[str, ...], values: Values) -> bool:
    """Tells whether these mistakes together, none for (), give the values, up to the rounding of float32 angles."""
    for name, arrays in values.items():
        case = load_cases()[name]
        of = case["head_dim"], case["rope_percentage"], case["rotated_pairs"]
        change = {
            key: value for mistake in mistakes for key, value in MISTAKES[mistake](*of).items()
        }
        exact, *others = (
            predict(case, _ANGLE * share, **change) for share in (0, -1, -0.5, 0.5, 1)
        )
        for kind, array in arrays.items():
            slack = 2 * np.max([np.abs(other[kind] - exact[kind]) for other in others], axis=0)
            if np.any(np.abs(array - exact[kind]) > TOLERANCE * case["scale"][kind] + slack):
                return False
    return True


def check(values: Values, float32_angles: bool = False) -> tuple[str, dict]:
    """Compares a port with the golden values; returns one line that says what it computes, and the command's result."""
    cases = load_cases()
    errors = {
        (name, kind): np.abs(array - cases[name][kind]) / cases[name]["scale"][kind]
        for name, arrays in values.items()
        for kind, array in arrays.items()
    }
    name, kind = worst = max(errors, key=lambda key: errors[key].max())
    case, error = cases[name], float(errors[worst].max())
    found = [] if error <= TOLERANCE else _find(values, errors, error)
    found = [] if found == [_FLOAT32] and float32_angles else found
    encodings = {cases[name]["encoding"] for name in values}
    golden = {
        n: {kind: c[kind] for kind in ARRAYS}
        for n, c in cases.items()
        if c["encoding"] in encodings
    }
    blind = [
        m for m in MISTAKES if not found and explains((m,), values) and not explains((m,), golden)
    ]
    result = {
        "equal": not found,
        "encoding": case["encoding"],
        "rope_percentage": case["rope_percentage"],
        "max_error": error,
        "mistake": " or ".join(found) or None,
        "cannot_exclude": blind,
        "worst_case": name,
        "cases": len(values),
    }
    label = " and ".join(
        "p-RoPE" if e == "proportional" else "partial rotary" for e in sorted(encodings)
    )
    label += f" p = {case['rope_percentage']}" if len(values) == 1 else f" in {len(values)} cases"
    if not found:
        return f"equal to {label} within {error:.1e}", result
    *row, column = map(int, np.unravel_index(errors[worst].argmax(), errors[worst].shape))
    place = "".join(f" at position {int(case['positions'][t])}," for t in row)
    return (
        f"not {label}: {result['mistake']} ({name}/{kind} is off by {error:.1e}{place} column {column})",
        result,
    )


def _find(values: Values, errors: dict[tuple[str, str], np.ndarray], largest: float) -> list[str]:
    """Names the mistakes that explain values which are not equal."""
    near = {name: np.abs(load_cases()[name]["positions"]) < _LONG for name in values}
    rows = [
        e if kind == "frequencies" else e[near[name]]
        for (name, kind), e in errors.items()
        if kind != "scores"
    ]
    if largest < 0.05 and max((e.max(initial=0) for e in rows), default=1) <= TOLERANCE:
        return [f"the angle loses bits: exact below position {_LONG}, not above"]
    if explains((), values):
        return [_FLOAT32]
    for size in (1, 2):
        if found := [
            names for names in itertools.combinations(MISTAKES, size) if explains(names, values)
        ]:
            return [" and ".join(names) for names in found]
    return ["imprecise cos or sin" if largest < 0.01 else "no known mistake explains it"]
