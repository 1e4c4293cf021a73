"""Plans for devices that are not here: small models, compiled for TPUs and GPUs where their compilers are installed."""

import json
import os
import runpy
import subprocess
import sys

import pytest
from conftest import CONFIG, ROOT, needs_cuda, needs_libtpu

from prope.config import default_config, differences
from prope.cost.plan import _does_not_fit, search
from prope.runtime import xla_flags

pytestmark = pytest.mark.optimized  # the compilers of TPUs and GPUs read that setting as well
SMALL = (
    "--config.model.head_dim=128",
    "--config.model.num_heads=4",
    "--config.model.num_kv_heads=1",
    "--config.model.embed_dim=256",
    "--config.model.hidden_dim=512",
    "--config.model.vocab_size=25600",
    "--config.model.dtype=bfloat16",
    "--config.data.seq_len=1024",
    "--config.data.tokenizer=none.model",
)


@pytest.fixture(scope="module")
def plan(run_command):
    def run(*arguments, **environment):
        # Tests may run side by side; libtpu would let one process in.
        return run_command(
            "prope.plan", CONFIG, *arguments, ALLOW_MULTIPLE_LIBTPU_LOAD="true", **environment
        )

    return run


@pytest.mark.slow
@needs_libtpu
def test_a_plan_says_what_fits_and_what_it_costs(plan):
    arguments = (
        *SMALL,
        "--topology=v5e:2x2",
        "--sequences_per_chip=2",
        "--config.model.remat=save_qkv",
    )
    found = plan(*arguments).result
    assert found["fits"] is True and found["chips"] == 4 and found["batch_size"] == 8
    assert found["attention"] == "splash"
    assert found["mesh"] == {"data": 1, "fsdp": 4, "context": 1, "tensor": 1}
    size = found["bytes_per_chip"]
    # float32, in quarters but for the norms, which are small and kept whole
    assert found["parameters"] <= size["parameters"] < found["parameters"] * 1.01
    assert size["optimizer_state"] == pytest.approx(2 * size["parameters"], rel=1e-3)
    assert found["peak_bytes_per_chip"] == sum(size.values()) < found["hbm_bytes_per_chip"]
    # A forward pass is a third of the model's FLOPs, and here all of it but attention and the head is repeated.
    assert 1.1 < found["hardware_flops_per_token"] / found["model_flops_per_token"] < 1.6
    needed = found["hardware_flops_per_token"] * 8 * 1024 / 4
    assert found["ideal_seconds_by"]["compute"] == pytest.approx(needed / 197e12)
    seconds = found["ideal_step_seconds"]
    assert seconds == max(found["ideal_seconds_by"].values())
    achieved = found["model_flops_per_token"] * 8 * 1024 / 4 / seconds  # of each of the 4 chips
    assert found["ideal_mfu"] == pytest.approx(achieved / 197e12)
    # Each layer is gathered once forward and once backward, in bfloat16; the head once.
    head = 25_600 * 256
    layers = found["parameters"] - head
    gathered = found["collectives"]["all-gather"]["bytes"]
    assert gathered == pytest.approx(2 * (2 * layers + head), rel=0.1)
    assert found["xla_flags"] == xla_flags.TPU["v5e"]


@needs_libtpu
@pytest.mark.slow
def test_on_64_chips_parameters_are_gathered_and_partly_beside_the_matmuls(plan):
    """Shards of 1024 / 64 columns, which without a flag XLA pads with zeros and sums, synchronously."""
    fields = {
        "embed_dim": 1024,
        "hidden_dim": 2048,
        "vocab_size": 8192,
        "attention": "xla",
        "remat": "minimal",
    }
    sizes = [f"--config.model.{name}={value}" for name, value in fields.items()] + [
        "--config.data.seq_len=128"
    ]
    found = plan(*SMALL, *sizes, "--topology=v5p:4x4x4", "--sequences_per_chip=1").result
    head = 8192 * 1024
    gathers, sums = (found["collectives"][kind] for kind in ("all-gather", "all-reduce"))
    layers = found["parameters"] - head
    assert gathers["bytes"] == pytest.approx(2 * (2 * layers + head), rel=0.1)
    assert gathers["async"] >= gathers["count"] / 3
    # Gradients are all-reduces: those of layers in bfloat16, those of the table, of its two uses, in float32.
    assert sums["bytes"] <= 2 * (2 * layers + 2 * 4 * head) * 1.1


