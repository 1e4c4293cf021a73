"""Which implementation of attention a device can run, and why; the precision of matmuls."""

import contextlib

import jax


def choose_implementation(
    requested: str, device, T: int, H: int, dtype: str, segmented: bool, heads_divide: bool = True
) -> tuple[str, str]:
    """Returns the implementation for a device, and the reason: "auto" takes the fastest that can run.

    Args:
      requested: "auto", "xla", "splash" or "cudnn".
      device: a `jax.Device`, or any object with its `platform` and, for a GPU, its `compute_capability`.
      T: length of the queries and keys.
      H: head_dim.
      dtype: of the queries, by name.
      segmented: whether `segment_ids` are passed.
      heads_divide: whether mesh.context divides the heads of a device, those of the keys too unless that is one.

    Raises:
      ValueError: the requested implementation cannot run there; names every obstacle.
    """
    obstacles = {"xla": [], "splash": [], "cudnn": []}

    def require(name: str, holds: bool, obstacle: str) -> None:
        if not holds:
            obstacles[name].append(obstacle)

    version = str(getattr(device, "compute_capability", "")).split(".")
    capability = (
        tuple(map(int, version)) if all(map(str.isdecimal, version)) else (0, 0)
    )  # AMD's is a name
    gpu = device.platform in ("gpu", "cuda")
    max_head_dim = 256 if capability >= (9, 0) else 128
    require(
        "splash", device.platform == "tpu", f"it is a TPU kernel, and this is a {device.platform}"
    )
    require("splash", T % 128 == 0, f"the sequence length must be a multiple of 128; got {T}")
    require("splash", H % 128 == 0, f"head_dim must be a multiple of 128; got {H}")
    require("cudnn", gpu, f"it is an NVIDIA kernel, and this is a {device.platform}")
    require("cudnn", capability >= (8, 0) or not gpu, "it needs an Ampere GPU or a later one")
    fits = max_head_dim >= H and H % 8 == 0
    require("cudnn", fits, f"head_dim must be a multiple of 8 up to {max_head_dim}; got {H}")
    require("cudnn", dtype == "bfloat16", f"dtype must be bfloat16; got {dtype}")
    require(
        "cudnn",
        not segmented,
        "it needs a dense mask to keep documents apart (data.mask_documents)",
    )
    require(
        "cudnn",
        heads_divide,
        "mesh.context must divide a device's heads, and its key/value heads unless there is one",
    )
    refusals = {
        name: f"{name} cannot be used: {'; '.join(found)}"
        for name, found in obstacles.items()
        if found
    }
    if requested != "auto":
        if requested in refusals:
            raise ValueError(f"attention={refusals[requested]}; take auto or xla")
        return requested, "as asked"
    native = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}.get(device.platform)
    if native is None:
        return "xla", f"there is no kernel for a {device.platform}"
    return (
        ("xla", refusals[native])
        if native in refusals
        else (native, f"the fastest on a {device.platform}")
    )


def matmul_precision(dtype: str) -> contextlib.AbstractContextManager:
    """Makes matmuls of a float32 model, traced within this context, float32 on every device.

    By default a TPU rounds to bfloat16 and an NVIDIA GPU to TF32. Matmuls of a bfloat16 model stay as they are.
    """
    return (
        jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()
    )
