"""The shape of the house: what may import what, and which files stand where."""

import ast
import pathlib
import sys

import pytest
from support.commands import ROOT

PACKAGE = ROOT / "prope"
COMMANDS = ["train", "evaluate", "ask", "sample", "analyze", "choose", "report", "plan", "bench"]
COMMANDS += ["export_hf", "export_gguf", "import_hf", "check_port"]
# Rooms (a folder, or a file at the top of prope/), low to high.
# Each imports only from lines above its own.
LAYERS = [
    ["errors", "rope"],
    ["user_code"],
    ["encodings"],
    ["spec"],
    ["parameters"],
    ["scan", "sharding"],
    ["kernels"],
    ["attention", "loss"],
    ["model"],
    ["optimizer"],
    ["step"],
    ["runtime"],
    ["config"],
    ["command"],
    ["data", "golden", "workdir"],
    ["inference"],
    ["cost"],
    ["sweep"],
    ["pages"],
    ["hf", "analysis"],
    COMMANDS,
    ["__init__", "__main__"],
]
LEVELS = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

Imports = dict[str, set[str]]  # module, by its name within the package: what it imports


def module_name(file: pathlib.Path) -> str:
    """data/store/build.py: "data.store.build"; a folder's __init__.py: the folder."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@pytest.fixture(scope="module")
def imports() -> Imports:
    """What every module imports, in functions too; modules of prope as "prope.x"."""
    modules = {module_name(file): file for file in PACKAGE.rglob("*.py")}
    imports: Imports = {}
    for name, file in modules.items():
        found = imports[name] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: imports are absolute"
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    is_module = submodule.removeprefix("prope.") in modules
                    found.add(submodule if is_module else node.module)
    return imports


@pytest.fixture
def edges(imports) -> Imports:
    """The imports between modules of prope; the package itself is "__init__"."""
    inside = {
        name: {other.removeprefix("prope").lstrip(".") or "__init__" for other in others}
        for name, others in (
            (name, {other for other in others if other.split(".")[0] == "prope"})
            for name, others in imports.items()
        )
    }
    assert len(inside) > 60 and sum(map(len, inside.values())) > 200
    return inside


def room(name: str) -> str:
    return name.split(".")[0]


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


def libraries(imports: Imports, name: str) -> set[str]:
    return {other.split(".")[0] for other in imports[name]} - sys.stdlib_module_names


def test_no_module_imports_itself_by_way_of_others(edges):
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_circle(edges) == []


def test_every_room_imports_only_from_below(edges):
    assert {room(name) for name in edges} == set(LEVELS), "LAYERS has other rooms"
    upward = [
        f"{name} imports {other}"
        for name, others in edges.items()
        for other in sorted(others)
        if room(name) != room(other) and LEVELS[room(other)] >= LEVELS[room(name)]
    ]
    assert upward == []


def test_flax_is_imported_by_the_model_only(imports):
    assert [name for name in imports if "flax" in libraries(imports, name)] == ["model"]


def test_configs_of_ml_collections_end_at_the_door(imports):
    """All other code takes the specs that are made of them."""
    doors = {
        "config",
        "command",
        "import_hf",
        "train",
        "sweep.execute",
        "sweep.grid",
        "workdir.saved_config",
    }
    assert {name for name in imports if "ml_collections" in libraries(imports, name)} == doors


def test_rope_imports_jax_and_numpy_only(imports):
    assert libraries(imports, "rope") == {"jax", "numpy"}


def test_oracles_are_independent_of_the_code_under_test():
    nodes = list(ast.walk(ast.parse((ROOT / "tests/oracles.py").read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert names == {"math", "numpy"}


def test_folders_are_explained_on_a_page():
    for top in ("configs", "launch", "prope", "tests"):
        for folder in (ROOT / top, *(path for path in (ROOT / top).rglob("*") if path.is_dir())):
            names = {path.name for path in folder.iterdir() if path.is_file()} - {"__init__.py"}
            names = {name for name in names if not name.startswith("test_")}
            explained = "README.md" in names or folder.name in ("__pycache__", "figures")
            assert len(names) <= 5 or explained, f"{folder}: {len(names)} files and no README.md"
