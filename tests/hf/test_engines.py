"""Exports in the engines that people use, and what an export says of them."""

import importlib.util

import numpy as np
import pytest
from support.exports import CASES, LLAMA, distance, export_case
from support.runs import make_run

from prope.errors import RunFailed
from prope.hf import config_json, exporter

needs = {
    name: pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"{package} is not installed: source launch/setup.sh {extra}",
    )
    for name, package, extra in (("mlx", "mlx_lm", "engines"), ("transformers", "torch", "hf"))
}


def row_of(folder, engine):
    """What the model card says of an engine."""
    lines = (folder / "hf" / "README.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {engine}")]
    return line.split(" | ")[1].removesuffix(" |")


@needs["mlx"]
@pytest.mark.parametrize(
    "name",
    [name if "0.75" in name else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_mlx_computes_what_the_card_says(tmp_path, name):
    p, fields, _ = CASES[name]
    spec, params, result = export_case(tmp_path, "mlx", p, fields)
    says = row_of(tmp_path, "MLX")
    try:
        found = distance("mlx", spec, params, result["output"], here=True)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        found = np.inf
    # GELU of Gemma 1 is another approximation there; Gemma 4's scores are sharper.
    bound = 3e-3 if spec.activation == "gelu" else 3e-5
    assert found < bound if says == "computes it" else found > 2 * bound, says


@pytest.mark.parametrize("engine", [pytest.param(name, marks=mark) for name, mark in needs.items()])
def test_a_folder_is_compared_in_an_engine_before_it_appears(
    tmp_path, monkeypatch, engine, sentencepiece_model
):
    make_run(tmp_path / "run", 0.25, sentencepiece_model, **LLAMA | {"vocab_size": 1200})
    workdir, output = str(tmp_path / "run"), str(tmp_path / "hf")
    to_hf = config_json.to_hf

    def rotate_all(*arguments):
        values = to_hf(*arguments)
        values["rope_parameters"]["partial_rotary_factor"] = 1.0
        return values

    with monkeypatch.context() as patch:
        patch.setattr(config_json, "to_hf", rotate_all)
        with pytest.raises(RunFailed, match=f"^{engine} .* differ from the run's by .*nothing was"):
            exporter.export(workdir, output, check=engine)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    found = exporter.export(workdir, output, check=engine)["checked"]
    card = (tmp_path / "hf" / "README.md").read_text()
    assert found.startswith(engine) and found in card
    assert 'AutoTokenizer.from_pretrained("hf")' in card


def test_an_engine_that_is_not_there_checks_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _, _, result = export_case(tmp_path, "vllm", 0.25, LLAMA, check="vllm")
    assert result["checked"].startswith("not checked there: pip install vllm")
    card = (tmp_path / "hf" / "README.md").read_text()  # of a run of bytes
    assert "AutoTokenizer" not in card and "not measured" in card and "pip install" not in card
