"""Times variants of a training step on this machine's device, one JSON line each.

    python tests/gpu_variants.py --config=configs/gemma_2b_wiki.py --config.batch_size=1

A variant changes how the config's step is executed, an option of XLA, or how many tokens a chunk of
the loss has. One that fails has its error instead.
"""

import contextlib
import json
from unittest import mock

from absl import flags

from prope import command

DYNAMIC_SLICES = "xla_gpu_enable_dynamic_slice_fusion"
ZERO_INIT = "xla_gpu_enable_dus_accumulator_zero_init_elimination"
SCANNED = {"model.scan_layers": True}
DOCUMENTS = {"data.mask_documents": True}
# Fields of the config, options of XLA, tokens R of a chunk of the loss.
VARIANTS = {
    "as it is": ({}, {}, None),
    "scanned": (SCANNED, {}, None),
    "scanned, no fused slices": (SCANNED, {DYNAMIC_SLICES: False}, None),
    "scanned, no zeros": (SCANNED, {DYNAMIC_SLICES: False, ZERO_INIT: True}, None),
    "remat none": ({"model.remat": "none"}, {}, None),
    "no Triton matmuls": ({}, {"xla_gpu_enable_triton_gemm": False}, None),
    "bfloat16 logits": ({"loss_dtype": "bfloat16"}, {}, None),
    "chunks of 4096": ({}, {}, 4096),
    "documents by cuDNN": (DOCUMENTS | {"model.attention": "cudnn"}, {}, None),
    "documents by plain XLA": (DOCUMENTS | {"model.attention": "xla"}, {}, None),
}
REPORTED = ("step_seconds", "mfu", "temporary_bytes", "compile_seconds", "attention")


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_config()
    flags.DEFINE_integer("steps", 5, "timed steps of a variant; the median counts", lower_bound=1)
    flags.DEFINE_multi_enum("variant", list(VARIANTS), list(VARIANTS), "which; all by default")


def main() -> dict:
    """Times every variant in turn; returns the results, which are printed as they come, too."""
    base = command.read_spec()
    import jax

    from prope import loss, step
    from prope.cost.bench import bench_step

    usual = step.compiler_options
    results = {}
    for name in flags.FLAGS.variant:
        fields, options, rows = VARIANTS[name]

        def with_options(spec, mesh, options=options):
            return usual(spec, mesh) | options

        with contextlib.ExitStack() as patched:
            patched.enter_context(mock.patch.object(step, "compiler_options", with_options))
            if rows:
                patched.enter_context(mock.patch.dict(loss._ROWS_PER_CHUNK, {"NVIDIA": rows}))
            try:
                result = bench_step(base.replace(fields), flags.FLAGS.steps)
                results[name] = {key: result[key] for key in REPORTED}
            except Exception as error:  # the others are still worth their time
                first_line = str(error).partition("\n")[0][:200]
                results[name] = {"error": f"{type(error).__name__}: {first_line}"}
        print(json.dumps({name: results[name]}), flush=True)
        jax.clear_caches()
    return results


if __name__ == "__main__":
    command.run(main, define_flags)
