"""References in float64, written in NumPy from the formulas; nothing of prope is imported.

Axis letters: B batch, T query length, S key length, D embed_dim, N query heads, K key/value heads,
H head_dim, F hidden_dim, V vocab, L layers, P = H/2 rotation pairs, Q lanes of a layer's own input.
"""

import math

import numpy as np
from numpy import einsum


def float64(array):
    return np.asarray(array, np.float64)


# --- Rotation ---------------------------------------------------------------------------------


def frequencies(head_dim, max_wavelength=10_000, p=1.0):
    """Returns theta^(-2k/d) for the fastest int(p d / 2) pairs and 0 for the others, [P]."""
    theta = float(max_wavelength)
    freqs = np.zeros(head_dim // 2)
    for k in range(int(p * head_dim // 2)):
        freqs[k] = theta ** (-2 * k / head_dim)
    return freqs


def rotate(inputs, positions, freqs):
    """Rotates lanes k and k + H/2 of inputs [B, T, N, H] by positions [B, T] times freqs.

    These are [P], or [K, P] for N / K heads after one another.
    """
    first, second = np.split(float64(inputs), 2, axis=-1)
    freqs = np.atleast_2d(freqs)
    heads = np.arange(np.shape(inputs)[2]) * len(freqs) // np.shape(inputs)[2]
    radians = float64(positions)[..., None, None] * freqs[heads]
    cos = np.cos(radians)
    sin = np.sin(radians)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    return np.concatenate([rotated_first, rotated_second], axis=-1)


def rotation(inputs, positions, max_wavelength=10_000, p=1.0):
    """Applies p-RoPE to inputs [B, T, N, H]."""
    head_dim = np.shape(inputs)[-1]
    freqs = frequencies(head_dim, max_wavelength, p)
    return rotate(inputs, positions, freqs)


# --- Attention --------------------------------------------------------------------------------


def causal_mask(T, segments=None, window=None, sinks=0):
    """Returns which keys a query sees, [1, T, T], or [B, T, T] with segments [B, T].

    With a window the first `sinks` keys stay visible.
    """
    places = np.arange(T)
    distance = places[:, None] - places
    seen = distance[None] >= 0
    if window is not None:
        seen &= (distance < window) | (places < sinks)
    if segments is not None:
        segments = np.asarray(segments)
        seen = seen & (segments[:, :, None] == segments[:, None])
    return seen


def softmax(scores):
    """Softmax over the last axis; -inf has weight 0."""
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - largest)
    return weights / weights.sum(-1, keepdims=True)


def mean_losses(logits, tokens):
    """The mean loss of every sequence [B]: logits [B, T, V] predict the next of tokens [B, T]."""
    probabilities = softmax(logits[:, :-1])
    targets = tokens[:, 1:, None]
    predicted = np.take_along_axis(probabilities, targets, axis=-1)
    return -np.log(predicted[..., 0]).mean(axis=1)


def softcap(scores, cap):
    """Returns c tanh(z / c), and its derivative."""
    if cap is None:
        return scores, 1.0
    tanh = np.tanh(scores / cap)
    return cap * tanh, 1 - tanh**2


def attention(query, key, value, seen, cotangent=None, cap=None):
    """Returns the output [B, T, N, H]; with its cotangent, also those of query, key and value.

    Query is [B, T, N, H], key and value are [B, S, K, H], `seen` is [B, T, S]; `cap` is that of the
    scores.
    """
    query = float64(query)
    N, H = query.shape[2:]
    K = key.shape[2]
    key_head = np.arange(N) * K // N
    keys = float64(key)[:, :, key_head]
    values = float64(value)[:, :, key_head]
    scores = einsum("btnh,bsnh->bnts", query, keys)
    scores, slope = softcap(scores / np.sqrt(H), cap)
    scores = np.where(seen[:, None], scores, -np.inf)
    weights = softmax(scores)
    output = einsum("bnts,bsnh->btnh", weights, values)
    if cotangent is None:
        return output

    def sum_over_shared(grad):
        sums = [grad[:, :, key_head == k].sum(2) for k in range(K)]
        return np.stack(sums, axis=2)

    cotangent = float64(cotangent)
    grad_weights = einsum("btnh,bsnh->bnts", cotangent, values)
    mean = (weights * grad_weights).sum(-1, keepdims=True)
    grad_scores = weights * (grad_weights - mean)
    grad_scores = grad_scores * slope / np.sqrt(H)
    grad_query = einsum("bnts,bsnh->btnh", grad_scores, keys)
    grad_keys = einsum("bnts,btnh->bsnh", grad_scores, query)
    grad_values = einsum("bnts,btnh->bsnh", weights, cotangent)
    return (output, grad_query, sum_over_shared(grad_keys), sum_over_shared(grad_values))


# --- Decoder ----------------------------------------------------------------------------------


def rms_norm(x, params, epsilon=1e-6):
    """RMSNorm over the last axis, with Gemma's 1 + scale."""
    mean_square = (x**2).mean(-1, keepdims=True)
    normed = x / np.sqrt(mean_square + epsilon)
    return normed * (1 + params["scale"])


def gelu(x):
    """GELU in its form with tanh."""
    inner = x + 0.044715 * x**3
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * inner))


