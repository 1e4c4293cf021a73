"""The pages in headless Chromium: on a screen and a phone, in light and dark, by mouse and keys."""

import itertools
import json
import pathlib
import shutil

import matplotlib.text
import pytest
from matplotlib.transforms import Bbox
from support import browser
from support.heads import analysis_options
from support.runs import make_run

from prope.analysis import analysis, theory_page
from prope.analysis import page as analysis_page
from prope.html import drawing
from prope.sweep.page import report_sweep
from prope.sweep.run_page import report_run

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
KINDS = ("sweep", "run", "comparison", "analysis", "without rotation", "many heads", "theory")
SHORT = ("run", "comparison", "many heads", "theory")  # without what flags add
HEIGHT = 8000  # pixels that these may have at 1280


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
    compared = analysis.analyse_all(folder, options)
    nope, rope = (pathlib.Path(run, "analysis", "index.html") for run in compared["runs"])
    report_sweep(sweep)  # a page links to those that are there
    many = add_layers(json.loads(rope.with_name("analysis.json").read_text()), 18)
    of_run = report_run(sweep / "rope_percentage=1,seed=0")
    return {
        "run": pathlib.Path(of_run["output"]),
        "sweep": pathlib.Path(report_sweep(sweep)["output"]),
        "comparison": pathlib.Path(compared["output"]),
        "analysis": rope,
        "without rotation": nope,
        "many heads": pathlib.Path(analysis_page.write(folder / "many", many)),
        "theory": pathlib.Path(theory_page.write(folder / "many" / "theory")["output"]),
    }


def add_layers(found: dict, count: int) -> dict:
    """An analysis with `--paper` of `count` layers, whose heads are all of a kind; 6 are shown."""
    layers = range(count)
    (head, *_) = found["shown"]
    changed = {
        "asked": found["asked"] | {"paper": True},
        "frequencies": found["frequencies"][:1] * count,
        "layers": [found["layers"][0] | {"layer": layer} for layer in layers],
        "heads": [
            one | {"layer": layer, "kind": "first_token"}
            for layer in layers
            for one in found["heads"][:4]
        ],
        "shown": [head | {"layer": layer, "why": "diagonal"} for layer in layers[-6:]],
    }
    return found | changed


@pytest.fixture(scope="module")
def pages(drawn) -> dict[str, pathlib.Path]:
    return {kind: pathlib.Path(page) for kind, page in drawn["pages"].items()}


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    tab = browser.Tab(tmp_path_factory.mktemp("profile"))
    yield tab
    tab.close()


# --- All pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_cut_off_and_all_can_be_read(pages, tab, kind, width, scheme):
    tab.open(pages[kind], width, scheme)
    measured = tab.measure()
    assert measured["wider"] <= 0
    assert measured["cut"] == measured["faint"] == measured["repeated"] == []
    assert min(measured["labels"]) >= 11
    assert max(measured["labels"]) <= 16
    assert measured["ground"] == GROUNDS[scheme]
    if width == 1280:
        assert measured["scrolled"] == []
        if kind in SHORT:
            assert tab.ask("document.documentElement.scrollHeight") <= HEIGHT
    files = [link for link in measured["links"] if not link.startswith("#")]
    assert len(files) == {"comparison": 2, "sweep": 1, "run": 1, "many heads": 1}.get(kind, 0)
    for file in files:
        assert (pages[kind].parent / file).is_file(), file
    assert tab.errors == []


def test_what_is_cut_off_or_faint_is_measured(tab, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<!DOCTYPE html><body style='background: #fff'><p style='width: 900px'>too wide</p>"
        "<div class='scroll' style='overflow: auto'><div style='width: 700px'>wide</div></div>"
        "<p style='color: #888'>faint</p><i id='x'></i><i id='x'></i>"
        "<a href='none.html'>a</a><script>console.error('no')</script>"
    )
    tab.open(page, 600)
    measured = tab.measure()
    assert measured["wider"] > 300
    assert measured["cut"] == ["too wide"]
    assert measured["scrolled"] == ["wide"]
    assert measured["links"] == ["none.html"]
    assert measured["repeated"] == ["x"]
    assert measured["faint"] == ["faint"]
    assert len(tab.errors) == 1


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


