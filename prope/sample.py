"""Continues a prompt with a saved checkpoint: python -m prope.sample --workdir=W --prompt=TEXT.

The prompt is read in one pass, which fills the KV cache; then one compiled loop makes a token at a time.
"""

import functools
import logging
import time

import jax
import jax.numpy as jnp
from absl import flags
from jaxtyping import Array, Int
from ml_collections import ConfigDict, FrozenConfigDict

from prope import checkpoint, command, model
from prope.data.tokenizer import load_tokenizer

log = logging.getLogger("prope")


@functools.partial(jax.jit, static_argnames=("config", "length", "greedy"))
def generate(
    config: ConfigDict,
    params: model.Params,
    prompts: Int[Array, "B T"],
    key: jax.Array,
    temperature: float,
    *,
    length: int,
    greedy: bool = False,
) -> Int[Array, "B length"]:
    """`length` tokens after each prompt, all of one length T, drawn from softmax(logits / temperature), or the best.

    `config` is a run's `config.model`, frozen.
    """
    B, T = prompts.shape

    def choose(hidden, key):
        scores = model.logits(params, hidden[:, -1])
        return jnp.argmax(scores, -1) if greedy else jax.random.categorical(key, scores / temperature)

    def one_more(carry, place):
        token, cache = carry
        hidden, cache = model.decode(config, params, token[:, None], cache, place)
        return (choose(hidden, jax.random.fold_in(key, place)), cache), token

    hidden, cache = model.decode(config, params, prompts, model.empty_cache(config, B, T + length), 0)
    first = choose(hidden, jax.random.fold_in(key, T - 1))
    return jax.lax.scan(one_more, (first, cache), jnp.arange(T, T + length))[1].T


def define_flags() -> None:
    """The command's flags."""
    flags.DEFINE_string("workdir", None, "directory of the run")
    flags.DEFINE_integer("step", None, "checkpoint to sample from; the newest by default")
    flags.DEFINE_string("prompt", None, "text to continue")
    flags.DEFINE_integer("length", 200, "tokens to make; less where the document ends", lower_bound=1)
    flags.DEFINE_float("temperature", 0.8, "0 takes the likeliest token, 1 samples from the model", lower_bound=0.0)
    flags.DEFINE_integer("seed", 0, "of the random numbers")
    flags.mark_flags_as_required(["workdir", "prompt"])


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    run = checkpoint.load_run(given.workdir, given.step)
    tokenizer = load_tokenizer(run.config.data.tokenizer)
    prompt = [tokenizer.bos, *tokenizer.encode(given.prompt.encode())]
    seen = run.config.data.seq_len
    if len(prompt) + given.length > seen:
        log.info("%d tokens is longer than the %d that the run was trained on", len(prompt) + given.length, seen)
    config = FrozenConfigDict(run.config.model)
    arguments = (
        config,
        run.params,
        jnp.array([prompt]),
        jax.random.key(given.seed),
        max(given.temperature, 1e-6),
    )
    compiled = generate.lower(*arguments, length=given.length, greedy=given.temperature == 0).compile()
    start = time.perf_counter()
    tokens = compiled(*arguments[1:])[0].tolist()
    seconds = time.perf_counter() - start
    text = tokenizer.decode(tokens[: tokens.index(tokenizer.eos)] if tokenizer.eos in tokens else tokens)
    log.info("%s", given.prompt + text)
    return {
        "text": text,
        "prompt": given.prompt,
        "tokens_per_second": given.length / seconds,
        "step": run.step,
        "rope_percentage": run.config.model.rope_percentage,
        "workdir": str(run.workdir),
    }


if __name__ == "__main__":
    command.run(main, define_flags)