def silu(x):
    """x times its logistic sigmoid."""
    return x / (1 + np.exp(-x))


def map_leaves(function, tree):
    """Applies a function to the arrays of nested dictionaries."""
    if isinstance(tree, dict):
        return {name: map_leaves(function, branch) for name, branch in tree.items()}
    return function(tree)


def keys_and_values(config, params, x):
    """Returns one layer's keys and values [B, S, K, H] of x [B, S, D], before the rotation."""
    key_is_value = "k_einsum" in params
    weights = [params["k_einsum"]["w"]] if key_is_value else list(params["kv_einsum"]["w"])
    projected = [einsum("bsd,kdh->bskh", x, w) for w in weights]
    if config.qkv_bias:
        biases = [params["k_einsum"]["b"]] if key_is_value else params["kv_einsum"]["b"]
        projected = [y + bias for y, bias in zip(projected, biases, strict=True)]
    key = projected[0]
    value = projected[-1]
    if config.use_qk_norm:
        key = rms_norm(key, params["key_norm"], config.norm_epsilon)
    if config.use_value_norm:
        value = rms_norm(value, {"scale": 0}, config.norm_epsilon)
    return key, value


def self_attention(config, params, x, shared, positions, seen, freqs, scale, rotate_fn):
    """One layer's attention of x [B, T, D], with its keys and values before the rotation.

    `shared` are keys and values of an earlier layer in their place, or None. `scale` multiplies
    logits.
    """
    query = einsum("btd,ndh->btnh", x, params["q_einsum"]["w"])
    if config.qkv_bias:
        query = query + params["q_einsum"]["b"]
    if config.use_qk_norm:
        query = rms_norm(query, params["query_norm"], config.norm_epsilon)
    both = shared or keys_and_values(config, params, x)
    if config.attention_scale is not None:
        scale = scale * config.attention_scale * np.sqrt(query.shape[-1])
    query, key, value = rotate_fn(query, *both, positions, freqs)
    output = attention(scale * query, key, value, seen, cap=config.attention_softcap)
    return einsum("btnh,nhd->btd", output, params["attn_vec_einsum"]["w"]), both


def rotate_qkv(query, key, value, positions, freqs):
    """Rotates queries and keys; another function in its place sees or changes them."""
    return rotate(query, positions, freqs), rotate(key, positions, freqs), value


def layer_kinds(config):
    """The kind of each layer, [L]."""
    pattern = config.layer_types or ("full_attention",)
    return [pattern[number % len(pattern)] for number in range(config.num_layers)]


def layer_windows(config):
    """How many keys a query of each layer sees; None: all before."""
    return [config.sliding_window if kind[0] == "s" else None for kind in layer_kinds(config)]


def layer_frequencies(config):
    """The frequencies of each layer, custom or p-RoPE's, [L][P] or [L][K, P]."""
    if config.rope_type == "custom":
        return [np.array(layer) for layer in config.rope_frequencies]
    percentages = np.broadcast_to(config.rope_percentage, config.num_layers)
    freqs = []
    for p, window in zip(percentages, layer_windows(config), strict=True):
        theta = config.max_wavelength
        head_dim = config.head_dim
        if window is None and config.global_head_dim is not None:
            head_dim = config.global_head_dim
        if window is not None and config.local_max_wavelength is not None:
            theta = config.local_max_wavelength
        if window is not None and config.local_rope_percentage is not None:
            p = config.local_rope_percentage
        freqs.append(frequencies(head_dim, theta, p))
    return freqs


