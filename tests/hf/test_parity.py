"""The rotation and training beside other projects' programs, where they are installed.

`pip install --editable ".[hf]"` brings transformers and torch; `pip install --no-deps gemma==3.3.0`
brings DeepMind's file (the package's dependencies are large, and the rotation has none of them).
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from support.models import draw_inputs as draw
from support.runs import make_run

from prope import apply_p_rope
from prope.hf import exporter, importer
from prope.optimizer import make_optimizer
from prope.rope import frequencies
from prope.step import make_train_step
from prope.workdir.run import open_run


def import_hf(name):
    """Imports torch or transformers; skips the test where the hf extra is not installed."""
    return pytest.importorskip(name, reason="the hf extra is not installed")


@pytest.mark.parametrize("max_wavelength", [1e4, 1e6])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_frequencies_are_transformers_proportional_ones_to_one_ulp(d, max_wavelength):
    import_hf("torch")
    transformers = import_hf("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for p in (0, 0.1, 0.25, 0.5, 0.7, 0.75, 1):
        parameters = {
            "rope_type": "proportional",
            "rope_theta": max_wavelength,
            "partial_rotary_factor": p,
        }
        config = transformers.GemmaConfig(
            hidden_size=4 * d, num_attention_heads=4, head_dim=d, rope_parameters=parameters
        )
        theirs, _ = ROPE_INIT_FUNCTIONS["proportional"](config, device=None)
        # Theirs are computed in float32.
        ours = frequencies(d, max_wavelength, p).astype(np.float32)
        np.testing.assert_array_max_ulp(ours, theirs.numpy(), maxulp=1)


@pytest.mark.parametrize("p", [0, 0.1, 0.25, 0.5, 0.75, 1])
def test_equals_gemma_within_its_own_error(gemma_rope, p):
    positions = np.array([[0, 1, 255, 256, 257, 4095, 8191]], np.int32)
    inputs = draw(256, positions)
    theirs = gemma_rope(inputs, positions, base_frequency=10_000, rope_proportion=p)
    ours = apply_p_rope(inputs, positions, 256, 10_000, p)
    their_error = np.abs(theirs - oracles.rotation(inputs, positions, 1e4, p)).max()
    assert np.abs(ours - theirs).max() <= their_error + 3e-7
    assert their_error < 2e-3, "theirs is the same rotation, in float32"


OPTIMIZER = {
    "learning_rate": 1e-3,
    "final_learning_rate": 1e-4,
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "clip_norm": 0.5,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
}
NUM_STEPS = 8


class TorchTrainer:
    """Trains a model of transformers by the same rules, written with what torch has."""

    def __init__(self, model):
        import torch

        self.torch = torch
        self.model = model
        # The names of norms end so; they do not decay. The head is the embedding.
        norms = []
        matrices = []
        for name, weight in model.named_parameters():
            group = norms if name.endswith("norm.weight") else matrices
            group.append(weight)
        groups = [
            {"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]},
            {"params": norms, "weight_decay": 0.0},
        ]
        betas = (OPTIMIZER["b1"], OPTIMIZER["b2"])
        self.adamw = torch.optim.AdamW(groups, betas=betas, eps=OPTIMIZER["eps"])

    def step(self, inputs, targets, weights, rate):
        """Updates by two microbatches; returns the loss and the gradient's norm."""
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.zero_grad()
        total = 0.0
        for rows in np.split(np.arange(len(inputs)), 2):
            logits = self.model(self.torch.tensor(inputs[rows])).logits
            losses = self.torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), self.torch.tensor(targets[rows]), reduction="none"
            )
            weighted = losses * self.torch.tensor(weights[rows])
            loss = weighted.sum() / float(weights.sum())
            loss.backward()
            total += loss.item()
        clip_grad_norm = self.torch.nn.utils.clip_grad_norm_
        norm = clip_grad_norm(self.model.parameters(), OPTIMIZER["clip_norm"])
        self.adamw.step()
        return total, norm.item()


def draw_steps(B, T, vocab_size):
    """Yields inputs, targets and weights [B, T] of every step, and its learning rate."""
    rng = np.random.default_rng(2)
    # Without id 0: torch leaves the padding's embedding out of the gradient.
    tokens = rng.integers(1, vocab_size, (NUM_STEPS, B, T + 1))
    weights = (rng.random((NUM_STEPS, B, T)) < 0.8).astype(np.float32)
    for index in range(NUM_STEPS):
        rate = oracles.learning_rate(
            index + 1,
            NUM_STEPS,
            OPTIMIZER["warmup_steps"],
            OPTIMIZER["learning_rate"],
            OPTIMIZER["final_learning_rate"],
        )
        yield (tokens[index, :, :-1], tokens[index, :, 1:], weights[index]), rate


def make_batch(inputs, targets, weights):
    """A batch of prope's training step, of windows that are one document each."""
    B, T = inputs.shape
    return {
        "tokens": jnp.asarray(inputs, jnp.int32),
        "targets": jnp.asarray(targets, jnp.int32),
        "positions": jnp.tile(jnp.arange(T), (B, 1)),
        "segment_ids": jnp.ones((B, T), jnp.int32),
        "weights": jnp.asarray(weights),
    }


@pytest.mark.parametrize("p", [0, 0.75])
def test_eight_training_steps_equal_torch_s(tmp_path, p):
    """AdamW, its decay mask, clipping, the schedule and two microbatches, from equal weights."""
    import_hf("torch")
    transformers = import_hf("transformers")
    B = 4
    T = 32
    config, params = make_run(tmp_path / "run", p)
    exporter.export(tmp_path / "run", tmp_path / "hf")
    theirs = transformers.GemmaForCausalLM.from_pretrained(tmp_path / "hf")
    trainer = TorchTrainer(theirs)
    config.update({"batch_size": B, "accumulation": 2, "num_steps": NUM_STEPS})
    config.data.seq_len = T
    config.optimizer.update(OPTIMIZER)
    optimizer = make_optimizer(config)
    step = jax.jit(make_train_step(config, optimizer))
    state = optimizer.init(params)

    for arrays, rate in draw_steps(B, T, config.model.vocab_size):
        params, state, metrics = step(params, state, make_batch(*arrays))
        loss, norm = trainer.step(*arrays, rate)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
        assert norm > OPTIMIZER["clip_norm"]

    theirs.save_pretrained(tmp_path / "saved")
    importer.import_run(tmp_path / "saved", tmp_path / "back")
    expected = open_run(tmp_path / "back").params()

    def compare(ours, theirs):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)

    jax.tree.map(compare, params, expected)
