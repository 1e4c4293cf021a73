"""Finds the source that `config.data.dataset` names. To add one: a file beside this one, and a line in `find_source`.

prope/data/README.md lists them. synthetic/TASK and longcontext/TASK have no documents: prope/data/tasks
generates their windows.
"""

from etils import epath
from ml_collections import ConfigDict

from prope.config import is_generated
from prope.data.sources.base import MissingText, Source, TextRule
from prope.data.sources.files import files
from prope.data.sources.python_docs import python_docs
from prope.data.sources.tfds import download_hint, tfds_source
from prope.errors import UsageError
from prope.runtime.files import is_url, retry_reads


def find_source(data: ConfigDict) -> Source:
    """Returns the source that `config.data` names; where it is missing, a UsageError says how to download it."""
    if data.dataset == "python_docs":
        return python_docs()
    if is_generated(data.dataset):
        raise UsageError(
            f"config.data.dataset={data.dataset}: is generated while it is read, and has no text"
        )
    folder, rule = (
        epath.Path(data.data_dir),
        TextRule(data.text_feature, data.template, data.loss_on),
    )

    def find() -> Source:
        if not data.data_dir or not (any(folder.iterdir()) if is_url(folder) else folder.is_dir()):
            raise FileNotFoundError
        if data.dataset == "files":
            return files(folder, rule)
        return tfds_source(data.dataset, folder, rule)

    try:
        return retry_reads(folder, find)
    except FileNotFoundError:
        hint = (
            ""
            if data.dataset == "files" and not is_url(folder)
            else download_hint(data.dataset, folder)
        )
        raise MissingText(
            f"config.data.data_dir={data.data_dir}: there is no such folder{hint}"
        ) from None


def weighted_sources(data: ConfigDict) -> list[tuple[float, ConfigDict]]:
    """Lists the sources of a `config.data`: (weight, a `config.data` of that source); the weights sum to 1."""
    if data.dataset != "mixture":
        return [(1.0, data)]
    total, sources = sum(entry["weight"] for entry in data.mixture), []
    for entry in data.mixture:
        source = data.copy_and_resolve_references()
        source.update({"mixture": (), "data_dir": "", "store": ""})
        source.update({name: value for name, value in entry.items() if name != "weight"})
        sources.append((entry["weight"] / total, source))
    return sources