def take_row(tree, row):
    """Takes a row of every array."""
    return map_leaves(lambda leaf: leaf[row], tree)


def split_layers(config, stacked):
    """Returns the parameters of each layer, [L], from those of "layers".

    Where layers differ in shape there is a stack for each kind, and one for those of a kind that
    take the keys and values of others; its rows are in the order of the layers.
    """
    rows = {}
    split = []
    for number, kind in enumerate(layer_kinds(config)):
        shares = number >= config.num_layers - config.num_kv_shared_layers
        stack = f"{kind}_shared_kv" if shares else kind
        row = rows.get(stack, 0) if stack in stacked else number
        rows[stack] = row + 1
        layer = take_row(stacked.get(stack, stacked), row)
        width = 2 if shares and config.use_double_wide_mlp else 1
        assert len(layer["mlp"]["linear"]) == width * config.hidden_dim
        assert ("kv_einsum" in layer["attn"] or "k_einsum" in layer["attn"]) != shares
        split.append(layer)
    return split


def layer_inputs(config, embedder, tokens, x):
    """Computes the inputs [L, B, T, Q] of the layers, of tokens and the first layer's x."""
    context = einsum("btd,dlq->lbtq", x, embedder["per_layer_model_projection"]["w"])
    context = context / np.sqrt(config.embed_dim)
    context = rms_norm(context, embedder["per_layer_projection_norm"], config.norm_epsilon)
    rows = embedder["per_layer_embeddings"][np.asarray(tokens)]
    rows = rows.transpose(2, 0, 1, 3)
    return (context + rows * np.sqrt(config.per_layer_input_dim)) / np.sqrt(2)


def add_layer_input(config, params, x, layer_input):
    """Adds what a layer makes of x and of its input [B, T, Q]."""
    activation = {"gelu": gelu, "silu": silu}[config.activation]
    gated = activation(x @ params["per_layer_input_gate"]["w"]) * layer_input
    projected = gated @ params["per_layer_projection"]["w"]
    return x + rms_norm(projected, params["post_per_layer_input_norm"], config.norm_epsilon)


def mlp(config, params, x):
    """One layer's gated MLP of x [B, T, D]."""
    activation = {"gelu": gelu, "silu": silu}[config.activation]
    gate_weights, up_weights = params["gating_einsum"]
    hidden = activation(x @ gate_weights) * (x @ up_weights)
    return hidden @ params["linear"]


def run_layer(config, params, x, layer_input, context):
    """One layer of x [B, T, D], with its keys and values; `layer_input` is its own or None.

    `context` are the arguments of `self_attention` from `shared` on.
    """
    epsilon = config.norm_epsilon
    normed = rms_norm(x, params["pre_attention_norm"], epsilon)
    attended, both = self_attention(config, params["attn"], normed, *context)
    if config.post_norms:
        attended = rms_norm(attended, params["post_attention_norm"], epsilon)
    x = x + attended
    normed = rms_norm(x, params["pre_ffw_norm"], epsilon)
    projected = mlp(config, params["mlp"], normed)
    if config.post_norms:
        projected = rms_norm(projected, params["post_ffw_norm"], epsilon)
    x = x + projected
    if layer_input is not None:
        x = add_layer_input(config, params, x, layer_input)
    if config.use_skip_scale:
        x = x * params["skip_scale"]
    return x, both


