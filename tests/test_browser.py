"""The pages as headless Chromium lays them out, on a screen and on a phone, light and dark."""

import pathlib

import browser
import pytest
from exchange import make_run
from test_analyze import asked
from test_report import template  # noqa: F401

from prope.analysis import analysis, theory_page
from prope.cost import suite
from prope.sweep.page import report_sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
GROUNDS = {"light": "rgb(246, 248, 250)", "dark": "rgb(13, 17, 23)"}


@pytest.fixture(scope="module")
def pages(template, tmp_path_factory) -> dict[str, pathlib.Path]:  # noqa: F811
    """A page of each kind, by its template."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "a.txt"
    text.write_text("What turns, and what does not. " * 8)
    for p in (0.0, 0.75):
        make_run(folder / f"rope_percentage={p:g},seed=0,model.max_wavelength=10000", p)
    compared = analysis.analyse_all(folder, asked(text=str(text)))
    rates = {"seconds": 0.123, "value": 1234.5, "unit": "GFLOP/s", "share": 0.42, "of": "matmul"}
    rows = [
        {"group": "machine", "name": "matmul"} | rates,
        {"group": "step", "name": "2.5 B, none", "error": "no memory"},
    ]
    for x in (512, 32_768):
        rows += [
            {"group": "attention", "name": f"{s}, {x:,} tokens", "series": s, "x": x} | rates for s in ("xla", "cudnn")
        ]
    machine = suite.describe_machine() | {"xla_flags": {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false " * 4}}
    return {
        "benchmarks": pathlib.Path(suite.write_page(folder / "bench", machine, rows, left=3)),
        "sweep": pathlib.Path(report_sweep(template)["output"]),
        "comparison": pathlib.Path(compared["output"]),
        "analysis": pathlib.Path(compared["runs"][1], "analysis", "index.html"),
        "without rotation": pathlib.Path(compared["runs"][0], "analysis", "index.html"),
        "theory": pathlib.Path(theory_page.write(folder / "theory")["output"]),
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("kind", ["benchmarks", "sweep", "comparison", "analysis", "without rotation", "theory"])
def test_nothing_is_cut_off_and_labels_are_readable(pages, tmp_path, kind, width, scheme):
    found = browser.look(pages[kind], tmp_path, width, scheme)
    assert found["wider"] <= 0 and found["cut"] == found["outside"] == found["errors"] == []
    assert min(found["fonts"]) >= 11
    assert found["ground"] == GROUNDS[scheme]
    if width == 1200:
        assert found["scrolled"] == []
    for link in found["links"]:
        assert (pages[kind].parent / link).is_file(), link
    assert len(found["links"]) == (2 if kind == "comparison" else 0)


def test_the_look_finds_what_is_cut_off(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<!DOCTYPE html><p style='width: 900px'>too wide</p><div class='scroll' style='overflow: auto'><div "
        "style='width: 700px'>wide</div></div><svg viewBox='0 0 500 50' width='250'><text x='480' y='20' "
        "style='font-size: 20px'>leaves</text></svg><a href='none.html'>a</a><script>console.error('no')</script>"
    )
    found = browser.look(page, tmp_path, 400, "light")
    assert found["wider"] > 400 and found["cut"] == ["too wide"] and found["scrolled"] == ["wide"]
    assert found["fonts"] == [10] and found["outside"] == ["leaves"] and found["links"] == ["none.html"]
    assert len(found["errors"]) == 1