@pytest.mark.slow
def test_labels_of_pictures_are_whole_apart_and_of_one_size(drawn):
    names = {name for name, _, _ in drawn["pictures"]}
    assert {"perplexity", "accuracy-copy", "usage", "head_0_1", "scores"} < names
    for name, labels, misplaced in drawn["pictures"]:
        assert {size for _, size, _, _ in labels} == {10}, name
        assert misplaced == [[], []], name


def test_labels_that_leave_a_picture_or_overlap_are_found():
    def draw(figure) -> None:
        figure.text(0.9, 0.5, "leaves the picture")
        figure.text(0.1, 0.2, "one")
        figure.text(0.11, 0.22, "two")

    picture = drawing.Picture("", "", "", "", draw, (4, 2))
    labels, _ = draw_labels(picture)
    assert check_labels(labels) == (["leaves the picture"], ["one | two"])


@pytest.mark.parametrize("kind", ["sweep", "comparison", "analysis"])
def test_all_that_can_be_used_is_reached_by_keyboard_and_seen(pages, tab, kind):
    tab.open(pages[kind], 390, "dark")
    count = tab.ask("""[...document.querySelectorAll("a[href], summary, .scroll")]
        .filter(e => !e.closest("details:not([open]) > :not(summary)")).length""")
    focused = """(e => [
        [...document.querySelectorAll("*")].indexOf(e),
        getComputedStyle(e).outlineStyle,
        parseFloat(getComputedStyle(e).outlineWidth),
    ])(document.activeElement)"""
    seen = set()
    for _ in range(count):
        tab.press("Tab")
        element, style, width = tab.ask(focused)
        assert style == "solid"
        assert width >= 2
        seen.add(element)
    assert len(seen) == count > 5


def test_no_other_script_runs(pages, tab, tmp_path):
    page = tmp_path / "index.html"
    planted = "<img src='data:,' onerror='document.title = 1'><script>document.title = 2</script>"
    text = pages["analysis"].read_text()
    text = text.replace("<main>", f"<main>{planted}")
    page.write_text(text.replace("let at = null", "let at =  null"))
    tab.open(page, 1280)
    assert tab.ask("document.title").startswith("What the heads do")
    assert tab.ask("document.querySelector('output')") is None, "nor one that was changed"
    assert sum("Content Security Policy" in error for error in tab.errors) == 3


# --- Maps that can be read out, and addresses -----------------------------------------------------

MAP = "document.querySelector('#head_0_1')"


def scroll_to_cell(tab, row: int, column: int, number: int = 0) -> tuple[float, float]:
    """Scrolls a cell of a map of head 0.1 into view: its middle in pixels of the window."""
    return tab.ask(
        f"""(() => {{
        const maps = JSON.parse({MAP}.querySelector("figure").dataset.maps);
        const [left, bottom, width, height] = maps[{number}].box;
        const x = left + ({column} + 0.5) / 47 * width;
        const y = 1 - bottom - height + ({row} + 0.5) / 47 * height;
        const image = {MAP}.querySelector("img");
        {MAP}.querySelector(".scroll").scrollLeft = x * image.clientWidth - 200;
        scrollBy(0, image.getBoundingClientRect().top + y * image.clientHeight - 450);
        const box = image.getBoundingClientRect();
        return [box.left + x * box.width, box.top + y * box.height];
        }})()"""
    )


def box_of(tab, element) -> list[float]:
    """Left, top, right and bottom of an element in the window."""
    box = f"{element}.getBoundingClientRect()"
    return tab.ask(f"(box => [box.left, box.top, box.right, box.bottom])({box})")


def read_out(tab) -> str:
    """What the page says about a cell of head 0.1."""
    return tab.ask(f"{MAP}.querySelector('output').textContent")


def token_names(page: pathlib.Path) -> list[str]:
    window = json.loads(page.with_name("analysis.json").read_text())["window"]
    return [f"{i} {name}" for i, name in zip(window["positions"], window["tokens"], strict=True)]


def expected(page: pathlib.Path, row: int, column: int, title: str = "weights") -> str:
    """What is to be read out of a cell of head 0.1: its tokens and its number."""
    heads = json.loads(page.with_name("analysis.json").read_text())["shown"]
    (head,) = [head for head in heads if head["why"] == "asked for" and head["layer"] == 0]
    values = head["map" if title == "weights" else title]
    names = token_names(page)
    return f"query {names[row]}, key {names[column]}: {values[row][column]:.3g} ({title})"


