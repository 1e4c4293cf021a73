"""Finds the source that `config.data.dataset` names.

To add one: a file beside this one, a line in `find_source`, and its name in prope/spec/data.py.
prope/data/README.md lists them.
synthetic/TASK and longcontext/TASK have no documents: prope/data/tasks generates their windows.
"""

from prope.data.sources.base import Source, TextRule
from prope.data.sources.files import files
from prope.data.sources.python_library import python_docs, python_source
from prope.data.sources.remote import hub_folder, is_hub
from prope.data.sources.tfds import download_hint, tfds_source
from prope.data.sources.user_function import user_documents
from prope.errors import usage_error
from prope.runtime.files import as_path, is_url, local_cache, retry_reads
from prope.spec.data import DataSpec, is_generated
from prope.user_code import is_user_code


def find_source(data: DataSpec) -> Source:
    """Returns the source that `config.data` names.

    Raises UsageError where it is missing, which says how to download it.
    """
    embedded = {"python_docs": python_docs, "python_source": python_source}
    if data.dataset in embedded:
        return embedded[data.dataset]()
    if is_user_code(data.dataset):
        return user_documents(data.dataset)
    if is_generated(data.dataset):
        problem = "is generated while it is read, and has no text"
        raise usage_error("config.data.dataset", data.dataset, problem)
    folder = as_path("config.data.data_dir", data.data_dir or ".")
    cache = data.cache_dir or str(local_cache())
    rule = TextRule(data.text_feature, data.template, data.loss_on, data.separator)

    def find() -> Source:
        if is_hub(folder):
            with hub_folder(folder) as commit:
                return files(commit, rule, data.pattern, cache)
        is_there = any(folder.iterdir()) if is_url(folder) else folder.is_dir()
        if not data.data_dir or not is_there:
            raise FileNotFoundError
        if data.dataset == "files":
            return files(folder, rule, data.pattern, cache)
        return tfds_source(data.dataset, folder, rule)

    try:
        return retry_reads(folder, find)
    except FileNotFoundError:
        is_local_text = data.dataset == "files" and not is_url(folder)
        hint = "" if is_local_text else download_hint(data.dataset, folder)
        problem = f"there is no such folder{hint}"
        if folder.is_file():
            problem = f"is a file; give the folder that holds it, {folder.parent}"
        raise usage_error("config.data.data_dir", data.data_dir, problem) from None
