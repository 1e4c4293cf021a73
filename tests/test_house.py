"""The shape of the house: what may import what, which files stand where, how dense they are."""

import ast
import dataclasses
import io
import pathlib
import re
import sys
import tokenize

import pytest
from conftest import ROOT

PACKAGE = ROOT / "prope"
TOPS = ("configs", "launch", "prope", "tests")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

# Rooms (a folder, or a file at the top of prope/), low to high.
# Each imports only from lines above its own.
LAYERS = [
    ["errors", "rope", "stack"],
    ["encodings"],
    ["config"],
    ["sharding"],
    ["kernels"],
    ["attention", "loss"],
    ["model"],
    ["optimizer"],
    ["step"],
    ["runtime"],
    ["command"],
    ["data", "golden", "html", "workdir"],
    ["inference"],
    ["cost"],
    ["hf", "analysis", "sweep"],
    [
        "train",
        "evaluate",
        "ask",
        "sample",
        "analyze",
        "report",
        "plan",
        "bench",
        "export_hf",
        "import_hf",
        "check_port",
    ],
    ["__init__", "__main__"],
]
LEVELS = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FOLDERS = {
    "analysis",
    "cost",
    "data",
    "golden",
    "hf",
    "html",
    "inference",
    "kernels",
    "runtime",
    "stack",
    "sweep",
    "workdir",
}

Imports = dict[str, set[str]]  # module, by its name within the package: what it imports


def module_name(file: pathlib.Path, package: pathlib.Path) -> str:
    """data/store/build.py: "data.store.build"; a folder's __init__.py: the folder."""
    return ".".join(file.relative_to(package).with_suffix("").parts).removesuffix(".__init__")


def read_imports(package: pathlib.Path) -> Imports:
    """Reads what every module imports, in functions too; modules of prope as "prope.x"."""
    modules = {module_name(file, package): file for file in package.rglob("*.py")}
    imports: Imports = {}
    for name, file in modules.items():
        imports[name] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imports[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: imports are absolute"
                within = f"{node.module}.".removeprefix("prope.") if node.module != "prope" else ""
                for alias in node.names:
                    submodule = f"{within}{alias.name}"
                    of_prope = node.module.split(".")[0] == "prope"
                    imports[name].add(
                        f"prope.{submodule}" if of_prope and submodule in modules else node.module
                    )
    return imports


def own(imports: Imports) -> Imports:
    """The edges between modules of prope; the package itself is "__init__"."""
    return {
        name: {
            found.removeprefix("prope").lstrip(".") or "__init__"
            for found in others
            if (found + ".")[:6] == "prope."
        }
        for name, others in imports.items()
    }


def room(name: str) -> str:
    return name.split(".")[0]


def between_rooms(edges: Imports) -> Imports:
    rooms: Imports = {}
    for name, others in edges.items():
        rooms.setdefault(room(name), set()).update(
            room(other) for other in others if room(other) != room(name)
        )
    return rooms


def find_circle(edges: Imports) -> list[str]:
    """The names along a circle, [] where there is none."""
    clear: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in clear:
            for other in sorted(edges.get(name, ())):
                if circle := visit(other, [*path, name]):
                    return circle
            clear.add(name)
        return []

    return next(filter(None, (visit(name, []) for name in sorted(edges))), [])


def upward(edges: Imports) -> list[str]:
    """Imports of a room from one that does not stand below it."""
    return [
        f"{name} imports {other}"
        for name, others in edges.items()
        for other in sorted(others)
        if room(name) != room(other) and LEVELS[room(other)] >= LEVELS[room(name)]
    ]


def users(imports: Imports, library: str) -> set[str]:
    """The modules that import a library."""
    return {
        name
        for name, others in imports.items()
        if any(other.split(".")[0] == library for other in others)
    }


@pytest.fixture(scope="module")
def imports() -> Imports:
    return read_imports(PACKAGE)


def test_no_module_and_no_room_imports_itself_by_way_of_others(imports):
    edges = own(imports)
    assert len(edges) > 60 and sum(map(len, edges.values())) > 200
    assert find_circle(edges) == []
    assert find_circle(between_rooms(edges)) == []


def test_every_room_imports_only_from_below(imports):
    assert {room(name) for name in imports} == set(LEVELS), (
        "a room that LAYERS does not have, or the other way round"
    )
    assert upward(own(imports)) == []


def test_flax_is_imported_by_the_model_only(imports):
    assert users(imports, "flax") == {"model"}


def test_rope_imports_jax_and_numpy_only(imports):
    libraries = {other.split(".")[0] for other in imports["rope"]} - sys.stdlib_module_names
    assert libraries == {"jax", "numpy"}


def test_what_stands_at_the_top():
    files = {file.stem for file in PACKAGE.glob("*.py")}
    folders = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()}
    assert files == set(LEVELS) - FOLDERS and folders == FOLDERS
    assert len(files) <= 24


