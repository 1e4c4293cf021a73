"""Python's own English documentation, about 2 MB, which every Python installation has.

It is the language reference (pydoc's topics) and, module by module, the docstrings of the standard library.
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
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "idle_test",
}


def python_docs() -> Source:
    """Returns the documentation of this Python as a source of one chunk."""
    root, files = pathlib.Path(sysconfig.get_paths()["stdlib"]), []
    for folder, folders, names in os.walk(root):
        folders[:] = (
            set(folders) - _EXCLUDED
        )  # site-packages may hold 50,000 files, which would take a second
        files += [pathlib.Path(folder, name) for name in names if name.endswith(".py")]
    files.sort()
    listing = [(p.relative_to(root).as_posix(), p.stat().st_size) for p in files]
    digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    identity = {"dataset": "python_docs", "python": platform.python_version(), "files": digest}
    return Source(
        "python_docs",
        identity,
        (Chunk("python_docs", 2_100_000, functools.partial(_read, tuple(files))),),
    )


def _read(files: tuple[pathlib.Path, ...]) -> Iterator[Document]:
    from pydoc_data.topics import topics

    for _, text in sorted(topics.items()):
        yield Document(text.encode())
    for file in files:
        if text := "\n\n".join(_docstrings(file)):
            yield Document(text.encode())


def _docstrings(file: pathlib.Path) -> list[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # a few files of the library are not meant to be compiled
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (
        ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)
    )
    return [text for text in docstrings if text]
