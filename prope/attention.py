"""Causal attention: one function, and the choice of what computes it.

Nothing here holds a T x S array of scores: they exist for one block of queries at a time, and only for the keys that
the block can see.

Axes: B batch, T query length, S key length, N query heads, K key/value heads, G = N / K, H head_dim.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from prope.sharding import shard_mapped

_MASKED_SCORE = float(jnp.finfo(jnp.float32).min)


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    first_query: Int[Array, " B"] | None = None,
    implementation: str = "auto",
) -> Float[Array, "B T N H"]:
    """softmax(query key^T / sqrt(H)) value, where a query sees the keys up to its own index.

    Every group of G = N / K query heads shares a key/value head: K = 1 is multi-query, K = N multi-head attention.

    Args:
      query: already rotated, not yet scaled.
      key: already rotated.
      value: what is averaged.
      segment_ids: where given, queries and keys of different segments do not see each other. Needs T = S.
      first_query: the index among the keys of each row's first query, where the keys come from a cache; by "xla".
      implementation: "xla", "splash" (TPU), "cudnn" (NVIDIA), or "auto": what `choose` finds for this machine. What is
        named is taken as it is: `choose` tells whether a device can.

    Returns:
      The averaged values, in value's dtype; scores and softmax are float32 whatever the inputs are.
    """
    if first_query is not None:
        return _cached(query, key, value, first_query)
    if implementation == "auto":
        T, _, H = query.shape[1:]
        implementation, _ = choose("auto", jax.devices()[0], T, H, query.dtype.name, segment_ids is not None)
    function = {"xla": _by_blocks, "splash": _splash, "cudnn": _cudnn}[implementation]
    arrays = [query, key, value] if segment_ids is None else [query, key, value, segment_ids]
    return shard_mapped(function, ["BTNH", "BSKH", "BSKH", "BS"][: len(arrays)])(*arrays)


def choose(asked: str, device, T: int, H: int, dtype: str, masked: bool) -> tuple[str, str]:
    """What computes attention on a device, of any platform, and why: "auto" takes the fastest that can.

    Args:
      asked: "auto", "xla", "splash" or "cudnn".
      device: a `jax.Device`, or anything with its `platform` and, for a GPU, its `compute_capability`.
      T: length of the queries and keys.
      H: head_dim.
      dtype: of the queries, by name.
      masked: whether segments are kept apart.

    Raises:
      ValueError: what was asked for cannot be; says what stands in its way.
    """
    obstacles = {"xla": [], "splash": [], "cudnn": []}

    def need(name: str, holds: bool, why: str) -> None:
        if not holds:
            obstacles[name].append(why)

    numbers = str(getattr(device, "compute_capability", "")).split(".")
    capability = tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else (0, 0)  # AMD's are names
    need("splash", device.platform == "tpu", f"it is a TPU kernel, and this is a {device.platform}")
    need("splash", T % 128 == 0, f"the sequence length must be a multiple of 128; got {T}")
    need("splash", H % 128 == 0, f"head_dim must be a multiple of 128; got {H}")
    need("cudnn", device.platform in ("gpu", "cuda"), f"it is an NVIDIA kernel, and this is a {device.platform}")
    largest = 256 if capability >= (9, 0) else 128
    need(
        "cudnn", capability >= (8, 0) or device.platform not in ("gpu", "cuda"), "it needs an Ampere GPU or a later one"
    )
    need("cudnn", largest >= H and H % 8 == 0, f"head_dim must be a multiple of 8 up to {largest}; got {H}")
    need("cudnn", dtype == "bfloat16", f"dtype must be bfloat16; got {dtype}")
    need("cudnn", not masked, "it would hold a dense mask, so documents cannot be kept apart (data.mask_documents)")
    if asked != "auto":
        if obstacles[asked]:
            raise ValueError(f"attention={asked} cannot be: {'; '.join(obstacles[asked])}; take auto or xla")
        return asked, "as asked"
    native = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}.get(device.platform)
    if native is None:
        return "xla", f"there is no kernel for a {device.platform}"
    if obstacles[native]:
        return "xla", f"{native} cannot be: {'; '.join(obstacles[native])}"
    return native, f"the fastest on a {device.platform}"


def _by_blocks(query, key, value, segment_ids=None):
    """Blocks of queries, each with the keys up to its last: plain XLA, for any device."""
    B, T, N, H = query.shape
    K = key.shape[2]
    heads_first = (query * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    mixed = _mix(heads_first, key.swapaxes(1, 2), value.swapaxes(1, 2), segment_ids)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


@jax.custom_vjp
def _mix(query, key, value, segment_ids):
    """Of queries [B, K, G, T, H], keys and values [B, K, S, H]; the gradient makes each block's scores again."""
    return _mix_forward(query, key, value, segment_ids)[0]


def _mix_forward(query, key, value, segment_ids):
    parts = []
    for block, keys in _blocks(query.shape[3]):
        q = query[:, :, :, block]
        if parts:  # one block after the other: their scores must not be alive together
            q, parts[-1] = jax.lax.optimization_barrier((q, parts[-1]))
        scores = _scores(q, key[:, :, keys], _seen(block, keys, segment_ids))
        # The division waits until after the second matmul, where it is S / H times less work.
        largest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        mixed = _times(weights.astype(value.dtype), value[:, :, keys]) / total
        parts.append((mixed.astype(value.dtype), (largest + jnp.log(total))[..., 0]))
    mixed, normaliser = (jnp.concatenate(part, axis=3) for part in zip(*parts, strict=True))
    mixed, normaliser = checkpoint_name(mixed, "attention_out"), checkpoint_name(normaliser, "attention_out")
    return mixed, (query, key, value, segment_ids, mixed, normaliser)