def test_a_page_of_a_config_fits_fifteen_lines():
    pages = sorted((ROOT / "configs").glob("*.py"))
    assert len(pages) > 20
    docstrings = {page.name: ast.get_docstring(ast.parse(page.read_text())) for page in pages}
    lengths = {name: len(text.splitlines()) for name, text in docstrings.items()}
    assert {name: length for name, length in lengths.items() if length > 15} == {}


def lines(file: pathlib.Path) -> int:
    return len(file.read_text().splitlines())


@dataclasses.dataclass(frozen=True)
class Density:
    """How much a reader has to take in, in a way that packing lines does not change."""

    tokens: int  # without comments, docstrings and line ends
    code_lines: int  # with at least one token
    long_lines: int  # over 100 columns
    packed: int  # tuple assignments `a, b = x, y` that are no swaps, and walruses
    lines: int
    largest: int  # syntax nodes of the largest function

    @property
    def per_line(self) -> float:
        return self.tokens / max(self.code_lines, 1)


def docstring_lines(tree: ast.AST) -> set[int]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            found |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def is_packed(node: ast.AST) -> bool:
    if isinstance(node, ast.NamedExpr):
        return True
    if not isinstance(node, ast.Assign):
        return False
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    names = {ast.dump(element).replace("Store()", "Load()") for element in target.elts}
    values = {ast.dump(element) for element in node.value.elts}
    return names != values  # a swap is one thought


def measure(text: str) -> Density:
    tree = ast.parse(text)
    documentation = docstring_lines(tree)
    tokens = 0
    code = set()
    depth = 0  # of f-strings, which Python 3.12 and later cut into tokens: each counts as one
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        depth -= kind == "FSTRING_END"
        is_within = depth > 0 or kind == "FSTRING_END"
        depth += kind == "FSTRING_START"
        is_docstring = token.type == tokenize.STRING and token.start[0] in documentation
        if token.type in NOT_CODE or is_docstring:
            continue
        tokens += not is_within
        code |= set(range(token.start[0], token.end[0] + 1))
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    text_lines = text.splitlines()
    return Density(
        tokens=tokens,
        code_lines=len(code),
        long_lines=sum(len(line) > 100 for line in text_lines),
        packed=sum(map(is_packed, nodes)),
        lines=len(text_lines),
        largest=max((sum(1 for _ in ast.walk(node)) for node in functions), default=0),
    )


def too_dense(density: Density) -> list[str]:
    """What of a file is more than a reader takes in at one look."""
    return [
        *([f"{density.per_line:.1f} tokens a line"] if density.per_line > 9.5 else []),
        *([f"{density.long_lines} lines over 100 columns"] if density.long_lines else []),
        *([f"{density.packed} packed assignments"] if density.packed > density.lines / 125 else []),
        *([f"a function of {density.largest} nodes"] if density.largest > 450 else []),
    ]


def test_every_line_is_one_thought():
    files = [file for top in TOPS for file in (ROOT / top).rglob("*.py")]
    dense = {str(file.relative_to(ROOT)): too_dense(measure(file.read_text())) for file in files}
    found = {name: problems for name, problems in dense.items() if problems}
    assert found == {}


def imported_tests(file: pathlib.Path) -> set[str]:
    """Other test files that one imports, also in code that it hands to a process."""
    names = re.findall(r"\b(?:from|import) (?:tests\.)?(test_\w+)", file.read_text())
    return set(names) - {file.stem}


