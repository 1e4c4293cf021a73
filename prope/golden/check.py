"""Names what a port computes, from its values alone.

Each wrong formula of a table predicts the values of a case, in float64. It explains a port whose
values all agree with the prediction, apart from the rounding that float32 angles bring.
"""

import functools
import importlib.resources
import io
import json
import zipfile
from collections.abc import Iterator

import ml_dtypes
import numpy as np
from etils import epath

from prope.errors import UsageError, nearest, usage_error

TOLERANCE = 3e-7  # share of an array's scale: the rounding of float32 values
_ANGLE = 2.0**-21  # relative error of a float32 angle, from the power and the product too
ARRAYS = ("frequencies", "cos", "sin", "rotated_queries", "rotated_keys", "scores")


def _rounded_to(dtype):
    return lambda x: np.asarray(x).astype(dtype).astype(np.float64)


_bfloat16 = _rounded_to(ml_dtypes.bfloat16)
_float16 = _rounded_to(np.float16)


def _interleaved(lanes):
    lanes = np.sort(lanes)
    return np.append(lanes[::2], lanes[1::2])


FLOAT32 = "float32 angles (transformers and gemma have them, too; --float32_angles accepts them)"
_LABELS = {
    "proportional": "p-RoPE",
    "partial": "partial rotary",
    "linear": "linear scaling of RoPE",
}
# Wrong formulas by name: the steps of `predict` that each changes, and how.
MISTAKES = {
    FLOAT32: {},
    "the exponent is divided by the number of rotated lanes, not by head_dim": {
        "denominator": "partial"
    },
    "the exponent is divided by head_dim, not by the number of rotated lanes": {
        "denominator": "proportional"
    },
    "prefix pairing: the rotated lanes are paired among themselves, not over the head": {
        "pairing": "partial"
    },
    "pairing over the head: lane k pairs with k + head_dim/2, not within the prefix": {
        "pairing": "proportional"
    },
    "partial rotary instead of p-RoPE: denominator and pairing": {
        "denominator": "partial",
        "pairing": "partial",
    },
    "p-RoPE instead of partial rotary: denominator and pairing": {
        "denominator": "proportional",
        "pairing": "proportional",
    },
    "interleaved lanes: lane 2k pairs with 2k + 1": {"lanes": _interleaved},
    "interleaved lanes are read, halves are written": {"lanes": _interleaved, "written": np.sort},
    "the slow end is kept: the fastest pairs are dropped": {"order of pairs": np.flip},
    "the exponent lacks its factor of 2": {"theta": np.sqrt},
    "max_wavelength is 10000 for every case": {"theta": lambda theta: 10_000},
    "max_wavelength is 500000 for every case": {"theta": lambda theta: 500_000},
    "max_wavelength is 1000000 for every case": {"theta": lambda theta: 1_000_000},
    "p = 0 is read as unset": {"p": lambda p: p or 1},
    "p is applied twice": {"p": np.square},
    "p is the share that is not rotated": {"p": lambda p: 1 - p},
    "p is ignored: every pair is rotated": {"p": np.ones_like},
    "nothing is rotated, as where p is read as a percentage": {"p": lambda p: p / 100},
    "the number of rotated pairs is rounded up": {"pairs": np.ceil},
    "bfloat16 positions": {"positions": _bfloat16},
    "bfloat16 frequencies": {"frequencies": _bfloat16},
    "bfloat16 angles": {"angles": _bfloat16},
    "bfloat16 positions, frequencies and angles": dict.fromkeys(
        ("positions", "frequencies", "angles"), _bfloat16
    ),
    "bfloat16 table of cos and sin": {"cos": _bfloat16, "sin": _bfloat16},
    "float16 table of cos and sin": {"cos": _float16, "sin": _float16},
    "the rotated values are rounded to bfloat16": {"outputs": _bfloat16},
    "positions begin one too high": {"positions": lambda m: m + 1},
    "the rotation is applied twice": {"positions": lambda m: 2 * m},
    "the sign of a negative position is lost": {"positions": np.abs},
    "the rotation has the wrong direction": {"first sine": np.negative, "second sine": np.negative},
    "the sign of the first lane's sine is wrong": {"first sine": np.negative},
    "the sign of the second lane's sine is wrong": {"second sine": np.negative},
    "lanes that are not rotated are set to zero": {"cos of other lanes": np.zeros_like},
    "cos and sin are exchanged": {"table": np.flipud},
    "cos and sin are exchanged in the pairs that rotate": {"rotated table": np.flipud},
    "in place: the second lane is computed from the first one, already rotated": {
        "in place": np.flipud
    },
    "halves are read, and the lanes that rotate are written first": {"rotated first": True},
    "linear scaling by 8 in every layer, not in Gemma 3's full layers alone": {
        "factor": lambda factor: 8
    },
    "linear scaling is left out": {"factor": np.ones_like},
}


