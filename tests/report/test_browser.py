"""The pages in headless Chromium: on a screen and a phone, in light and dark, by keys."""

import itertools
import pathlib
import shutil

import matplotlib.text
import pytest
from matplotlib.transforms import Bbox
from support import browser
from support.heads import analysis_options
from support.runs import make_run

from prope.analysis import analysis
from prope.pages import drawing
from prope.pages.run import report_run
from prope.pages.sweep import report_sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
GROUNDS = {"light": "rgb(246, 248, 250)", "dark": "rgb(13, 17, 23)"}


@pytest.fixture(scope="module")
def drawn(once, template) -> dict:
    """A page of each kind, by its template; the pictures on them: (name, what is on it)."""

    def make(folder):
        runs = folder / "runs"
        runs.mkdir()
        pictures = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drawing.Picture, "render", lambda picture: record(picture, pictures))
            pages = write_pages(runs, shutil.copytree(template, folder / "sweep"))
        return {"pages": {kind: str(page) for kind, page in pages.items()}, "pictures": pictures}

    return once("pages", make)[1]


RENDER = drawing.Picture.render
KINDS = ("sweep", "run", "analysis", "without rotation")


def record(picture, pictures):
    """Renders a picture, and keeps its name and labels."""
    labels, rendered = draw_labels(picture)
    pictures.append([picture.name, labels, check_labels(labels)])
    return rendered


def write_pages(folder: pathlib.Path, sweep: pathlib.Path) -> dict[str, pathlib.Path]:
    text = folder / "a.txt"
    text.write_text("What turns,\nand what does not. " * 8)
    for p in (0.0, 0.75):
        make_run(folder / f"rope_percentage={p:g},seed=0,model.max_wavelength=10000", p)
    options = analysis_options(text=str(text), heads="0.1,1.2", window="20:66")
    nope, rope = map(pathlib.Path, analysis.analyse_all(folder, options)["pages"])
    report_sweep(sweep)  # a page links to those that are there
    of_run = report_run(sweep / "rope_percentage=1,seed=0")
    return {
        "run": pathlib.Path(of_run["output"]),
        "sweep": pathlib.Path(report_sweep(sweep)["output"]),
        "analysis": rope,
        "without rotation": nope,
    }


@pytest.fixture(scope="module")
def pages(drawn) -> dict[str, pathlib.Path]:
    return {kind: pathlib.Path(page) for kind, page in drawn["pages"].items()}


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    tab = browser.Tab(tmp_path_factory.mktemp("profile"))
    yield tab
    tab.close()


# --- All pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_cut_off_and_all_can_be_read(pages, tab, kind):
    tab.open(pages[kind], 1280)
    for width, (scheme, ground) in itertools.product((1280, 390), GROUNDS.items()):
        tab.emulate(width, scheme)
        measured = tab.measure()
        assert measured["wider"] <= 0
        assert measured["cut"] == measured["faint"] == measured["repeated"] == []
        assert min(measured["labels"]) >= 11
        assert max(measured["labels"]) <= 16
        assert measured["ground"] == ground
        if width == 1280 or kind in ("run", "sweep"):
            assert measured["scrolled"] == []
    links = measured["links"]
    ids = set(tab.ask("[...document.querySelectorAll('[id]')].map(e => e.id)"))
    assert {link[1:] for link in links if link.startswith("#")} <= ids
    files = [link for link in links if not link.startswith("#")]
    assert len(files) == (kind in ("sweep", "run"))
    for file in files:
        assert (pages[kind].parent / file).is_file(), file
    assert tab.errors == []


def test_a_phone_shows_the_loss_of_a_run_first_and_tables_as_lists(pages, tab):
    tab.open(pages["run"], 390)
    assert tab.ask("document.images[0].getBoundingClientRect().bottom") < 900
    assert tab.ask("document.images[0].alt").startswith("Last losses of training")
    cells = """[...document.querySelectorAll("section table")].find(e => e.checkVisibility())
        .querySelectorAll("tbody tr:first-child > *")"""
    names = tab.ask(f"[...{cells}].map(e => getComputedStyle(e, '::before').content)")
    assert [name.strip('" ') for name in names[:3]] == ["step", "dataset", "tokens in a window"]
    tops = tab.ask(f"[...{cells}].map(e => e.getBoundingClientRect().top)")
    assert tops == sorted(set(tops))


