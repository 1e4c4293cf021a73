"""Plans for devices that are not here: small models, compiled for TPUs and GPUs."""

import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest
from support.commands import CONFIG, ROOT, needs_cuda, needs_libtpu

from prope.cost.plan import _does_not_fit, search
from prope.errors import UsageError, to_user_error
from prope.runtime import xla_flags
from prope.spec.run import Spec
from prope.step import ASYNC_FUSION, compiler_options

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
LAYERS = Spec().model.num_layers // 2  # layers of the tiny size
HEAD = 25_600 * 256


@pytest.fixture(scope="module")
def plan(run_command):
    def run(*arguments, config=CONFIG, **environment):
        return run_command("prope.plan", config, *arguments, **environment)

    return run


@pytest.fixture(scope="module")
def plan_small(plan):
    def run(*arguments):
        return plan(*SMALL, *arguments).result

    return run


# --- What a plan holds --------------------------------------------------------------------------


@pytest.mark.slow
@needs_libtpu
def test_a_plan_says_what_fits_and_what_it_costs(plan_small):
    remat = "--config.model.remat=save_qkv"
    result = plan_small("--topology=v5e:2x2", "--sequences_per_chip=2", remat)
    assert result["fits"] is True
    assert result["chips"] == 4
    assert result["batch_size"] == 8
    assert result["attention"] == "splash"
    assert result["mesh"] == {"data": 1, "fsdp": 4, "context": 1, "tensor": 1}
    assert result["xla_flags"] == xla_flags.TPU["v5e"] | {ASYNC_FUSION: True}, "64 columns"
    parameters = result["parameters"]
    sizes = result["bytes_per_chip"]
    # float32, in quarters but for the norms, which are small and kept whole.
    assert parameters <= sizes["parameters"] < parameters * 1.01
    assert sizes["optimizer_state"] == pytest.approx(2 * sizes["parameters"], rel=1e-3)
    assert result["peak_bytes_per_chip"] == sum(sizes.values()) < result["hbm_bytes_per_chip"]
    # A forward pass is a third of the model's FLOPs; all but attention and the head is repeated.
    model_flops = result["model_flops_per_token"]
    assert 1.1 < result["hardware_flops_per_token"] / model_flops < 1.6
    tokens_per_chip = 8 * 1024 / 4
    needed = result["hardware_flops_per_token"] * tokens_per_chip
    seconds = result["ideal_step_seconds"]
    assert result["ideal_seconds_by"]["compute"] == pytest.approx(needed / 197e12)
    assert seconds == max(result["ideal_seconds_by"].values())
    assert result["ideal_mfu"] == pytest.approx(model_flops * tokens_per_chip / seconds / 197e12)
    classes = result["classes"]
    assert sum(row["bytes"] for row in classes.values()) == result["hbm_traffic_bytes"]
    assert classes["matmul head"]["flops"] == 6 * HEAD * tokens_per_chip
    assert {"matmul MLP", "attention", "optimizer", "norms", "collectives"} < classes.keys()
    # Each layer is gathered once forward and once backward, in bfloat16; the head once.
    gathered = 2 * (2 * (parameters - HEAD) + HEAD)
    assert result["collectives"]["all-gather"]["bytes"] == pytest.approx(gathered, rel=0.1)


@pytest.mark.slow
@needs_libtpu
def test_on_64_chips_parameters_are_gathered_partly_beside_the_matmuls(plan_small):
    """Shards of 1024 / 64 columns, which without a flag XLA pads with zeros and sums."""
    result = plan_small(
        "--topology=v5p:4x4x4",
        "--sequences_per_chip=1",
        "--config.model.embed_dim=1024",
        "--config.model.hidden_dim=2048",
        "--config.model.vocab_size=8192",
        "--config.model.attention=xla",
        "--config.model.remat=minimal",
        "--config.data.seq_len=128",
    )
    head = 8192 * 1024
    layers = result["parameters"] - head
    gathers = result["collectives"]["all-gather"]
    assert gathers["bytes"] == pytest.approx(2 * (2 * layers + head), rel=0.1)
    assert gathers["async"] >= gathers["count"] / 3
    # Gradients are all-reduced: those of layers in bfloat16, those of the table's two uses in
    # float32.
    sums = result["collectives"]["all-reduce"]
    assert sums["bytes"] <= 2 * (2 * layers + 2 * 4 * head) * 1.1