def decoder(
    config,
    params,
    tokens,
    positions,
    segments=None,
    freqs=None,
    windows=None,
    scale=1.0,
    rotate_fn=rotate_qkv,
):
    """Returns the logits [B, T, V] of the decoder of a config.model.

    `freqs` [L][P] or [L][K, P] are those of the config by default. A layer of `windows` that is
    not None sees so many keys; they follow from the config by default.
    `scale` multiplies the attention logits of layers without a window. `rotate_fn` is called for
    every layer in turn.
    """
    params = map_leaves(float64, params)
    table = params["embedder"]["input_embedding"]
    T = np.shape(tokens)[1]
    freqs = layer_frequencies(config) if freqs is None else freqs
    windows = windows or layer_windows(config)
    x = table[np.asarray(tokens)]
    if config.scale_embedding:
        x = x * np.sqrt(config.embed_dim)
    inputs = [None] * config.num_layers
    if config.per_layer_input_dim:
        inputs = layer_inputs(config, params["embedder"], tokens, x)
    kinds = layer_kinds(config)
    last_of_kind = {}  # keys and values of the last layer of a kind that has some
    for number, layer in enumerate(split_layers(config, params["layers"])):
        kind = kinds[number]
        window = windows[number]
        shares = number >= config.num_layers - config.num_kv_shared_layers
        context = (
            last_of_kind[kind] if shares else None,
            positions,
            causal_mask(T, segments, window),
            freqs[number],
            1.0 if window else scale,
            rotate_fn,
        )
        x, last_of_kind[kind] = run_layer(config, layer, x, inputs[number], context)
    hidden = rms_norm(x, params["final_norm"], config.norm_epsilon)
    head = table if config.tied else params["head"]["w"]
    logits, _ = softcap(hidden @ head.T, config.final_softcap)
    return logits


# --- Loss and optimizer -----------------------------------------------------------------------


def cross_entropy(hidden, embedding, targets, weights, cap=None):
    """Returns losses [B, T] and the gradients of their weighted sum for hidden and embedding."""
    hidden = float64(hidden)
    embedding = float64(embedding)
    weights = float64(weights)
    logits, slope = softcap(hidden @ embedding.T, cap)
    probabilities = softmax(logits)
    is_target = np.eye(len(embedding))[np.asarray(targets)]
    losses = -np.log((probabilities * is_target).sum(-1))
    grad_logits = weights[..., None] * (probabilities - is_target) * slope
    grad_hidden = grad_logits @ embedding
    grad_embedding = einsum("btv,btd->vd", grad_logits, hidden)
    return losses, grad_hidden, grad_embedding


def learning_rate(update, num_updates, warmup, peak, final):
    """The rate of an update (1, 2, ..): a linear warmup, then a cosine from `peak` to `final`."""
    if update < warmup:
        return peak * update / warmup
    done = (update - warmup) / (num_updates - warmup)
    angle = math.pi * min(done, 1)
    return final + (peak - final) * (1 + math.cos(angle)) / 2


def adamw(weights, gradients, rates, clip_norm, weight_decay, b1=0.9, b2=0.95, eps=1e-8):
    """Yields the weights after each update by AdamW with clipped gradients."""
    mu = np.zeros_like(weights)
    nu = np.zeros_like(weights)
    for index, gradient in enumerate(gradients):
        norm = np.linalg.norm(gradient)
        clipped = gradient / max(norm / clip_norm, 1)
        mu = b1 * mu + (1 - b1) * clipped
        nu = b2 * nu + (1 - b2) * clipped**2
        corrected_mu = mu / (1 - b1 ** (index + 1))
        corrected_nu = nu / (1 - b2 ** (index + 1))
        step = corrected_mu / (np.sqrt(corrected_nu) + eps)
        step = step + weight_decay * weights
        weights = weights - rates[index] * step
        yield weights


def lion(weights, gradients, rates, clip_norm, weight_decay, b1=0.9, b2=0.95):
    """Yields the weights after each update by Lion with clipped gradients."""
    mu = np.zeros_like(weights)
    for rate, gradient in zip(rates, gradients, strict=True):
        clipped = gradient / max(np.linalg.norm(gradient) / clip_norm, 1)
        step = np.sign(b1 * mu + (1 - b1) * clipped)
        mu = b2 * mu + (1 - b2) * clipped
        weights = weights - rate * (step + weight_decay * weights)
        yield weights


def adafactor(weights, gradients, rates, clip_norm, weight_decay):
    """Yields the weights after each update by Adafactor, of an array too small to be factored."""
    nu = np.zeros_like(weights)
    for index, gradient in enumerate(gradients):
        clipped = gradient / max(np.linalg.norm(gradient) / clip_norm, 1)
        decay = 1 - (index + 1) ** -0.8
        nu = decay * nu + (1 - decay) * clipped**2
        step = clipped / np.sqrt(nu)
        step = step / max(np.sqrt(np.mean(step**2)), 1)
        step = step * max(np.sqrt(np.mean(weights**2)), 1e-3)
        weights = weights - rates[index] * (step + weight_decay * weights)
        yield weights


# --- Analysis ---------------------------------------------------------------------------------


