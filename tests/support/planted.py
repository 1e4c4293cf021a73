"""Errors that are planted in prope/rope.py."""

import pathlib
import types

# (the text in prope/rope.py, what stands there instead).
ROPE_MUTANTS = {
    "wrong denominator": (
        "max_wavelength ** (-2.0 * pairs / head_dim)",
        "max_wavelength ** "
        "(-2.0 * pairs / max(2 * num_rotated_pairs(head_dim, rope_percentage), 1))",
    ),
    "prefix pairing": (
        "    table = rotation_table(jnp.atleast_2d(positions), freqs)\n"
        "    return rotate(inputs, table)\n",
        "    n = num_rotated_pairs(head_dim, rope_percentage)\n"
        "    table = rotation_table(jnp.atleast_2d(positions), freqs[:n])\n"
        "    rotated = rotate(inputs[..., : 2 * n], table)\n"
        "    return jnp.concatenate([rotated, inputs[..., 2 * n :]], axis=-1)\n",
    ),
    "interleaved pairing": (
        ".reshape(*inputs.shape[:2], *heads, 2, table.shape[-1])\n",
        ".reshape(*inputs.shape[:2], *heads, table.shape[-1], 2).swapaxes(-1, -2)\n",
    ),
    "slow end kept": (
        "rotated = pairs < num_rotated_pairs(head_dim, rope_percentage)",
        "rotated = pairs >= head_dim // 2 - num_rotated_pairs(head_dim, rope_percentage)",
    ),
    "bfloat16 positions": (
        "narrow = positions.astype(",
        "narrow = positions.astype(jnp.bfloat16).astype(",
    ),
    "bfloat16 frequencies": (
        "return np.where(rotated, max_wavelength ** (-2.0 * pairs / head_dim), 0.0)",
        "exact = np.where(rotated, max_wavelength ** (-2.0 * pairs / head_dim), 0.0)\n"
        "    return exact.astype(jnp.bfloat16).astype(np.float64)",
    ),
    "p applied twice": (
        "return int(rope_percentage * head_dim // 2)",
        "return int(rope_percentage * rope_percentage * head_dim // 2)",
    ),
    "p = 0 read as unset": (
        "return int(rope_percentage * head_dim // 2)",
        "return int((rope_percentage or 1.0) * head_dim // 2)",
    ),
    "a sign of the rotation": ("second * cos + first * sin", "second * cos - first * sin"),
    "float32 angles": (
        "    phase = _phase(positions, high, low)\n",
        "    radians = (high + low / 2.0**32) / 2.0**32 * 2 * math.pi\n"
        "    angle = positions.astype(jnp.float32) * radians.astype(np.float32)\n"
        "    return jnp.cos(angle), jnp.sin(angle)\n",
    ),
    "low word of the fraction dropped": ("upper * low_upper + ", ""),
    "quarter turns rounded down": ("(phase + np.uint32(1 << 29)) >> 30", "phase >> 30"),
    "sine of negative positions": ("!= (positions < 0)", "!= (positions > positions)"),
}


def load_source(name: str, file: pathlib.Path, source: str) -> types.ModuleType:
    """A module from its text."""
    module = types.ModuleType(name)
    module.__file__ = str(file)
    exec(compile(source, file, "exec"), module.__dict__)
    return module