@pytest.mark.parametrize(
    ("platform", "shape", "embed_dim", "gather", "users", "expected"),
    [
        ("tpu", {"fsdp": 16}, 2048, "head", "", False),
        ("tpu without splash", {"fsdp": 16}, 2048, "head", "", True),
        ("tpu", {"fsdp": 16}, 2048, "ahead", "", True),
        ("tpu", {"fsdp": 16}, 2032, "head", "", True),
        ("tpu", {"fsdp": 16, "data": 2}, 2048, "head", "", True),
        ("tpu", {"fsdp": 1}, 2048, "head", "", True),
        ("tpu", {"fsdp": 16}, 2048, "head", f"--{ASYNC_FUSION}=true", None),
        ("gpu", {"fsdp": 16}, 2048, "head", "", None),
    ],
)
def test_when_collectives_run_beside_matmuls(
    monkeypatch, platform, shape, embed_dim, gather, users, expected
):
    """Shards of 128 columns or 127; other axes of the mesh; what a user has set."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", users)
    shape = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | shape
    platform, _, without_splash = platform.partition(" ")
    devices = np.full(list(shape.values()), types.SimpleNamespace(platform=platform))
    mesh = types.SimpleNamespace(shape=shape, devices=devices, size=devices.size)
    attention = "xla" if without_splash else "splash"
    fields = {"model.embed_dim": embed_dim, "model.attention": attention, "mesh.gather": gather}
    options = {} if expected is None else {ASYNC_FUSION: expected}
    assert compiler_options(Spec().replace(fields), mesh) == options


@pytest.mark.slow
@needs_libtpu
def test_on_few_chips_collectives_run_beside_matmuls_if_asked(plan_small):
    """Shards of 512 / 4 columns."""
    result = plan_small(
        "--topology=v5e:2x2",
        "--sequences_per_chip=2",
        "--config.model.embed_dim=512",
        "--config.model.remat=full",
        "--config.mesh.gather=ahead",
    )
    gathers = result["collectives"]["all-gather"]
    assert gathers["async"] > 0
    table = 2 * 25_600 * 512
    layers = 2 * 2 * (result["parameters"] - 25_600 * 512)
    assert gathers["bytes"] == pytest.approx(layers + table, rel=0.1)


@pytest.mark.slow
@needs_libtpu
def test_several_slices_hold_a_replica_each(plan_small):
    slices = ("--topology=v5p:2x2x1", "--slices=2", "--sequences_per_chip=0.5")
    result = plan_small(*slices, "--config.mesh.tensor=2")
    assert result["fits"]
    assert result["chips"] == 8
    assert result["batch_size"] == 4
    assert result["mesh"] == {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}
    # A chip's quarter of the gradients goes to the other slice: the layers' in bfloat16; those of
    # the embedding as a table and as the head are summed after, in float32.
    gradients = 2 * 4 * HEAD + 2 * (result["parameters"] - HEAD)
    between = result["collectives"]["all-reduce between slices"]["bytes"]
    assert between == pytest.approx(gradients / 4, rel=0.01)
    seconds = result["ideal_seconds_by"]["between_slices"]
    assert seconds == pytest.approx(between / 6.25e9)
    assert seconds == result["ideal_step_seconds"], "the slowest of all"


@pytest.mark.slow
@needs_cuda
def test_a_plan_of_one_gpu_has_its_kernels_and_the_memory_that_jax_takes(plan_small):
    remat = "--config.model.remat=minimal"
    result = plan_small("--topology=h100:1", "--sequences_per_chip=2", remat)
    assert result["attention"] == "cudnn"
    assert result["chips"] == result["slices"] == 1
    # Once forward and once backward a layer: the softmax statistics are saved.
    assert result["kernels"]["__cudnn$fmhaSoftmax"] == LAYERS
    assert result["kernels"]["__cudnn$fmhaSoftmaxBackward"] == LAYERS
    assert result["collectives"] == {}
    assert "not a measurement" in result["ideal_basis"]
    assert 73e9 < result["hbm_bytes_per_chip"] < 0.92 * 85e9
    assert result["fits"]
    assert result["peak_bytes_per_chip"] == sum(result["bytes_per_chip"].values())
    assert result["bytes_per_chip"]["parameters"] == 4 * result["parameters"]
    # cuDNN's backward pass computes the scores of half of all pairs again, `minimal` attention's
    # projection.
    scores = 4 * 128 * 1024
    projection = 2 * 4 * 128 * 256
    hardware_flops = result["hardware_flops_per_token"]
    assert hardware_flops == result["model_flops_per_token"] + LAYERS * (scores + projection)
    assert result["ideal_seconds_by"]["compute"] == hardware_flops * 2 * 1024 / 989e12
    classes = result["classes"]
    assert sum(row["bytes"] for row in classes.values()) == result["hbm_traffic_bytes"]
    kernels = 2 * LAYERS
    assert classes["attention"]["kernels"] == kernels
    assert classes["matmul head"]["flops"] == 6 * HEAD * 2 * 1024


@pytest.mark.slow
@needs_cuda
def test_each_node_of_gpus_holds_a_replica(plan_small):
    remat = "--config.model.remat=save_qkv"
    result = plan_small("--topology=a100:2x2", "--sequences_per_chip=2", remat)
    assert result["mesh"] == {"data": 2, "fsdp": 2, "context": 1, "tensor": 1}
    assert result["chips"] == 4
    assert result["slices"] == 2
    # What the GPUs of a node gather does not leave it.
    traffic = result["collectives"]
    assert "all-gather between slices" not in traffic
    assert traffic["all-gather"]["bytes"] > 2 * result["parameters"]
    # Between nodes a GPU's half of the gradients is summed: the layers' in bfloat16; the
    # embedding's in float32, apart or together as a table and as the head.
    layers = 2 * (result["parameters"] - HEAD)
    between = traffic["all-reduce between slices"]["bytes"]
    assert (4 * HEAD + layers) / 2 * 0.99 < between < (8 * HEAD + layers) / 2 * 1.01
    assert result["ideal_seconds_by"]["between_slices"] == pytest.approx(between / 25e9)
    kernels = result["kernels"]
    assert kernels["__cudnn$fmhaSoftmax"] == kernels["__cudnn$fmhaSoftmaxBackward"]


@needs_libtpu
def test_what_does_not_fit_is_told_with_its_size(plan_small):
    result = plan_small("--topology=v5e:1x1", "--config.batch_size=32768")
    assert result["fits"] is False
    assert result["peak_bytes_per_chip"] > result["hbm_bytes_per_chip"]
    assert result["ideal_step_seconds"] is None


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 17.50G of 15.75G hbm. Exceeded hbm capacity by 1.75G.",
            17.5 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (49.06G) exceeds "
            "available HBM (15.75G).",
            round(49.06 * 2**30),
        ),
    ],
)
def test_the_size_in_a_compiler_s_error_is_read(message, size):
    assert _does_not_fit(message)["peak_bytes_per_chip"] == size


# --- Pages and programs -------------------------------------------------------------------------


# With their flags plans for TPUs take minutes: the table in prope/cost/README.md has them.


@pytest.mark.slow
@needs_cuda
def test_gemma_2b_fits_nodes_of_gpus_and_exchanges_beside_the_matmuls(plan):
    page = f"--config={ROOT}/configs/gemma_2b_wiki.py"
    nodes = ("--topology=h100:8x8", "--config.accumulation=4")
    result = plan(*nodes, config=page).result
    assert result["fits"], result["peak_bytes_per_chip"]
    traffic = result["collectives"]
    gathers = traffic["all-gather"]
    sums = traffic["reduce-scatter"]
    assert gathers["async"] == gathers["count"]
    assert sums["async"] > 0.9 * sums["count"]
    assert traffic["all-reduce"]["bytes"] < 1e3, "within a node gradients are reduce-scattered"


@pytest.mark.slow
@needs_libtpu
def test_gemma_2b_takes_no_more_memory_of_a_tpu(plan):
    """A bound of a regression, 15.2 GB when it was set.

    Without the flags, which change the memory by 1 %, and with which compiling takes longer.
    """
    result = plan(
        "--topology=v5e:4x4",
        "--sequences_per_chip=4",
        "--config.model.remat=full",
        "--noxla_flags",
        config=f"--config={ROOT}/configs/gemma_2b_wiki.py",
    ).result
    assert result["fits"]
    assert result["peak_bytes_per_chip"] <= 15.5e9


LARGE_SHAPES = """
import json
from support.compiled import array_shapes
from prope import step
from prope.cost.topology import find_devices
from prope.spec.data import DataSpec
from prope.spec.model import ModelSpec
from prope.spec.run import Spec
sizes = dict(num_layers=2, num_heads=4, head_dim=128, vocab_size=25600)
model = ModelSpec(**sizes, dtype="bfloat16", remat="full", attention="xla")
spec = Spec(batch_size=4, model=model, data=DataSpec(seq_len=2048))
spec, mesh, optimizer, state = step.prepare(spec, find_devices("v5e:2x2", 1))
text = step.compile_step(spec, optimizer, mesh, state).as_text()
print(json.dumps([dims for _, dims in array_shapes(text)]))
"""


@pytest.mark.slow
@needs_libtpu
def test_no_array_is_as_large_as_all_scores_or_all_logits():
    """With splash attention test_context looks for them, at 131,072 tokens.

    Runs in a process of its own: libtpu cannot be let go.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}/tests"}
    command = [sys.executable, "-c", LARGE_SHAPES]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shapes = json.loads(done.stdout.splitlines()[-1])
    assert [2048, 256] in [shape[-2:] for shape in shapes], "the hidden states of a sequence"
    for shape in shapes:
        assert shape.count(2048) < 2, f"scores: {shape}"
        assert not {2048, 25_600} <= set(shape), f"logits: {shape}"


