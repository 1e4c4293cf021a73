"""The rotation beside other projects' programs, where they are installed.

`pip install --editable ".[hf]"` brings transformers and torch; `pip install --no-deps gemma==3.3.0` brings DeepMind's
file (the package's own needs are large, and the rotation has none of them).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from makers import draw_inputs as draw
from makers import make_run
from oracles import rotation as oracle

from prope import apply_p_rope
from prope.hf import exporter, importer
from prope.optimizer import make_optimizer
from prope.rope import frequencies
from prope.step import make_train_step
from prope.workdir.run import open_run


@pytest.mark.parametrize("max_wavelength", [1e4, 1e6])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_frequencies_are_transformers_proportional_ones_to_one_ulp(d, max_wavelength):
    pytest.importorskip("torch", reason="the hf extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
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
        theirs = ROPE_INIT_FUNCTIONS["proportional"](config, device=None)[0].numpy()
        ours = frequencies(d, max_wavelength, p).astype(
            np.float32
        )  # theirs are computed in float32
        assert np.abs(ours.view(np.int32).astype(np.int64) - theirs.view(np.int32)).max() <= 1


@pytest.mark.parametrize("p", [0, 0.1, 0.25, 0.5, 0.75, 1])
def test_equals_gemma_within_its_own_error(gemma_rope, p):
    positions = np.array([[0, 1, 255, 256, 257, 4095, 8191]], np.int32)
    inputs = draw(256, positions)
    theirs = np.asarray(gemma_rope(inputs, positions, base_frequency=10_000, rope_proportion=p))
    their_error = np.abs(theirs - oracle(inputs, positions, 1e4, p)).max()
    ours = np.asarray(apply_p_rope(inputs, positions, 256, 10_000, p))
    assert np.abs(ours - theirs).max() <= their_error + 3e-7
    assert their_error < 2e-3, "theirs is the same rotation, in float32"


@pytest.mark.parametrize("p", [0, 0.75])
def test_eight_training_steps_equal_torch_s(tmp_path, p):
    """AdamW, its decay mask, clipping, warmup and two microbatches, on transformers' Gemma with the same weights."""
    torch = pytest.importorskip("torch", reason="the hf extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    B, T, steps, warmup, peak, final, decay, clip = 4, 32, 8, 3, 1e-3, 1e-4, 0.1, 0.5
    config, params = make_run(tmp_path / "run", p)
    exporter.export(tmp_path / "run", tmp_path / "hf")
    theirs = transformers.GemmaForCausalLM.from_pretrained(tmp_path / "hf")
    rng = np.random.default_rng(2)
    # Without id 0: torch leaves the padding's embedding out of the gradient.
    batches = rng.integers(1, config.model.vocab_size, (steps, B, T + 1))
    weights = (rng.random((steps, B, T)) < 0.8).astype(np.float32)

    config.update({"batch_size": B, "accumulation": 2, "num_steps": steps})
    config.data.seq_len = T
    config.optimizer.update(
        {"learning_rate": peak, "final_learning_rate": final, "warmup_steps": warmup}
    )
    config.optimizer.update(
        {"weight_decay": decay, "clip_norm": clip, "b1": 0.9, "b2": 0.95, "eps": 1e-8}
    )
    optimizer = make_optimizer(config)
    step, state = jax.jit(make_train_step(config, optimizer)), optimizer.init(params)
    # Norms, of which the names end so, are not decayed; the head is the embedding.
    groups = [
        [w for name, w in theirs.named_parameters() if name.endswith("norm.weight") == norm]
        for norm in (0, 1)
    ]
    adamw = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": decay}, {"params": groups[1], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for number, (tokens, weight) in enumerate(zip(batches, weights, strict=True), 1):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions, segments = np.broadcast_to(np.arange(T), (B, T)), np.ones((B, T))
        batch = {
            "tokens": inputs,
            "targets": targets,
            "positions": positions,
            "segment_ids": segments,
        }
        batch = {name: jnp.asarray(values, jnp.int32) for name, values in batch.items()}
        params, state, metrics = step(params, state, batch | {"weights": jnp.asarray(weight)})
        done = max(number - warmup, 0) / (steps - warmup)
        rate = min(number / warmup, 1) * peak if number <= warmup else None
        for group in adamw.param_groups:
            group["lr"] = rate or final + (peak - final) * (1 + math.cos(math.pi * done)) / 2
        adamw.zero_grad()
        total = 0.0
        for rows in (slice(0, 2), slice(2, 4)):
            logits = theirs(torch.tensor(inputs[rows])).logits
            losses = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), torch.tensor(targets[rows]), reduction="none"
            )
            loss = (losses * torch.tensor(weight[rows])).sum() / float(weight.sum())
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        adamw.step()
        np.testing.assert_allclose(metrics["loss"], total, rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], norm.item(), rtol=1e-5)
        assert norm > clip
    theirs.save_pretrained(tmp_path / "saved")
    importer.import_run(tmp_path / "saved", tmp_path / "back")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5),
        params,
        open_run(tmp_path / "back").params(),
    )
