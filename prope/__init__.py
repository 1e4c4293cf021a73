"""p-RoPE: rotary position encodings whose slowest frequencies are left unrotated."""

__all__ = ["apply_p_rope"]


def __getattr__(name: str):
    # Imported on first use, so that the processes which only tokenise text never load JAX.
    if name == "apply_p_rope":
        from prope.rope import apply_p_rope

        return apply_p_rope
    raise AttributeError(f"module 'prope' has no attribute {name!r}")