def test_too_little_vmem_for_a_kernel_is_no_matter_of_the_batch():
    scoped = (
        "Scoped allocation with size 21.84M and limit 20.00M exceeded scoped vmem limit by 1.8M"
    )
    message = f"RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out. {scoped}"
    remedy = "needs 21.84M of VMEM; add --xla_tpu_scoped_vmem_limit_kib=22365 or more"
    with pytest.raises(UsageError, match=remedy):
        _does_not_fit(message)
    in_training = str(to_user_error(RuntimeError(message)))
    assert remedy in in_training and "batch" not in in_training


# --- Search -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jump", "chunk", "sizes", "gather", "largest"),
    [
        (0, 0, (0, 1), "head", {"none": 1, "minimal": 2, "save_qkv": 4, "full": 10}),
        (3, 0, (0, 6), "ahead", {"none": 1, "minimal": 2, "save_qkv": 4, "full": 9}),
        (0, 15, (0, 7), "head", {"none": 1, "minimal": 1, "save_qkv": 3, "full": 6}),
    ],
)
def test_the_search_finds_the_largest_batch_that_fits(
    monkeypatch, jump, chunk, sizes, gather, largest
):
    """With a made-up compiler for 4 chips of 100 bytes.

    A batch of 5 rows or more takes `jump` more than the trend. The first two rows take a `chunk`
    more each, as of a head that computes a limited number of logits at once. `sizes` are those of
    what is gathered besides: the last batch found, of 100 or 94 bytes, has "ahead" if it fits.
    """
    bytes_per_row = {"none": 60, "minimal": 40, "save_qkv": 20, "full": 9}
    speeds = {"none": 4, "minimal": 3, "save_qkv": 2, "full": 1}
    gathered = dict(zip(("head", "ahead"), sizes, strict=True))

    def compiled(spec, *_):
        remat = spec.model.remat
        rows = spec.batch_size // 4
        size = 10 + rows * bytes_per_row[remat] + jump * (rows > 4) + chunk * min(rows, 2)
        size += gathered[spec.mesh.gather]
        return {
            "remat": remat,
            "gather": spec.mesh.gather,
            "xla_flags": {ASYNC_FUSION: spec.mesh.gather == "ahead"},
            "batch_size": spec.batch_size,
            "sequences_per_chip": rows,
            "peak_bytes_per_chip": size,
            "hbm_bytes_per_chip": 100,
            "fits": size <= 100,
            "ideal_mfu": rows,
            "ideal_tokens_per_second": speeds[remat] * rows,
        }

    monkeypatch.setattr("prope.cost.plan.plan", compiled)
    result = search(Spec(), "v5e:2x2", [None] * 4, {})
    fitting = dict.fromkeys(largest, 0)
    for row in result["search"]:
        if row["fits"]:
            fitting[row["remat"]] = max(fitting[row["remat"]], row["sequences_per_chip"])
    assert fitting == largest
    fastest = max(speeds[remat] * rows for remat, rows in largest.items())
    assert result["ideal_tokens_per_second"] == fastest
    assert result["gather"] == gather
    assert result["fits"]


