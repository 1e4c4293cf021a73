"""Text that every Python installation has: the documentation and the files of its library.

`python_docs` is the language reference (pydoc's topics) and, module by module, the docstrings of
the library, about 2 MB of English. `python_source` is the library's own long files, about 3.5 MB,
each of which is a document: it uses names thousands of bytes after their definition.
"""

import ast
import functools
import hashlib
import json
import os
import pathlib
import platform
import sysconfig
from collections.abc import Callable, Iterator

from etils import epath

from prope.data.sources.base import Chunk, Document, Source, check_utf8, log_once
from prope.runtime.files import hash_file

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
_SHORTEST = 50_000  # bytes of a file of python_source
_LONGEST = 200_000

_Files = dict[str, pathlib.Path]  # by their paths in the library, sorted


def python_docs() -> Source:
    """Returns the documentation of this Python as a source of one chunk."""
    files = _list_library(_EXCLUDED)
    sizes = [path.stat().st_size for path in files.values()]
    return _make_source("python_docs", files, sizes, 2_100_000, _read_docs)


def python_source() -> Source:
    """Returns the library's files of 50 to 200 KB as a source of one chunk.

    Those that the build of Python generates differ by machine.
    """
    files = _list_library(_EXCLUDED | {"tkinter"})  # which is not in every installation
    taken = {
        name: path
        for name, path in files.items()
        if _SHORTEST <= path.stat().st_size <= _LONGEST and "_sysconfigdata" not in name
    }
    left_out = len(files) - len(taken)
    log_once(f"data: python_source: {len(taken)} files of 50 to 200 KB, {left_out} left out")
    hashes = [hash_file(epath.Path(path)) for path in taken.values()]
    num_bytes = sum(path.stat().st_size for path in taken.values())
    return _make_source("python_source", taken, hashes, num_bytes, _read_source)


def _list_library(excluded: set[str]) -> _Files:
    """Lists the .py files of the standard library outside folders of these names."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - excluded
        paths += [pathlib.Path(folder, name) for name in names if name.endswith(".py")]
    return {path.relative_to(root).as_posix(): path for path in sorted(paths)}


def _make_source(
    name: str,
    files: _Files,
    stamps: list,
    num_bytes: int,
    read: Callable[[_Files], Iterator[Document]],
) -> Source:
    """Makes the source of files that `stamps` identify: sizes or hashes."""
    listing = list(zip(files, stamps, strict=True))
    digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    identity = {"dataset": name, "python": platform.python_version(), "files": digest}
    chunk = Chunk(name, num_bytes, functools.partial(read, files))
    return Source(name, identity, (chunk,))


def _read_docs(files: _Files) -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(topics[name].encode())
    for file in files.values():
        text = "\n\n".join(_docstrings(file))
        if text:
            yield Document(text.encode())


def _docstrings(file: pathlib.Path) -> list[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # a few files of the library are not meant to be compiled
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    return list(filter(None, map(ast.get_docstring, nodes)))


def _read_source(files: _Files) -> Iterator[Document]:
    for name, path in files.items():
        yield Document(check_utf8(path.read_bytes()), split_by=name.encode())
