"""The models of prope/golden/engines.md: its numbers are transformers', and the formulas'."""

import numpy as np
import oracles
import pytest
from support import write_engines
from support.commands import ROOT

from prope.hf.importer import import_run
from prope.workdir.run import open_run


@pytest.mark.parametrize("name", write_engines.MODELS)
def test_expected_log_probabilities(libraries, tmp_path, name):
    scores = write_engines.write_model(tmp_path / "hf", name)
    page = (ROOT / "prope/golden/engines.md").read_text()
    (row,) = (line.split(" | ") for line in page.splitlines() if line.startswith(f"| {name} |"))
    assert row[2] == write_engines.show(scores)
    import_run(tmp_path / "hf", tmp_path / "run")
    run = open_run(tmp_path / "run")
    tokens = np.array([write_engines.PROMPT])
    positions = np.arange(tokens.size)[None]
    logits = oracles.decoder(run.spec.model, run.params(), tokens, positions)[0, -1]
    expected = np.log(oracles.softmax(logits))
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