def test_no_test_file_imports_another():
    files = list((ROOT / "tests").glob("test_*.py"))
    imported = {file.name: imported_tests(file) for file in files}
    assert {name: others for name, others in imported.items() if others} == {}
    for name in ("oracles", "makers"):
        assert not imported_tests(ROOT / "tests" / f"{name}.py")


def test_oracles_are_independent_of_the_code_under_test():
    tree = ast.parse((ROOT / "tests" / "oracles.py").read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module)
    assert names == {"math", "numpy"}


def test_folders_are_explained_on_a_page():
    for top in TOPS:
        folders = (path for path in (ROOT / top).rglob("*") if path.is_dir())
        for folder in (ROOT / top, *folders):
            names = {path.name for path in folder.iterdir() if path.is_file()} - {"__init__.py"}
            explained = "README.md" in names or folder.name in ("__pycache__", "figures")
            assert len(names) <= 5 or explained, f"{folder}: {len(names)} files and no README.md"


# --- These tests notice what they are for


def write_package(folder: pathlib.Path, files: dict[str, str]) -> Imports:
    for name, text in files.items():
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return read_imports(folder)


def test_imports_of_every_form_are_read(tmp_path):
    found = write_package(
        tmp_path,
        {
            "model": "import flax.linen as nn, prope.rope\n"
            "def f():\n    from prope.data import tokens\n",
            "rope": "from jax import numpy\nif False:\n    import prope\n",
            "errors": "from prope import rope",
            "data/__init__": "",
            "data/tokens": "from prope.errors import E\nfrom prope import apply_p_rope\n",
        },
    )
    assert found["model"] == {"flax.linen", "prope.rope", "prope.data.tokens"}
    assert found["rope"] == {"jax", "prope"} and found["data.tokens"] == {"prope.errors", "prope"}
    assert own(found) == {
        "model": {"rope", "data.tokens"},
        "rope": {"__init__"},
        "data": set(),
        "errors": {"rope"},
        "data.tokens": {"errors", "__init__"},
    }
    assert users(found, "flax") == {"model"} and users(found, "prope") == {
        "model",
        "rope",
        "errors",
        "data.tokens",
    }


@pytest.mark.parametrize("start", ["a", "b"])
def test_circles_are_found(start):
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}
    assert find_circle({name: edges[name] for name in sorted(edges, reverse=start == "b")}) == [
        "b",
        "d",
        "b",
    ]
    assert find_circle(edges | {"d": {"c"}}) == []
    rooms = between_rooms({"x.one": {"y.one"}, "x.two": set(), "y.one": set(), "y.two": {"x.two"}})
    assert find_circle(rooms) == ["x", "y", "x"]


def test_upward_imports_are_found():
    edges = {
        "rope": {"config"},
        "step": {"model", "errors"},
        "hf.writer": {"analysis.page", "hf.reader", "cost.hlo"},
    }
    assert upward(edges) == ["rope imports config", "hf.writer imports analysis.page"]


@pytest.mark.parametrize(
    "form", ["from {} import f", "import {}", 'code = "from tests.{} import *"']
)
def test_imports_between_tests_are_found(tmp_path, form):
    file = tmp_path / "test_one.py"
    lines = [form.format(name) for name in ("test_one", "test_two")]
    file.write_text("\n".join(lines))
    assert imported_tests(file) == {"test_two"}


def test_what_is_too_dense_is_found():
    assert too_dense(measure("x = 1\n" * 10)) == []
    assert too_dense(measure("x = f(a, b, c, d)\n")) == ["12.0 tokens a line"]
    assert too_dense(measure('"""One."""\nx = 1\n# ' + "y" * 100)) == ["1 lines over 100 columns"]
    assert too_dense(measure("a, b = b, a\na, b = 1, 2\n" + "x = 1\n" * 9)) == [
        "1 packed assignments"
    ]
    assert too_dense(measure("if (n := 1):\n    pass\n")) == ["1 packed assignments"]
    body = "    x = 1\n" * 112
    assert too_dense(measure(f"def f():\n{body}")) == []
    assert too_dense(measure(f"def f():\n{body}    return x\n")) == ["a function of 453 nodes"]