def draw_labels(picture) -> tuple[list, object]:
    """Renders a picture; returns its labels, (text, size, box, the picture's box), and it."""
    labels = {}
    draw = matplotlib.text.Text.draw

    def record(text, renderer, *args, **options) -> None:
        if text.get_visible() and text.get_text().strip():
            labels[text] = (
                text.get_text(),
                text.get_fontsize(),
                text.get_window_extent().extents.tolist(),
                text.figure.bbox.extents.tolist(),
            )
        draw(text, renderer, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matplotlib.text.Text, "draw", record)
        rendered = RENDER(picture)
    return list(labels.values()), rendered


def check_labels(labels) -> tuple[list[str], list[str]]:
    """Finds labels that leave the picture, and pairs of labels that lie on one another."""
    boxes = []
    outside = []
    for text, _, extents, picture in labels:
        box = Bbox.from_extents(extents)
        ink = 0.12 * min(box.width, box.height)  # boxes are higher than letters
        box = box.padded(-ink)
        boxes.append((text, box))
        if Bbox.from_extents(picture).count_contains(box.corners()) < 4:
            outside.append(text)
    overlapping = []
    for (name, box), (other, other_box) in itertools.combinations(boxes, 2):
        if box.overlaps(other_box):
            overlapping.append(f"{name} | {other}")
    return outside, overlapping


def test_labels_of_pictures_are_whole_apart_and_of_one_size(drawn):
    names = {name for name, _, _ in drawn["pictures"]}
    assert {"perplexity", "accuracy-copy", "usage", "head_0_1", "census"} < names
    for name, labels, misplaced in drawn["pictures"]:
        assert {size for _, size, _, _ in labels} == {10}, name
        assert misplaced == [[], []], name


def test_all_that_can_be_used_is_reached_by_keyboard_and_seen(pages, tab):
    tab.open(pages["analysis"], 390, "dark")
    count = tab.ask("""[...document.querySelectorAll("a[href], summary, .scroll")]
        .filter(e => !e.closest("details:not([open]) > :not(summary)")).length""")
    focused = """(e => [
        [...document.querySelectorAll("*")].indexOf(e),
        getComputedStyle(e).outlineStyle,
    ])(document.activeElement)"""
    seen = set()
    for _ in range(count):
        tab.press("Tab")
        element, style = tab.ask(focused)
        assert style == "solid"
        seen.add(element)
    assert len(seen) == count > 5


def test_no_script_runs(pages, tab, tmp_path):
    page = tmp_path / "index.html"
    planted = "<img src='data:,' onerror='document.title = 1'><script>document.title = 2</script>"
    page.write_text(pages["analysis"].read_text().replace("<main>", f"<main>{planted}"))
    tab.open(page, 1280)
    assert tab.ask("document.title").startswith("What the heads do")
    assert sum("Content Security Policy" in error for error in tab.errors) == 2


def test_a_head_has_an_address_and_links_to_all_that_is_of_it(pages, tab):
    target = "document.querySelector(':target')"
    tab.open(pages["analysis"], 390, "dark", "#head-1.2")
    assert tab.ask(f"{target}.cells[0].textContent.trim()") == "1.2"
    assert tab.ask(f"getComputedStyle({target}).outlineStyle") == "solid"
    links = """[...document.querySelectorAll('a[href*="1.2"], a[href*="1_2"]')]"""
    reached = {"#head-1.2"}
    for number in range(tab.ask(f"{links}.length")):
        address = tab.ask(f"(link => (link.click(), link.hash))({links}[{number}])")
        assert tab.ask(f"{target}.id") == address[1:]
        assert -1 <= tab.ask(f"{target}.getBoundingClientRect().top") < 900
        reached.add(address)
    assert reached == {"#head-1.2", "#logits-1.2", "#head_1_2", "#norms_1_2"}
    assert tab.errors == []
