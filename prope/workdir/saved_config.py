"""A config file that reads the config.json of a run: --config=W/config.json names it."""

from etils import epath
from ml_collections import ConfigDict

from prope.errors import UsageError
from prope.workdir.run import read_config_file


def get_config(path: str) -> ConfigDict:
    """Returns the config that a run has saved."""
    config = read_config_file(epath.Path(path))
    if config is None:
        raise UsageError(f"--config={path}: there is no such file")
    return config