@functools.cache
def load_cases() -> dict[str, dict]:
    """Reads the golden files: cases by name, with arrays as float64."""
    cases = {}
    for encoding in _LABELS:
        file = importlib.resources.files("prope.golden") / f"{encoding}.json"
        cases |= json.loads(file.read_text("utf-8"))
    for case in cases.values():
        for name, value in case.items():
            if isinstance(value, list):
                case[name] = np.array(value, np.float64)
    return cases


def read_values(path: epath.Path) -> dict:
    """Reads a port's arrays, by case and array, in the shapes of the golden ones."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = dict(file.items())
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        problem = f"cannot be read as an .npz file ({type(error).__name__})"
        raise usage_error("--values", path, problem) from None
    cases = load_cases()
    known = [f"{name}/{kind}" for name in cases for kind in ARRAYS]
    values = {}
    for key, array in arrays.items():
        key = key.replace("inv_freq", "frequencies")
        if key not in known:
            hint = f"must be CASE/ARRAY{nearest(key, known)}, of {', '.join(ARRAYS)}"
            raise UsageError(f"{path}: {key}: {hint}")
        name, kind = key.split("/")
        array = _fit(f"{path}: {key}", array, cases[name], kind)
        values.setdefault(name, {})[kind] = array
    if not values:
        raise UsageError(f"{path}: holds nothing to check; add arrays such as {known[3]}")
    return values


def _fit(label: str, array: np.ndarray, case: dict, kind: str) -> np.ndarray:
    """Returns an array in the shape of the golden one."""
    if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        problem = f"its type is {array.dtype}, or it holds nan or inf"
        raise UsageError(f"{label}: must hold finite numbers; {problem}")
    shape = case[kind].shape
    array = np.squeeze(array).astype(np.float64)
    if kind == "frequencies" and array.size == case["rotated_pairs"]:
        array = np.append(array, np.zeros(shape[0] - array.size))
    if kind in ("cos", "sin") and array.shape == (shape[0], 2 * shape[1]):
        # One value for each lane: a pair's two are neighbours, or half a head apart.
        beside = np.array_equal(array[:, ::2], array[:, 1::2])
        array = array[:, ::2] if beside else array[:, : shape[1]]
    if array.shape != shape:
        problem = f"must have shape {shape}, apart from axes of length 1; got {array.shape}"
        if kind in ("cos", "sin"):
            problem += "; pad a table of the rotated pairs alone with cos 1 and sin 0"
        raise UsageError(f"{label}: {problem}")
    return array


def predict(case: dict, mistake: dict, error: float = 0.0) -> dict[str, np.ndarray]:
    """Computes a case's arrays with a mistake, and frequencies off by a relative `error`."""

    def step(name, value):
        return mistake.get(name, np.asarray)(value)

    d = case["head_dim"]
    k = np.arange(d // 2)
    p = step("p", case["rope_percentage"])
    pairs = int(step("pairs", p * d / 2))
    widths = {"partial": max(2 * pairs, 1)}
    encoding = case["encoding"]
    denominator = widths.get(mistake.get("denominator", encoding), d)
    distance = widths.get(mistake.get("pairing", encoding), d) // 2
    theta = float(step("theta", case["max_wavelength"]))
    factor = step("factor", case.get("rope_scaling_factor", 1))
    is_rotated = step("order of pairs", k) < pairs
    freqs = np.where(is_rotated, theta ** (-2 * k / denominator) / factor, 0.0)
    freqs = step("frequencies", freqs) * (1 + error)
    angles = step("angles", step("positions", case["positions"])[:, None] * freqs)
    cos = step("cos", np.cos(angles))
    cos, sin = step("rotated table", (cos, step("sin", np.sin(angles))))
    cos = np.where(is_rotated, cos, step("cos of other lanes", 1.0))
    cos, sin = step("table", (cos, np.where(is_rotated, sin, 0.0)))
    # Pair k < distance has lanes k and k + distance; the others share what remains, not rotated.
    first = np.where(k < distance, k, k + distance)
    second = np.setdiff1d(np.arange(d), first)
    lanes = step("lanes", np.append(first, second))
    written = step("written", np.argsort(lanes))
    if "rotated first" in mistake:
        written = np.argsort(np.tile(~is_rotated, 2), kind="stable")
    arrays = {"frequencies": freqs, "cos": cos, "sin": sin}
    for kind in ("queries", "keys"):
        first, second = np.split(case[kind][:, lanes], 2, axis=1)
        rotated_first = first * cos - second * step("first sine", sin)
        first, _ = step("in place", (first, rotated_first))
        rotated_second = second * cos + first * step("second sine", sin)
        rotated = np.append(rotated_first, rotated_second, axis=1)
        arrays[f"rotated_{kind}"] = step("outputs", rotated[:, written])
    arrays["scores"] = arrays["rotated_queries"] @ arrays["rotated_keys"].T
    return arrays


def _compare(values: dict, mistake: dict) -> Iterator[tuple]:
    """Yields (case, array, its errors, how far float32 angles move it), relative to its scale."""
    for name, arrays in values.items():
        case = load_cases()[name]
        exact = predict(case, mistake)
        angle_errors = (-_ANGLE, -_ANGLE / 2, _ANGLE / 2, _ANGLE)
        blurred = [predict(case, mistake, error) for error in angle_errors]
        queries = case["queries"].max()
        keys = case["keys"].max()
        scales = {
            "frequencies": np.where(case["frequencies"] > 0, case["frequencies"], 1.0),
            "cos": 1.0,
            "sin": 1.0,
            "rotated_queries": queries,
            "rotated_keys": keys,
            "scores": case["head_dim"] * queries * keys,
        }
        for kind, scale in scales.items():
            if kind not in arrays:
                continue
            expected = exact[kind] if mistake else case[kind]
            errors = np.abs(arrays[kind] - expected) / scale
            moved = [np.abs(other[kind] - exact[kind]) for other in blurred]
            slack = 2 * np.max(moved, axis=0) / scale
            yield name, kind, errors, slack


def explains(mistake: dict, values: dict) -> bool:
    """Returns whether a mistake gives the values, up to the rounding of float32 angles."""
    compared = _compare(values, mistake)
    return all((errors <= TOLERANCE + slack).all() for _, _, errors, slack in compared)


def check(values: dict, float32_angles: bool = False) -> tuple[str, dict]:
    """Compares a port with the golden values: (line on what it computes, command's result)."""
    name, kind, errors, _ = max(_compare(values, {}), key=lambda row: row[2].max())
    error = float(errors.max())
    index = list(map(int, np.unravel_index(errors.argmax(), errors.shape)))
    fitting = [mistake for mistake in MISTAKES if explains(MISTAKES[mistake], values)]
    mistakes = fitting or ["no known mistake explains it"]
    if FLOAT32 in fitting:
        mistakes = [FLOAT32]
    if error <= TOLERANCE or (float32_angles and FLOAT32 in fitting):
        mistakes = []

    cases = load_cases()
    encodings = {cases[name]["encoding"] for name in values}
    # What gives all golden values of these encodings is no mistake there.
    golden = {name: case for name, case in cases.items() if case["encoding"] in encodings}
    blind = [mistake for mistake in fitting if not explains(MISTAKES[mistake], golden)]
    result = {
        "equal": not mistakes,
        "encoding": cases[name]["encoding"],
        "rope_percentage": cases[name]["rope_percentage"],
        "max_error": error,
        "mistake": " or ".join(mistakes) or None,
        "cannot_exclude": [] if mistakes else blind,
        "worst_case": name,
        "cases": len(values),
    }
    label = " and ".join(_LABELS[encoding] for encoding in sorted(encodings))
    label += f" in {len(values)} of {len(cases)} cases"
    if not mistakes:
        return f"equal to {label} within {error:.1e}", result
    place = f"{name}/{kind}{index} is off by {error:.1e}"
    return f"not {label}: {result['mistake']} ({place})", result
