"""Which implementation of attention a device can run, and why; the precision of matmuls."""

import contextlib

import jax


def choose_implementation(
    requested: str,
    device,
    T: int,
    H: int,
    dtype: str,
    segmented: bool,
    fits_context: bool = True,
    capped: bool = False,
    sinks: int = 0,
) -> tuple[str, str]:
    """Returns the implementation for a device, and the reason: "auto" takes the fastest.

    Args:
      requested: "auto", "xla", "splash" or "cudnn".
      device: a `jax.Device`, or any object with its `platform` and, for a GPU, its
        `compute_capability`.
      T: length of the queries and keys.
      H: head_dim.
      dtype: of the queries, by name.
      segmented: whether `segment_ids` are passed.
      fits_context: whether mesh.context divides the heads of a device, those of the keys too unless
        there is only one, and is 1 where `segment_ids` are passed.
      capped: whether scores have a soft cap.
      sinks: first keys that are seen beside a window.

    Raises:
      ValueError: the requested implementation cannot run there; names every obstacle.
    """
    platform = device.platform
    on_gpu = platform == "gpu"
    capability = _compute_capability(device)
    max_head_dim = 256 if capability >= (9, 0) else 128
    divisor = "mesh.context must divide a device's heads, and its key/value heads unless it has one"
    if segmented:
        divisor = "mesh.context must be 1 where documents are kept apart (data.mask_documents)"
    requirements = {
        "xla": {},
        "splash": {
            f"it is a TPU kernel, and this is a {platform}": platform == "tpu",
            f"the sequence length must be a multiple of 128; got {T}": T % 128 == 0,
            f"head_dim must be a multiple of 128; got {H}": H % 128 == 0,
            "it has no mask for sinks": not sinks,
        },
        "cudnn": {
            f"it is an NVIDIA kernel, and this is a {platform}": on_gpu,
            "it needs an Ampere GPU or a later one": capability >= (8, 0) or not on_gpu,
            f"head_dim must be a multiple of 8 up to {max_head_dim}; got {H}": (
                max_head_dim >= H and H % 8 == 0
            ),
            f"dtype must be bfloat16; got {dtype}": dtype == "bfloat16",
            "it keeps documents apart from Hopper GPUs on (data.mask_documents)": (
                not segmented or capability >= (9, 0)
            ),
            "it has no soft cap on scores (model.attention_softcap)": not capped,
            divisor: fits_context,
            "it has no mask for sinks": not sinks,
        },
    }
    native = {"tpu": "splash", "gpu": "cudnn"}.get(platform)
    candidate = native if requested == "auto" else requested
    if candidate is None:
        return "xla", f"there is no kernel for a {platform}"
    obstacles = [text for text, holds in requirements[candidate].items() if not holds]
    refusal = f"{candidate} cannot be used: {'; '.join(obstacles)}"
    if requested != "auto":
        if obstacles:
            raise ValueError(f"attention={refusal}; take auto or xla")
        return requested, "as asked"
    if obstacles:
        return "xla", refusal
    if segmented and candidate == "cudnn":
        return "xla", "cudnn within documents is experimental; attention=cudnn takes it"
    return native, f"the fastest on a {platform}"


def _compute_capability(device) -> tuple[int, ...]:
    """Returns a GPU's compute capability as numbers; (0, 0) where it is a name, as AMD's."""
    version = str(getattr(device, "compute_capability", "")).split(".")
    if not all(map(str.isdecimal, version)):
        return (0, 0)
    return tuple(map(int, version))


def matmul_precision(dtype: str) -> contextlib.AbstractContextManager:
    """Makes matmuls of a float32 model, traced within this context, float32 on every device.

    By default a TPU rounds to bfloat16 and an NVIDIA GPU to TF32. Matmuls of a bfloat16 model stay
    as they are.
    """
    if dtype == "float32":
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()