@needs_libtpu
@pytest.mark.slow
def test_several_slices_hold_a_replica_each(plan):
    options = (
        "--topology=v5p:2x2x1",
        "--slices=2",
        "--config.mesh.tensor=2",
        "--sequences_per_chip=0.5",
    )
    found = plan(*SMALL, *options).result
    assert found["fits"] and found["chips"] == 8 and found["batch_size"] == 4
    assert found["mesh"] == {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}
    # A chip's quarter of the gradients goes to the other slice: the layers' in bfloat16; those of the embedding as a
    # table and as the head are summed after, in float32.
    head, between = 25_600 * 256, found["collectives"]["all-reduce between slices"]["bytes"]
    assert between == pytest.approx((2 * 4 * head + 2 * (found["parameters"] - head)) / 4, rel=0.01)
    assert found["ideal_seconds_by"]["between_slices"] == pytest.approx(between / 6.25e9)
    assert found["ideal_step_seconds"] == found["ideal_seconds_by"]["between_slices"], (
        "the slowest of all"
    )


@needs_cuda
@pytest.mark.slow
def test_a_plan_of_one_gpu_takes_its_kernels_and_the_share_of_its_memory_that_jax_takes(plan):
    found = plan(
        *SMALL, "--topology=h100:1", "--sequences_per_chip=2", "--config.model.remat=minimal"
    ).result
    layers = default_config().model.num_layers // 2  # of the tiny size
    assert found["attention"] == "cudnn" and (found["chips"], found["slices"]) == (1, 1)
    # Once forward and once backward a layer: the softmax statistics are saved, not computed again.
    assert (
        found["kernels"]["__cudnn$fmhaSoftmax"]
        == found["kernels"]["__cudnn$fmhaSoftmaxBackward"]
        == layers
    )
    assert found["collectives"] == {} and "not a measurement" in found["ideal_basis"]
    assert 73e9 < found["hbm_bytes_per_chip"] < 0.92 * 85e9
    assert found["fits"] and found["peak_bytes_per_chip"] == sum(found["bytes_per_chip"].values())
    assert found["bytes_per_chip"]["parameters"] == 4 * found["parameters"]
    # Computed again: by cuDNN's backward pass the scores of half of all pairs, by `minimal` attention's projection.
    again = layers * (4 * 128 * 1024 + 2 * 4 * 128 * 256)
    assert found["hardware_flops_per_token"] == found["model_flops_per_token"] + again
    assert (
        found["ideal_seconds_by"]["compute"]
        == found["hardware_flops_per_token"] * 2 * 1024 / 989e12
    )


@needs_cuda
@pytest.mark.slow
def test_each_node_of_gpus_holds_a_replica(plan):
    options = ("--topology=a100:2x2", "--sequences_per_chip=2", "--config.model.remat=save_qkv")
    found = plan(*SMALL, *options).result
    assert found["mesh"] == {"data": 2, "fsdp": 2, "context": 1, "tensor": 1} and (
        found["chips"],
        found["slices"],
    ) == (
        4,
        2,
    )
    # What the GPUs of a node gather does not leave it; between nodes a GPU's half of the gradients is summed: the
    # layers' in bfloat16; the embedding's in float32, apart or together as a table and as the head.
    head, traffic = 25_600 * 256, found["collectives"]
    assert (
        "all-gather between slices" not in traffic
        and traffic["all-gather"]["bytes"] > 2 * found["parameters"]
    )
    between = traffic["all-reduce between slices"]["bytes"]
    layers = 2 * (found["parameters"] - head)
    assert (4 * head + layers) / 2 * 0.99 < between < (8 * head + layers) / 2 * 1.01
    assert found["ideal_seconds_by"]["between_slices"] == pytest.approx(between / 25e9)
    assert (
        found["kernels"]["__cudnn$fmhaSoftmax"] == found["kernels"]["__cudnn$fmhaSoftmaxBackward"]
    )


# The plans for TPUs take 6 to 11 minutes each: the table in prope/README.md has them.
PAGES = {
    "gemma_300m_wiki": ["h100:1"],
    "gemma_2b_wiki on h100": ["h100:8x8", "--config.accumulation=4"],
}


def test_the_other_large_pages_take_the_same_step():
    """gemma_2b_flan.py, and table2.py with both: the step does not depend on where its tokens come from."""
    wiki, flan = (
        runpy.run_path(f"{ROOT}/configs/gemma_2b_{name}.py")["get_config"]()
        for name in ("wiki", "flan")
    )
    differing = {line.partition(":")[0] for line in differences(wiki, flan)}
    assert differing == {"data.dataset", "data.mixture", "data.template"}
    assert (wiki.accumulation, wiki.model.remat) == (flan.accumulation, flan.model.remat)


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("page", PAGES)
def test_every_page_fits_the_gpus_that_it_names(run_command, page):
    topology, *flags = PAGES[page]
    file = f"--config={ROOT}/configs/{page.split()[0]}.py"
    done = run_command(
        "prope.plan", file, f"--topology={topology}", *flags, ALLOW_MULTIPLE_LIBTPU_LOAD="true"
    )
    assert done.result["fits"], done.result["peak_bytes_per_chip"]
    if topology == "h100:8x8":
        traffic = done.result["collectives"]
        gathers, sums = traffic["all-gather"], traffic["reduce-scatter"]
        assert gathers["async"] == gathers["count"] and sums["async"] > 0.9 * sums["count"], (
            "beside the matmuls"
        )
        assert traffic["all-reduce"]["bytes"] < 1e3, "within a node gradients are reduce-scattered"