def _mix_backward(residuals, pull):
    query, key, value, segment_ids, mixed, normaliser = residuals
    dtype = query.dtype
    pulled_query, pulled_key, pulled_value = [], jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    for block, keys in _blocks(query.shape[3]):
        q, g = query[:, :, :, block], pull[:, :, :, block]
        q, g, pulled_key, pulled_value = jax.lax.optimization_barrier((q, g, pulled_key, pulled_value))
        scores = _scores(q, key[:, :, keys], _seen(block, keys, segment_ids))
        weights = jnp.exp(scores - normaliser[:, :, :, block, None])
        mean = (g.astype(jnp.float32) * mixed[:, :, :, block]).sum(axis=-1, keepdims=True)
        along = weights * (_scores(g, value[:, :, keys]) - mean)
        weights, along = weights.astype(dtype), along.astype(dtype)
        pulled_query.append(_times(along, key[:, :, keys]).astype(dtype))
        pulled_key = pulled_key.at[:, :, keys].add(_sum_over_queries(along, q))
        pulled_value = pulled_value.at[:, :, keys].add(_sum_over_queries(weights, g))
    return jnp.concatenate(pulled_query, axis=3), pulled_key.astype(dtype), pulled_value.astype(dtype), None


_mix.defvjp(_mix_forward, _mix_backward)


def _blocks(T: int) -> list[tuple[slice, slice]]:
    """(queries, the keys that some of them see), in order."""
    length = min(512, max(128, T // 4))
    return [(slice(a, min(a + length, T)), slice(0, min(a + length, T))) for a in range(0, T, length)]


def _seen(block: slice, keys: slice, segment_ids):
    """Which keys a query sees: [t, s], or [B, 1, 1, t, s] where segments are kept apart."""
    seen = jnp.arange(keys.stop)[None, :] <= jnp.arange(block.start, block.stop)[:, None]
    if segment_ids is None:
        return seen
    return seen & (segment_ids[:, None, None, block, None] == segment_ids[:, None, None, None, keys])


# Matmuls of one key/value head with the queries of all its G heads as rows.


def _scores(query, key, seen=None):
    """[B, K, G, t, H] x [B, K, s, H] -> [B, K, G, t, s], float32; what is not seen scores least."""
    B, K, G, t, H = query.shape
    rows = query.reshape(B, K, G * t, H)
    scores = jnp.einsum("BKRH,BKSH->BKRS", rows, key, preferred_element_type=jnp.float32).reshape(B, K, G, t, -1)
    return scores if seen is None else jnp.where(seen, scores, _MASKED_SCORE)


def _times(weights, value):
    """[B, K, G, t, s] x [B, K, s, H] -> [B, K, G, t, H], float32."""
    B, K, G, t, s = weights.shape
    rows = weights.reshape(B, K, G * t, s)
    return jnp.einsum("BKRS,BKSH->BKRH", rows, value, preferred_element_type=jnp.float32).reshape(B, K, G, t, -1)


def _sum_over_queries(weights, query):
    """[B, K, G, t, s] x [B, K, G, t, H] -> [B, K, s, H], float32."""
    B, K, G, t, s = weights.shape
    rows, query = weights.reshape(B, K, G * t, s), query.reshape(B, K, G * t, -1)
    return jnp.einsum("BKRS,BKRH->BKSH", rows, query, preferred_element_type=jnp.float32)


def _cached(query, key, value, first_query):
    """Queries after `first_query` [B] keys of a cache, which each row has of its own; not for gradients."""
    B, T, N, H = query.shape
    K, S = key.shape[2], key.shape[1]
    query = (query * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    parts = []
    for block, _ in _blocks(T):
        last = first_query[:, None] + jnp.arange(block.start, block.stop)
        seen = jnp.arange(S) <= last[:, None, None, :, None]
        weights = jax.nn.softmax(_scores(query[:, :, :, block], key, seen), axis=-1)
        parts.append(_times(weights.astype(value.dtype), value).astype(value.dtype))
    return jnp.concatenate(parts, axis=3).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _splash(query, key, value, segment_ids=None):
    """The TPU kernel that comes with JAX. Its default blocks of 128 are several times slower than these."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    B, T, N, H = query.shape
    K = key.shape[2]
    block = next(size for size in (1024, 512, 256, 128) if T % size == 0)
    part = min(block, 512)
    sizes = kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=part,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=min(block, 256),  # more overflows a v5p's VMEM
        use_fused_bwd_kernel=True,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * (N // K))
    run = kernel.make_splash_mqa_single_device(mask, block_sizes=sizes, residual_checkpoint_name="attention_out")
    segments = None if segment_ids is None else kernel.SegmentIds(segment_ids, segment_ids)
    query = (query * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    of_heads = jax.vmap(run, in_axes=(0, 0, 0, None))
    mixed = jax.vmap(of_heads)(query, key.swapaxes(1, 2), value.swapaxes(1, 2), segments)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _cudnn(query, key, value):
    """The flash attention of NVIDIA's library, causal without a mask array."""
    return checkpoint_name(
        jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn"), "attention_out"
    )
