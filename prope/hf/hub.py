"""Fetches a checkpoint by its name from the Hugging Face Hub.

huggingface_hub is imported only where no folder has that name. The token, the cache and settings
such as HF_HOME are the library's own.
"""

import importlib.util
import re

from etils import epath

from prope.errors import StorageFailed, first_line, log, usage_error
from prope.hf import config_json

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
# Without what other programs read: folders, and a second copy of the weights under another name.
_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "merges.txt", "chat_template.jinja"]


def find_checkpoint(source: epath.Path) -> epath.Path:
    """Returns the folder `source`, or that of the Hub's model of this name, which is fetched.

    Raises:
      UsageError: there is no such folder, and the Hub cannot be asked or does not give the model;
        or its config.json is refused, before the weights are fetched.
      StorageFailed: the download stopped before its end.
    """
    is_name = _NAME.fullmatch(str(source)) is not None
    if source.is_dir():
        if is_name:
            log.info("--input=%s: reading the folder of this name, not the Hub's model", source)
        return source
    if not is_name or source.exists():
        remedy = "a model on the Hub is named as google/gemma-3-270m"
        raise usage_error("--input", source, "no such directory", remedy)
    if importlib.util.find_spec("huggingface_hub") is None:
        remedy = "to fetch a model of this name: pip install 'huggingface-hub>=2'"
        raise usage_error("--input", source, "no such directory", remedy)
    config_json.from_hf(_download(str(source), ["config.json"]) / "config.json")
    return _download(str(source), _FILES)


def _download(name: str, files: list[str]) -> epath.Path:
    """Fetches what is not in the cache yet; returns the model's folder there."""
    from huggingface_hub import constants, errors, snapshot_download

    place = f"{constants.ENDPOINT}/{name}"
    try:
        return epath.Path(snapshot_download(name, allow_patterns=files, ignore_patterns=["*/*"]))
    except errors.LocalEntryNotFoundError:
        problem = f"the Hub cannot be reached, and {constants.HF_HUB_CACHE} has no whole copy"
        remedy = f"elsewhere: hf download {name} --local-dir=DIR, then here --input=DIR"
    except (errors.HFValidationError, errors.HTTPError, errors.XetDownloadError) as error:
        response = getattr(error, "response", None)
        is_refused = isinstance(error, errors.HFValidationError | errors.RepositoryNotFoundError)
        if not is_refused and (response is None or response.status_code not in (401, 403)):
            remedy = "run the same command again, which keeps whole files"
            raise StorageFailed(f"{place}: {first_line(error)}; {remedy}") from error
        problem = f"the Hub does not give {place} ({type(error).__name__})"
        remedy = "correct the name, or accept the model's terms there, then: hf auth login"
    raise usage_error("--input", name, f"no such directory, and {problem}", remedy)