# --- Several plans at a time ----------------------------------------------------------------------

HOLD = """
import sys
from prope.cost.topology import find_devices
print(len(find_devices("v5e:2x2", 1)), flush=True)
sys.stdin.read()
"""


@needs_libtpu
def test_a_plan_beside_another_reaches_the_compiler_too(monkeypatch):
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    command = [sys.executable, "-c", HOLD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout.readline() == "4\n"
        second = subprocess.run(command, input="", capture_output=True, text=True, cwd=ROOT)
        assert first.poll() is None, "both hold the compiler"
        first.stdin.close()
    assert second.stdout == "4\n", second.stderr[-2000:]
    assert first.returncode == second.returncode == 0


# --- Refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "extra"), [("v5e:2x2", "tpu"), ("h100:1", "plan-gpu")])
def test_without_a_compiler_its_extra_is_named(plan, tmp_path, topology, extra):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u; find = u.find_spec\n"
        "hidden = ('libtpu', 'jax_cuda12_plugin', 'jax_cuda13_plugin')\n"
        "u.find_spec = lambda name, *rest: None if name in hidden else find(name, *rest)\n"
    )
    outcome = plan(f"--topology={topology}", PYTHONPATH=str(tmp_path))
    assert outcome.code == 2
    assert f"pip install -e '.[{extra}]'" in outcome.error


