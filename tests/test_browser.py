"""The pages in headless Chromium: on a screen and on a phone, light and dark; mouse, finger, keyboard."""

import json
import pathlib

import browser
import pytest
from makers import analysis_options as asked
from makers import make_run

from prope.analysis import analysis, theory_page
from prope.html.drawing import Picture
from prope.sweep.page import report_sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
GROUNDS = {"light": "rgb(246, 248, 250)", "dark": "rgb(13, 17, 23)"}


@pytest.fixture(scope="module")
def pictures():
    """The pictures that are drawn while this fixture lasts."""
    drawn = []
    render = Picture.render

    def record(picture):
        drawn.append(picture)
        return render(picture)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Picture, "render", record)
        yield drawn


@pytest.fixture(scope="module")
def pages(template, pictures, tmp_path_factory) -> dict[str, pathlib.Path]:
    """A page of each kind, by its template; `pictures` collects what is drawn on them."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "a.txt"
    text.write_text("What turns,\nand what does not. " * 8)
    for p in (0.0, 0.75):
        make_run(folder / f"rope_percentage={p:g},seed=0,model.max_wavelength=10000", p)
    compared = analysis.analyse_all(folder, asked(text=str(text), heads="0.1,1.2", window="20:66"))
    return {
        "sweep": pathlib.Path(report_sweep(template)["output"]),
        "comparison": pathlib.Path(compared["output"]),
        "analysis": pathlib.Path(compared["runs"][1], "analysis", "index.html"),
        "without rotation": pathlib.Path(compared["runs"][0], "analysis", "index.html"),
        "theory": pathlib.Path(theory_page.write(folder / "theory")["output"]),
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("kind", ["sweep", "comparison", "analysis", "without rotation", "theory"])
def test_nothing_is_cut_off_and_labels_are_readable(pages, tmp_path, kind, width, scheme):
    found = browser.look(pages[kind], tmp_path, width, scheme)
    assert found["wider"] <= 0
    assert found["cut"] == found["errors"] == found["faint"] == found["repeated"] == []
    assert 11 <= min(found["labels"]) <= max(found["labels"]) <= 16
    assert found["ground"] == GROUNDS[scheme]
    if width == 1200:
        assert found["scrolled"] == []
    files = [link for link in found["links"] if not link.startswith("#")]
    assert all((pages[kind].parent / link).is_file() for link in files), files
    assert len(files) == (2 if kind == "comparison" else 0)


def test_labels_of_pictures_are_whole_and_apart(pages, pictures):
    assert {"perplexity", "accuracy", "usage", "head_0_1", "scores"} < {p.name for p in pictures}
    for picture in pictures:
        found = browser.measure_labels(picture)
        assert found["smallest"] == 10, picture.name
        assert found["outside"] == found["overlapping"] == [], picture.name


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    tab = browser.Tab(tmp_path_factory.mktemp("profile"))
    yield tab
    tab.close()


MAP = "document.querySelector('#head_0_1')"
READ = f"{MAP}.querySelector('output').textContent"


def cell(tab, row: int, column: int, number: int = 0) -> tuple[float, float]:
    """Scrolls a cell of a map of head 0.1 into view: its middle in pixels of the window."""
    return tab.ask(
        f"""(() => {{
        const [left, bottom, width, height] = JSON.parse({MAP}.querySelector("figure").dataset.maps)[{number}].box;
        const image = {MAP}.querySelector("img");
        const x = left + ({column} + 0.5) / 47 * width, y = 1 - bottom - height + ({row} + 0.5) / 47 * height;
        const scroll = {MAP}.querySelector(".scroll");
        scroll.scrollLeft = x * image.clientWidth - 200;
        scrollBy(0, image.getBoundingClientRect().top + y * image.clientHeight - 450);
        const box = image.getBoundingClientRect();
        return [box.left + x * box.width, box.top + y * box.height];
        }})()"""
    )


def expected(page: pathlib.Path, row: int, column: int, kind: str = "map") -> str:
    """What is to be read out of a cell of head 0.1: its tokens and its number, by analysis.json."""
    found = json.loads(page.with_name("analysis.json").read_text())
    (head,) = (
        head
        for head in found["shown"]
        if (head["layer"], head["head"], head["why"]) == (0, 1, "asked for")
    )
    tokens = [
        f"{i} {name}"
        for i, name in zip(found["window"]["positions"], found["window"]["tokens"], strict=True)
    ]
    name = {"map": "weights", "logits": "logits"}[kind]
    return f"query {tokens[row]}, key {tokens[column]}: {head[kind][row][column]:.3g} ({name})"


@pytest.mark.parametrize("width", [1200, 390])
def test_a_map_names_every_token_and_reads_out_a_cell(pages, pictures, tab, width):
    page = pages["analysis"]
    tab.open(page, width)
    found = json.loads(page.with_name("analysis.json").read_text())["window"]
    names = [f"{i} {name}" for i, name in zip(found["positions"], found["tokens"], strict=True)]
    assert "21 ' '" in names and "43 '\\n'" in names and len(names) == 47
    (picture, *_) = [picture for picture in pictures if picture.name == "head_0_1"]
    labels = browser.measure_labels(picture)["texts"]
    assert [labels.count(name) for name in names] == [4] * 47, "rows and columns of two maps"
    tab.move(*cell(tab, 30, 11))
    assert tab.ask(READ) == expected(page, 30, 11) and "query 49 '" in expected(page, 30, 11)
    box = tab.ask(
        f"(({{left, top, bottom}}) => [left, top, bottom])({MAP}.querySelector('output').getBoundingClientRect())"
    )
    assert box[0] >= 0 and 0 <= box[1] < box[2] <= 900, "in view wherever the page is"
    tab.move(*cell(tab, 11, 30))
    assert tab.ask(READ) == expected(page, 30, 11), "nothing is there, of a later token"
    tab.tap(*cell(tab, 46, 0, number=1))
    assert tab.ask(READ) == expected(page, 46, 0, "logits")
    assert tab.errors == []


def test_arrow_keys_move_over_the_cells_of_all_maps(pages, tab):
    page = pages["analysis"]
    tab.open(page, 1200)
    tab.ask(f"{MAP}.querySelector('.scroll').focus()")
    walk = {"ArrowRight": (0, 0), "ArrowDown": (1, 0), "ArrowUp": (0, 0), "ArrowLeft": (0, 0)}
    for key, at in walk.items():
        tab.press(key)
        assert tab.ask(READ) == expected(page, *at), key
    tab.press("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight")
    assert tab.ask(READ) == expected(page, 2, 2)
    tab.press("ArrowUp")
    assert tab.ask(READ) == expected(page, 2, 2), "nothing above the diagonal"
    tab.press("ArrowRight")
    assert tab.ask(READ) == expected(page, 2, 0, "logits")
    tab.press("ArrowLeft")
    assert tab.ask(READ) == expected(page, 2, 2)
    live = f"{MAP}.querySelector('output')"
    assert tab.ask(f"{live}.localName") == "output"  # a live region by its role, status
    inside = f"(r => r.top >= 0 && r.bottom <= innerHeight)({MAP}.querySelector('i').getBoundingClientRect())"
    tab.press("ArrowRight", *["ArrowDown"] * 44)
    assert tab.ask(READ) == expected(page, 46, 0, "logits") and tab.ask(inside), "the page follows"


@pytest.mark.parametrize("width", [1200, 390])
def test_a_head_has_an_address_and_links_to_all_that_is_of_it(pages, tab, width):
    page = pages["analysis"]
    for head in ("0.3", "1.2"):
        tab.open(page, width, "dark", f"#head-{head}")
        row = "document.querySelector(':target')"
        name, text = tab.ask(f"[{row}.id, {row}.cells[0].textContent.trim()]")
        outline, top = tab.ask(
            f"[getComputedStyle({row}).outlineStyle, {row}.getBoundingClientRect().top]"
        )
        assert (name, text, outline) == (f"head-{head}", head, "solid") and 0 <= top < 900
        assert tab.ask("scrollY") > 900
    links = '[...document.querySelectorAll(\'a[href*="1.2"], a[href*="1_2"]\')]'
    reached = set()
    for number in range(tab.ask(f"{links}.length")):
        target = tab.ask(f"(link => (link.click(), link.hash))({links}[{number}])")
        top = tab.ask("document.querySelector(':target').getBoundingClientRect().top")
        assert tab.ask("document.querySelector(':target').id") == target[1:] and -1 <= top < 900
        reached.add(target)
    assert reached == {"#head-1.2", "#logits-1.2", "#head_1_2", "#norms_1_2"}
    assert tab.errors == []


def test_a_head_in_a_closed_table_is_opened(pages, tab, tmp_path):
    page = tmp_path / "index.html"
    text = pages["analysis"].read_text()
    page.write_text(
        text.replace(
            '<p class="soft" id="every',
            '<details><summary>All</summary><p class="soft" id="every',
            1,
        )
    )
    tab.open(page, 1200, target="#head-0.3")
    assert (
        tab.ask("document.querySelector('details').open && document.querySelector(':target').id")
        == "head-0.3"
    )


@pytest.mark.parametrize("kind", ["sweep", "comparison", "analysis"])
def test_all_that_can_be_used_is_reached_by_keyboard_and_seen(pages, tab, kind):
    tab.open(pages[kind], 390, "dark")
    count = tab.ask("document.querySelectorAll('a[href], summary, .scroll').length")
    count -= tab.ask(
        "document.querySelectorAll('details:not([open]) > :not(summary):is(a[href], .scroll)').length"
    )
    seen = set()
    focused = """(e => [[...document.querySelectorAll("*")].indexOf(e), getComputedStyle(e).outlineStyle,
        parseFloat(getComputedStyle(e).outlineWidth)])(document.activeElement)"""
    for _ in range(count):
        tab.press("Tab")
        element, style, width = tab.ask(focused)
        assert style == "solid" and width >= 2
        seen.add(element)
    assert len(seen) == count > 5


def test_no_other_script_runs(pages, tab, tmp_path):
    page = tmp_path / "index.html"
    text = pages["analysis"].read_text()
    planted = "<img src='data:,' onerror='document.title = 1'><script>document.title = 2</script>"
    page.write_text(
        text.replace("<main>", f"<main>{planted}").replace("let at = null", "let at =  null")
    )
    tab.open(page, 1200)
    assert tab.ask("document.title").startswith("What the heads do")
    assert tab.ask("document.querySelector('output')") is None, "nor one that was changed"
    assert sum("Content Security Policy" in error for error in tab.errors) == 3


def test_the_look_finds_what_is_cut_off(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<!DOCTYPE html><body style='background: #fff'><p style='width: 900px'>too wide</p>"
        "<div class='scroll' style='overflow: auto'><div style='width: 700px'>wide</div></div>"
        "<p style='color: #888'>one</p><i id='x'></i><i id='x'></i>"
        "<a href='none.html'>a</a><script>console.error('no')</script>"
    )
    found = browser.look(page, tmp_path, 400, "light")
    assert found["wider"] > 400 and found["cut"] == ["too wide"] and found["scrolled"] == ["wide"]
    assert found["links"] == ["none.html"] and found["repeated"] == ["x"]
    assert found["faint"] == ["one 3.54"] and len(found["errors"]) == 1


def test_labels_that_leave_a_picture_or_overlap_are_found():
    def draw(figure) -> None:
        figure.text(0.9, 0.5, "leaves the picture")
        figure.text(0.1, 0.2, "one")
        figure.text(0.11, 0.22, "two", size="small")

    found = browser.measure_labels(Picture("", "", "", "", draw, (4, 2)))
    assert found["smallest"] < 10 and found["outside"] == ["leaves the picture"]
    assert found["overlapping"] == ["one | two"]