@needs_libtpu
def test_what_does_not_fit_is_told_with_its_size(plan):
    found = plan(*SMALL, "--topology=v5e:1x1", "--config.batch_size=32768").result
    assert found["fits"] is False and found["peak_bytes_per_chip"] > found["hbm_bytes_per_chip"]
    assert found["ideal_step_seconds"] is None


@pytest.mark.parametrize(
    ("jump", "chunk", "most"), [(0, 0, (1, 2, 4, 10)), (3, 0, (1, 2, 4, 9)), (0, 15, (1, 1, 3, 6))]
)
def test_the_search_finds_the_largest_batch_that_fits(monkeypatch, jump, chunk, most):
    """With a compiler made up here: 4 chips of 100 bytes; a batch of 5 or more may take `jump` more than the trend.

    Another `chunk` is taken by the first two rows alone, as by a head that computes a limited number of logits at once.
    """
    each = {"none": 60, "minimal": 40, "save_qkv": 20, "full": 9}
    ideal = {"none": 4, "minimal": 3, "save_qkv": 2, "full": 1}

    def compiled(config, *_):
        rows = config.batch_size // 4
        size = 10 + rows * each[config.model.remat] + jump * (rows > 4) + chunk * min(rows, 2)
        found = {
            "remat": config.model.remat,
            "batch_size": config.batch_size,
            "sequences_per_chip": rows,
        }
        found |= {
            "peak_bytes_per_chip": size,
            "hbm_bytes_per_chip": 100,
            "fits": size <= 100,
            "ideal_mfu": rows,
        }
        return found | {"ideal_tokens_per_second": ideal[config.model.remat] * rows}

    monkeypatch.setattr("prope.cost.plan.plan", compiled)
    found = search(default_config(), "v5e:2x2", [None] * 4, {})
    largest = {
        remat: max(
            row["sequences_per_chip"]
            for row in found["search"]
            if row["remat"] == remat and row["fits"]
        )
        for remat in each
    }
    assert largest == dict(zip(each, most, strict=True))
    assert found["ideal_tokens_per_second"] == max(ideal[remat] * largest[remat] for remat in each)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["splash", "xla"])
def test_no_array_is_as_large_as_all_scores_or_all_logits(attention):
    """In a process of its own: libtpu cannot be let go."""
    program = f"""
import functools, json, jax
from prope import sharding, step
from compiled import array_shapes
from prope.cost import topology
from prope.config import default_config
from prope.optimizer import make_optimizer
config = default_config()
config.model.update(num_layers=2, num_heads=4, head_dim=128, vocab_size=25600, dtype="bfloat16", remat="full")
config.model.attention = {attention!r}
config.batch_size, config.data.seq_len = 4, 2048
mesh = sharding.make_mesh(devices=topology.find_devices("v5e:2x2", 1))
optimizer = make_optimizer(config)
state = sharding.with_shardings(jax.eval_shape(functools.partial(step.init_state, config, optimizer)), mesh)
text = step.compile_step(config, optimizer, mesh, state).as_text()
print(json.dumps([dims for _, dims in array_shapes(text)]))
"""
    environment = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{ROOT}/tests",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shapes = json.loads(done.stdout.splitlines()[-1])
    assert [2048, 256] in [shape[-2:] for shape in shapes], "the hidden states of a sequence"
    for shape in shapes:
        assert sum(size == 2048 for size in shape) < 2, f"scores: {shape}"
        assert not {2048, 25_600} <= set(shape), f"logits: {shape}"


@pytest.mark.parametrize(("topology", "extra"), [("v5e:2x2", "tpu"), ("h100:1", "plan-gpu")])
def test_without_a_compiler_its_extra_is_named(plan, tmp_path, topology, extra):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u; found = u.find_spec\n"
        "hidden = ('libtpu', 'jax_cuda12_plugin', 'jax_cuda13_plugin')\n"
        "u.find_spec = lambda name, *rest: None if name in hidden else found(name, *rest)\n"
    )
    outcome = plan(f"--topology={topology}", PYTHONPATH=str(tmp_path))
    assert outcome.code == 2 and f"pip install -e '.[{extra}]'" in outcome.error