def test_a_map_names_every_token(pages, drawn):
    names = token_names(pages["analysis"])
    assert "21 ' '" in names
    assert "43 '\\n'" in names
    assert len(names) == 47
    drawn_labels = next(labels for name, labels, _ in drawn["pictures"] if name == "head_0_1")
    labels = [text for text, *_ in drawn_labels]
    assert [labels.count(name) for name in names] == [4] * 47, "rows and columns of two maps"


@pytest.mark.parametrize("width", [1280, 390])
def test_a_map_reads_out_the_cell_that_is_pointed_at(pages, tab, width):
    page = pages["analysis"]
    tab.open(page, width)
    x, y = scroll_to_cell(tab, 30, 11)
    tab.move(x, y)
    assert read_out(tab) == expected(page, 30, 11)
    assert "query 49 '" in read_out(tab)
    left, top, right, bottom = box_of(tab, f"{MAP}.querySelector('i')")
    assert left < x < right
    assert top < y < bottom
    left, top, _, bottom = box_of(tab, f"{MAP}.querySelector('output')")
    assert left >= 0
    assert 0 <= top < bottom <= 900, "in view wherever the page is"
    tab.move(*scroll_to_cell(tab, 11, 30))
    assert read_out(tab) == expected(page, 30, 11), "nothing is there, of a later token"
    tab.tap(*scroll_to_cell(tab, 46, 0, number=1))
    assert read_out(tab) == expected(page, 46, 0, "logits")
    assert tab.errors == []


def test_arrow_keys_move_over_the_cells_of_all_maps(pages, tab):
    page = pages["analysis"]
    tab.open(page, 1280)
    tab.ask(f"{MAP}.querySelector('.scroll').focus()")
    walk = [
        (["ArrowRight"], (0, 0)),
        (["ArrowDown"], (1, 0)),
        (["ArrowUp"], (0, 0)),
        (["ArrowLeft"], (0, 0)),
        (["ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"], (2, 2)),
        (["ArrowUp"], (2, 2)),  # nothing above the diagonal
        (["ArrowRight"], (2, 0, "logits")),
        (["ArrowLeft"], (2, 2)),
        (["ArrowRight", *["ArrowDown"] * 44], (46, 0, "logits")),
    ]
    for keys, cell in walk:
        tab.press(*keys)
        assert read_out(tab) == expected(page, *cell), (keys, cell)
    _, top, _, bottom = box_of(tab, f"{MAP}.querySelector('i')")
    assert 0 <= top < bottom <= 900, "the page follows"


@pytest.mark.parametrize("width", [1280, 390])
def test_a_head_has_an_address_and_links_to_all_that_is_of_it(pages, tab, width):
    target = "document.querySelector(':target')"
    for head in ("0.3", "1.2"):
        tab.open(pages["analysis"], width, "dark", f"#head-{head}")
        assert tab.ask(f"{target}.id") == f"head-{head}"
        assert tab.ask(f"{target}.cells[0].textContent.trim()") == head
        assert tab.ask(f"getComputedStyle({target}).outlineStyle") == "solid"
        assert 0 <= tab.ask(f"{target}.getBoundingClientRect().top") < 900
        assert tab.ask("scrollY") > 300
    links = """[...document.querySelectorAll('a[href*="1.2"], a[href*="1_2"]')]"""
    reached = set()
    for number in range(tab.ask(f"{links}.length")):
        address = tab.ask(f"(link => (link.click(), link.hash))({links}[{number}])")
        assert tab.ask(f"{target}.id") == address[1:]
        assert -1 <= tab.ask(f"{target}.getBoundingClientRect().top") < 900
        reached.add(address)
    assert reached == {"#head-1.2", "#logits-1.2", "#head_1_2", "#norms_1_2"}
    assert tab.errors == []


def test_a_head_in_a_closed_table_is_opened(pages, tab, tmp_path):
    page = tmp_path / "index.html"
    caption = '<p class="soft" id="every'
    closed = f"<details><summary>All</summary>{caption}"
    page.write_text(pages["analysis"].read_text().replace(caption, closed, 1))
    tab.open(page, 1280, target="#head-0.3")
    assert tab.ask("document.querySelector('details').open")
    assert tab.ask("document.querySelector(':target').id") == "head-0.3"
