"""Rotates golden inputs by gemma's `apply_rope`; needs Python >= 3.12, jax and gemma alone.

    python tests/write_gemma4.py tests/gemma4.json

The cases are of prope/golden/proportional.json: Gemma 4's full layer, and small heads.
"""

import importlib.metadata
import importlib.util
import json
import pathlib
import sys

import jax.numpy as jnp

GOLDEN = pathlib.Path(__file__).parents[1] / "prope/golden/proportional.json"
FILE = "gemma/gm/math/_positional_embeddings.py"  # without the package's large dependencies
CASES = (
    "proportional_d512_theta1000000_p0.25",
    "proportional_d64_p0.3",
    "proportional_d16_p0",
    "proportional_d16_p1",
)


def main(output):
    (file,) = (file for file in importlib.metadata.files("gemma") if str(file) == FILE)
    spec = importlib.util.spec_from_file_location("positional_embeddings", file.locate())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    golden = json.loads(GOLDEN.read_text())
    lines = [f'"version": "{importlib.metadata.version("gemma")}"']
    for name in CASES:
        case = golden[name]
        rotated = module.apply_rope(
            jnp.array(case["queries"], jnp.float32)[None, :, None],
            jnp.array(case["positions"], jnp.int32)[None],
            base_frequency=case["max_wavelength"],
            rope_proportion=case["rope_percentage"],
        )
        rows = [[float(f"{x:.9g}") for x in row] for row in rotated[0, :, 0].tolist()]
        lines.append(f'"{name}": {json.dumps(rows, separators=(",", ":"))}')
    body = ",\n".join(lines)
    pathlib.Path(output).write_text(f"{{\n{body}\n}}\n")


if __name__ == "__main__":
    main(sys.argv[1])
