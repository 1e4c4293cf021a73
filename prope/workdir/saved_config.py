"""A config file that reads the config.json of a run: --config=W/config.json names it."""

from ml_collections import ConfigDict

from prope.config import to_config
from prope.errors import UsageError
from prope.runtime.files import as_path
from prope.workdir.run import read_config, read_config_file


def get_config(path: str) -> ConfigDict:
    """Returns the config that a run has saved."""
    file = as_path("--config", path)
    # As a run it also finds a tokenizer that lies beside.
    spec = read_config(file.parent) if file.name == "config.json" else read_config_file(file)
    if spec is None:
        raise UsageError(f"--config={path}: there is no such file")
    return to_config(spec)
