"""Stage 1: where text comes from. Every source gives UTF-8 documents in a fixed order, and says what it is.

python_docs  the documentation in Python's own standard library: on every machine, about 2 MB
files        a folder of .txt (a document each) and .jsonl (a document per line), compressed by gzip or not
NAME         a TFDS dataset such as wikipedia/20230601.en, prepared as ArrayRecord or as TFRecord, read without
             TensorFlow, Beam or a network
mixture      several of these by weight, each with a store of its own

synthetic/TASK is none of them: its windows are generated, in synthetic.py.
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

from ml_collections import ConfigDict

from prope.data.sources.base import Document, Part, Source, TextRule
from prope.data.sources.files import files
from prope.data.sources.tfds import how_to_bring, tfds_source
from prope.errors import UsageError


def find_source(config: ConfigDict) -> Source:
    """The source that a run's `config.data` names.

    Raises:
      UsageError: it is not there, or half there; the message says how to bring it.
    """
    if config.dataset == "python_docs":
        return _python_docs()
    if config.dataset.startswith("synthetic/"):
        raise UsageError(f"config.data.dataset={config.dataset}: is generated while it is read, and has no text")
    data_dir, rule = pathlib.Path(config.data_dir), TextRule.of(config)
    if not data_dir.is_dir():
        bring = "" if config.dataset == "files" else how_to_bring(config.dataset, config.data_dir)
        raise UsageError(f"config.data.data_dir={config.data_dir}: there is no such folder{bring}")
    if config.dataset == "files":
        return files(data_dir, rule, local_cache() / "hashes.json")
    return tfds_source(config.dataset, data_dir, rule)


def weighted(config: ConfigDict) -> list[tuple[float, ConfigDict]]:
    """The sources of a run's `config.data`, each with its share and a `config.data` of its own; shares sum to 1."""
    if config.dataset != "mixture":
        return [(1.0, config)]
    total, found = sum(entry["weight"] for entry in config.mixture), []
    for entry in config.mixture:
        own = config.copy_and_resolve_references()
        own.update({"mixture": (), "data_dir": ""})
        own.update({name: value for name, value in entry.items() if name != "weight"})
        found.append((entry["weight"] / total, own))
    return found


def local_cache() -> pathlib.Path:
    """The folder for what prope keeps between runs on this machine."""
    return pathlib.Path(os.environ.get("PROPE_CACHE") or pathlib.Path.home() / ".cache" / "prope")


_NOT_DOCUMENTATION = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "idle_test",
}


def _python_docs() -> Source:
    """The language reference (pydoc's topics) and, module by module, the docstrings of the standard library."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    found = [p for p in sorted(root.rglob("*.py")) if not _NOT_DOCUMENTATION & set(p.relative_to(root).parts)]
    listing = [(p.relative_to(root).as_posix(), p.stat().st_size) for p in found]
    digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    identity = {"dataset": "python_docs", "python": platform.python_version(), "files": digest}
    part = Part("python_docs", 2_100_000, functools.partial(_read_python_docs, tuple(found)))
    return Source("python_docs", identity, (part,))


def _read_python_docs(found: tuple[pathlib.Path, ...]) -> Iterator[Document]:
    from pydoc_data.topics import topics

    for _, text in sorted(topics.items()):
        yield Document(text.encode())
    for file in found:
        text = "\n\n".join(_docstrings(file))
        if text:
            yield Document(text.encode())


def _docstrings(file: pathlib.Path) -> list[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # a few files of the library are not meant to be compiled
        return []
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, owners)]
    return [text for text in found if text]