# Each has the name that the line must have in its last argument.
REFUSED = [
    "--topology=v9:2x2",
    "--topology=h100:1x8x8",
    "--topology=h100:0",
    "--topology=v5e:3x3",
    "--topology=h100:8 --slices=2",
    "--sequences_per_chip=0.3",
    "--sequences_per_chip=inf",
    "--config.batch_size=6",
    "--config.model.attention=cudnn",
    "--config.model.rope_percentage=75.0",
]


@needs_libtpu
def test_invalid_input_is_refused_in_one_line(plan):
    for arguments in REFUSED:
        outcome = plan("--topology=v5e:2x2", *arguments.split())
        assert outcome.code == 2
        assert arguments.split()[-1].removeprefix("--") in outcome.error


# --- XLA's flags --------------------------------------------------------------------------------


def run_with_flags(platform: str, **environment: str) -> dict[str, str]:
    """The environment of a command that launch/run.sh runs for a platform."""
    environment.setdefault("PATH", f"{sys.prefix}/bin:/usr/bin:/bin")
    command = ["bash", "launch/run.sh", platform, "env"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


@pytest.mark.parametrize("platform", xla_flags.PLATFORMS)
def test_a_platform_s_flags_reach_the_command_and_what_the_user_set_wins(platform):
    expected = xla_flags.environment(platform)
    assert ("LIBTPU_INIT_ARGS" in expected) == (platform in xla_flags.TPU)
    if "LIBTPU_INIT_ARGS" in expected:
        expected["LIBTPU_INIT_ARGS"] += " --mine=1"
    variables = run_with_flags(platform, LIBTPU_INIT_ARGS="--mine=1")
    assert {name: variables[name] for name in expected} == expected


# (What nvidia-smi prints and ends with, variables, connections, whether GPUs exchange).
@pytest.mark.parametrize(
    ("script", "environment", "connections", "exchanges"),
    [
        ("echo 9.0; echo 9.0", {}, "1", True),
        ("echo 9.0", {"PROPE_PROCESSES": "auto"}, "1", True),
        ("echo 9.0", {}, None, False),
        ("echo 10.0; echo 10.0", {}, None, True),
        ("echo 8.0", {"PROPE_PROCESSES": "0/1@localhost:8476"}, None, False),
        ("echo 8.0", {"PROPE_PROCESSES": "0/2@localhost:8476"}, None, True),
        ("echo 8.0; echo 8.0", {"CUDA_VISIBLE_DEVICES": "1"}, None, False),
        ("echo 8.0; exit 9", {}, None, True),  # it finds nothing, and there may be several
    ],
)
def test_a_gpu_s_memory_and_flags_are_set_for_it(
    tmp_path, script, environment, connections, exchanges
):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    environment["PATH"] = f"{tmp_path}:{sys.prefix}/bin:/usr/bin:/bin"
    variables = run_with_flags("gpu", **environment)
    assert variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"
    assert variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections
    for name in ("XLA_FLAGS", "JAX_OPTIMIZATION_LEVEL", "NCCL_NVLS_ENABLE"):
        assert (name in variables) == exchanges
    variables = run_with_flags("gpu", XLA_PYTHON_CLIENT_MEM_FRACTION="0.5", **environment)
    assert variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"


def test_xla_knows_the_gpu_s_flags():
    """Unknown ones end the process."""
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in xla_flags.GPU.items())
    command = [sys.executable, "-c", "import jax; jax.devices(); print('started')"]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_OPTIMIZATION_LEVEL": "O1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "started\n", done.stderr[-500:]
