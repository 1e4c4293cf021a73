"""Checkpoints in the format of Hugging Face."""

import json

import numpy as np


def stored(directory) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint in Hugging Face's format."""
    from safetensors.numpy import load_file

    return load_file(directory / "model.safetensors")


def save(directory, tensors) -> None:
    """Writes the tensors of a checkpoint in Hugging Face's format."""
    from safetensors.numpy import save_file

    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def edit(directory, **fields) -> None:
    """Changes fields of config.json; None removes one."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) | fields
    kept = {name: value for name, value in values.items() if value is not None}
    path.write_text(json.dumps(kept))
