"""The rotation beside other projects' programs, where they are installed.

`pip install --editable ".[hf]"` brings transformers and torch; `pip install --no-deps gemma==3.3.0` brings DeepMind's
file (the package's own needs are large, and the rotation has none of them).
"""

import importlib.metadata
import importlib.util

import numpy as np
import pytest
from test_rope import draw, oracle

from prope import apply_p_rope
from prope.rope import frequencies


@pytest.mark.parametrize("max_wavelength", [1e4, 1e6])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_frequencies_are_transformers_proportional_ones_to_one_ulp(d, max_wavelength):
    pytest.importorskip("torch", reason="the hf extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for p in (0, 0.1, 0.25, 0.5, 0.7, 0.75, 1):
        parameters = {"rope_type": "proportional", "rope_theta": max_wavelength, "partial_rotary_factor": p}
        config = transformers.GemmaConfig(
            hidden_size=4 * d, num_attention_heads=4, head_dim=d, rope_parameters=parameters
        )
        theirs = ROPE_INIT_FUNCTIONS["proportional"](config, device=None)[0].numpy()
        ours = frequencies(d, max_wavelength, p).astype(np.float32)  # theirs are computed in float32
        assert np.abs(ours.view(np.int32).astype(np.int64) - theirs.view(np.int32)).max() <= 1


@pytest.fixture(scope="module")
def gemma_rope():
    """The file of the gemma package that rotates, without the package around it."""
    try:
        files = importlib.metadata.files("gemma")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("optional, compares with another project: pip install --no-deps gemma==3.3.0, as .ci/run does")
    (path,) = (file.locate() for file in files if str(file) == "gemma/gm/math/_positional_embeddings.py")
    spec = importlib.util.spec_from_file_location("gemma_rope", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.apply_rope


@pytest.mark.parametrize("p", [0, 0.1, 0.25, 0.5, 0.75, 1])
def test_equals_gemma_within_its_own_error(gemma_rope, p):
    positions = np.array([[0, 1, 255, 256, 257, 4095, 8191]], np.int32)
    inputs = draw(256, positions)
    theirs = np.asarray(gemma_rope(inputs, positions, base_frequency=10_000, rope_proportion=p))
    their_error = np.abs(theirs - oracle(inputs, positions, 1e4, p)).max()
    ours = np.asarray(apply_p_rope(inputs, positions, 256, 10_000, p))
    assert np.abs(ours - theirs).max() <= their_error + 3e-7
    assert their_error < 2e-3, "theirs is the same rotation, in float32"