def by_pair(x):
    """Both lanes of every pair, [2, .., P]."""
    return np.stack(np.split(x, 2, axis=-1))


def contributions(query, key, scale):
    """What every pair adds to logits, [B, N, T, S, P]."""
    heads_per_key = query.shape[2] // key.shape[2]
    keys = np.repeat(key, heads_per_key, axis=2)
    return scale * einsum("cbtnp,cbsnp->bntsp", by_pair(query), by_pair(keys))


def score_queries(rotated, unrotated, after):
    """Scores of every query, [B, N, T], from weights with and without rotation."""
    places = np.arange(rotated.shape[-1])
    previous = rotated[..., places, places - 1]
    first = rotated[..., 0]
    logs = np.log(rotated, where=rotated > 0, out=np.zeros_like(rotated))
    seen = np.minimum(places + 1, (rotated > 0).sum(-1).max())
    return {
        "diagonal": rotated[..., places, places],
        "previous_token": previous,
        "first_token": first,
        "entropy": -(rotated * logs).sum(-1) / np.log(np.maximum(seen, 2)),
        "distance": (rotated * (places[:, None] - places)).sum(-1),
        "overlap_without_rotation": np.minimum(rotated, unrotated).sum(-1),
        "after_token": previous * after[:, None],
        "elsewhere": first * ~after[:, None],
    }


def attention_measures(query, key, value, freqs, after, scale=None, cap=None, window=None):
    """What an analysis measures of a layer, from whole arrays of queries and keys.

    Queries are [B, T, N, H], keys and values [B, T, K, H]; `after` [B, T] are the queries that
    count in after_token. Means over sequences.
    """
    query = float64(query)
    key = float64(key)
    B, T, _, H = query.shape
    scale = H**-0.5 if scale is None else scale
    seen = causal_mask(T, window=window)[0]
    positions = np.tile(np.arange(T), (B, 1))
    parts = contributions(rotate(query, positions, freqs), rotate(key, positions, freqs), scale)
    weights = []
    for added in (parts, contributions(query, key, scale)):
        scores, _ = softcap(added.sum(-1), cap)
        weights.append(softmax(np.where(seen, scores, -np.inf)))
    measured = score_queries(*weights, after)
    for name, scores in measured.items():
        rows = seen[:, 0].nonzero()[0] if name in ("first_token", "elsewhere") else np.arange(T)
        measured[name] = scores[..., rows[2:]].mean((0, 2))
    for name, x in (("query", query), ("key", key), ("value", float64(value))):
        measured[f"{name}_norms"] = np.linalg.norm(by_pair(x), axis=0).mean((0, 1))
    measured["to_first"] = parts[:, :, 1:, 0][:, :, seen[1:, 0]].mean((0, 2))
    others = [parts[:, :, i, 1:][:, :, seen[i, 1:]].mean(2) for i in range(1, T)]
    measured["to_others"] = np.mean(others, axis=(0, 1))
    return measured


def channel(query, key, frequency, head_dim):
    """Describes a pair of a head from its queries and keys [B, T], as complex numbers.

    `to_first` and `to_others` are what it adds to logits by distance, of the first key and of the
    others. The rotation at which the first key loses its advantage is found by search.
    """
    T = query.shape[1]
    turns = np.exp(1j * frequency * np.arange(T))
    added = einsum("bi,bj->bij", (query * turns).conj(), key * turns).real
    added = added / math.sqrt(head_dim)
    others = added[:, 1:, 1:]
    mean = query[:, 1:].mean()
    mean_first = key[:, 0].mean()
    mean_others = key[:, 1:].mean()
    rotations = np.arange(0, 2 * np.pi, 1e-5)
    advantage = mean.conj() * (mean_first - mean_others)
    rotated = (advantage * np.exp(-1j * rotations)).real
    return {
        "to_first": added[:, 1:, 0].mean(0),
        "to_others": [np.diagonal(others, -m, 1, 2).mean() for m in range(T - 1)],
        "first_alignment": _cosine(mean, mean_first),
        "others_alignment": _cosine(mean, mean_others),
        "breaking_rotation": rotations[np.argmax(rotated <= 0)] if rotated[0] > 0 else None,
    }


def _cosine(a, b):
    return (a.conj() * b).real / abs(a) / abs(b)
