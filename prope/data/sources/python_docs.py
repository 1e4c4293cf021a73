"""Python's own English documentation, about 2 MB, which every Python installation has.

It is the language reference (pydoc's topics) and, module by module, the docstrings of the standard
library.
"""

import ast
import functools
import hashlib
import json
import os
import pathlib
import platform
import sysconfig
from collections.abc import Iterator

from prope.data.sources.base import Chunk, Document, Source

_EXCLUDED = {
    "site-packages",  # may hold 50,000 files, which would take a second
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "idle_test",
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_docs() -> Source:
    """Returns the documentation of this Python as a source of one chunk."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _EXCLUDED
        files += [pathlib.Path(folder, name) for name in names if name.endswith(".py")]
    files.sort()
    listing = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in files]
    digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    identity = {"dataset": "python_docs", "python": platform.python_version(), "files": digest}
    chunk = Chunk("python_docs", 2_100_000, functools.partial(_read, tuple(files)))
    return Source("python_docs", identity, (chunk,))


def _read(files: tuple[pathlib.Path, ...]) -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(topics[name].encode())
    for file in files:
        text = "\n\n".join(_docstrings(file))
        if text:
            yield Document(text.encode())


def _docstrings(file: pathlib.Path) -> list[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # a few files of the library are not meant to be compiled
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    docstrings = [ast.get_docstring(node) for node in nodes]
    return [text for text in docstrings if text]