@needs_libtpu
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--topology=v9:2x2"],
            "--topology=v9:2x2: must be a TPU (v5e, v5p, v6e) and the shape of a slice",
        ),
        (["--topology=v5e"], "--topology=v5e: must be a TPU"),
        (
            ["--topology=h100"],
            "or a GPU (a100, h100, h200, b200) and nodes x GPUs of a node, such as h100:8x8",
        ),
        (["--topology=h100:1x8x8"], "--topology=h100:1x8x8: must be a TPU"),
        (["--topology=h100:0"], "--topology=h100:0: must be a TPU"),
        (
            ["--topology=h100:8", "--slices=2"],
            "--slices=2: is of TPUs; nodes are part of the topology: h100:2x8",
        ),
        (["--topology=v5e:3x3"], "--topology=v5e:3x3: "),
        (
            ["--topology=v5e:2x2", "--sequences_per_chip=0.3"],
            "--sequences_per_chip=0.3: is 1.2 on 4 chips",
        ),
        (
            ["--topology=v5e:2x2", "--sequences_per_chip=nan"],
            "--sequences_per_chip=nan: must be a number",
        ),
        (
            ["--topology=v5e:2x2", "--sequences_per_chip=inf"],
            "--sequences_per_chip=inf: is inf on 4 chips",
        ),
        (
            ["--topology=v5e:2x2", "--config.batch_size=6"],
            "config.batch_size=6: must be a multiple of 4",
        ),
        (
            ["--topology=v5e:2x2", "--config.model.attention=cudnn"],
            "attention=cudnn cannot be used",
        ),
        (
            ["--topology=v5e:2x2", "--config.model.rope_percentage=75"],
            "rope_percentage=75.0: must be a fraction",
        ),
    ],
)
def test_what_cannot_be_planned_is_answered_in_one_line(plan, arguments, says):
    assert says in plan(*arguments).error


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.50G of "
            "15.75G hbm. Exceeded hbm capacity by 1.75G.",
            17.5 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (49.06G) exceeds available HBM (15.75G).",
            round(49.06 * 2**30),
        ),
        ("RESOURCE_EXHAUSTED: something else", None),
    ],
)
def test_the_compiler_s_refusals_are_read(message, size):
    assert _does_not_fit(message)["peak_bytes_per_chip"] == size


@pytest.mark.parametrize("platform", xla_flags.PLATFORMS)
def test_a_platform_s_flags_reach_the_command_and_what_the_user_set_wins(platform):
    environment = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "LIBTPU_INIT_ARGS": "--mine=1"}
    command = ["bash", "launch/run.sh", platform, "env"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    for name, value in xla_flags.environment(platform).items():
        assert found[name] == (f"{value} --mine=1" if name == "LIBTPU_INIT_ARGS" else value)
    assert ("LIBTPU_INIT_ARGS" in xla_flags.environment(platform)) == (platform in xla_flags.TPU)


@pytest.mark.parametrize(
    ("capabilities", "processes", "set_to"),
    [
        ("9.0\n9.0", "1", "1"),
        ("9.0", "8", "1"),
        ("9.0", "1", None),
        ("10.0\n10.0", "1", None),
        ("8.0\n8.0", "1", None),
    ],
)
def test_a_gpu_s_memory_and_queues_are_set_for_it(tmp_path, capabilities, processes, set_to):
    """By launch/run.sh; nvidia-smi is made up here."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{capabilities}'\n")
    program.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{sys.prefix}/bin:/usr/bin:/bin",
        "PROPE_PROCESSES": processes,
    }
    name, command = "XLA_PYTHON_CLIENT_MEM_FRACTION", ["bash", "launch/run.sh", "gpu", "env"]
    for own, expected in (({}, "0.92"), ({name: "0.5"}, "0.5")):
        done = subprocess.run(
            command, cwd=ROOT, env=environment | own, capture_output=True, text=True, check=True
        )
        found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        assert found[name] == expected
        assert found.get("CUDA_DEVICE_MAX_CONNECTIONS") == set_to


@pytest.mark.parametrize("name", ["XLA_FLAGS"])
def test_xla_knows_the_gpu_s_flags(name):
    """Unknown ones end the process."""
    value = xla_flags.environment("gpu")[name]
    program = "import jax; jax.devices(); print('started')"
    environment = os.environ | {name: value, "JAX_OPTIMIZATION_LEVEL": "O1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "started\n", done.stderr[-500:]
    broken = environment | {name: value.replace("xla_gpu_enable", "xla_gpu_no_such")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=broken, capture_output=True, text=True
    )
    assert done.returncode != 0
