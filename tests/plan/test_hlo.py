"""Traffic against arithmetic done by hand, of modules written here and of compiled programs."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from support.commands import ROOT, devices_flags, needs_libtpu

from prope.cost import hlo, traffic
from prope.cost.classes import count_classes
from prope.cost.flops import CHIPS


def collectives(text, chips_per_node=None):
    return traffic.collectives(hlo.parse(text), chips_per_node)


def hbm_bytes(text):
    return traffic.hbm_bytes(hlo.parse(text))


def counted(number, size, asynchronous):
    return {"count": number, "bytes": size, "async": asynchronous}


# A loop of 8 / 2 rounds whose length only its condition tells; an array in VMEM; an update in
# place; a permute in two halves; an all-gather that one fusion starts, another runs beside, and a
# third ends; one all-reduce of two arrays.
MODULE = """
HloModule hand, is_scheduled=true

%put (stack: f32[4,1024], row: f32[1024], i: s32[]) -> f32[4,1024] {
  %stack = f32[4,1024]{1,0:T(8,128)} parameter(0)
  %row = f32[1024]{0:T(1024)S(1)} parameter(1)
  %bitcast.1 = f32[1,1024]{1,0:T(8,128)} bitcast(%row)
  %i = s32[]{:T(128)S(6)} parameter(2)
  %zero.1 = s32[]{:T(128)} constant(0)
  ROOT %put.1 = f32[4,1024]{1,0:T(8,128)} dynamic-update-slice(%stack, %bitcast.1, %i, %zero.1)
}

%take (stack: f32[4,1024], i: s32[]) -> f32[1024] {
  %stack.2 = f32[4,1024]{1,0:T(8,128)} parameter(0)
  %i.2 = s32[]{:T(128)S(6)} parameter(1)
  %zero.2 = s32[]{:T(128)} constant(0)
  %take.1 = f32[1,1024]{1,0:T(8,128)} dynamic-slice(%stack.2, %i.2, %zero.2)
  ROOT %bitcast.2 = f32[1024]{0:T(1024)} bitcast(%take.1)
}

%condition (state: (s32[], f32[4,1024], f32[1024])) -> pred[] {
  %limit = s32[]{:T(128)} constant(8)
  %state.1 = (s32[]{:T(128)}, f32[4,1024]{1,0}, f32[1024]{0:T(1024)S(1)}) parameter(0)
  %i.3 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.3, %limit), direction=LT
}

%body (state: (s32[], f32[4,1024], f32[1024])) -> (s32[], f32[4,1024], ..) {
  %state.2 = (s32[]{:T(128)}, f32[4,1024]{1,0:T(8,128)}, f32[1024]{0:T(1024)S(1)}) parameter(0)
  %i.4 = s32[]{:T(128)} get-tuple-element(%state.2), index=0
  %stack.4 = f32[4,1024]{1,0:T(8,128)} get-tuple-element(%state.2), index=1
  %row.4 = f32[1024]{0:T(1024)S(1)} get-tuple-element(%state.2), index=2
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)S(6)} add(%i.4, %two)
  %send = (f32[1024]{0:S(1)}, f32[1024]{0:S(1)}, u32[]{:S(2)}) collective-permute-start(%row.4)
  %sent = f32[1024]{0:T(1024)S(1)} collective-permute-done(%send)
  %updated = f32[4,1024]{1,0:T(8,128)} fusion(%stack.4, %sent, %next), kind=kLoop, calls=%put
  ROOT %after = (s32[], f32[4,1024]{1,0}, f32[1024]{0:S(1)}) tuple(%next, %updated, %sent)
}

%start (part: bf16[64]) -> (bf16[64], bf16[1024], s32[2], /*index=3*/u32[]) {
  %part.1 = bf16[64]{0:T(1024)} parameter(0)
  %gather.1 = bf16[1024]{0:T(1024)} all-gather(%part.1), frontend_attributes={chain_id="0"}
  ROOT %call.1 = (bf16[64]{0}, bf16[1024]{0}, s32[2]{0:S(4)}, /*index=3*/u32[]{:S(2)}) \
custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%twice (x: f32[2048]) -> f32[2048] {
  %x.1 = f32[2048]{0:T(1024)} parameter(0)
  ROOT %sum.1 = f32[2048]{0:T(1024)} add(%x.1, %x.1)
}

%beside (part: bf16[64], whole: bf16[1024], x: f32[2048]) -> (f32[2048], bf16[64], bf16[1024]) {
  %part.2 = bf16[64]{0:T(1024)} parameter(0)
  %whole.2 = bf16[1024]{0:T(1024)} parameter(1)
  %x.2 = f32[2048]{0:T(1024)} parameter(2)
  %sum.2 = f32[2048]{0:T(1024)} fusion(%x.2), kind=kLoop, calls=%twice
  %gather.2 = bf16[1024]{0:T(1024)} all-gather(%part.2), frontend_attributes={chain_id="0"}
  ROOT %tuple.2 = (f32[2048]{0}, bf16[64]{0}, bf16[1024]{0}) tuple(%sum.2, %part.2, %gather.2)
}

%end (part: bf16[64], whole: bf16[1024]) -> bf16[1024] {
  %part.3 = bf16[64]{0:T(1024)} parameter(0)
  %whole.3 = bf16[1024]{0:T(1024)} parameter(1)
  %gather.3 = bf16[1024]{0:T(1024)} all-gather(%part.3), frontend_attributes={chain_id="0"}
  ROOT %call.3 = bf16[1024]{0} custom-call(%part.3, %whole.3, %gather.3), \
custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (stack: f32[4,1024], row: f32[1024], part: bf16[64], x: f32[2048]) -> f32[1024] {
  %stack.0 = f32[4,1024]{1,0:T(8,128)} parameter(0)
  %row.0 = f32[1024]{0:T(1024)} parameter(1)
  %part.0 = bf16[64]{0:T(1024)} parameter(2)
  %x.0 = f32[2048]{0:T(1024)} parameter(3)
  %zero.0 = s32[]{:T(128)} constant(0)
  %copy.0 = s32[]{:T(128)S(6)} copy(%zero.0)
  %fetch = (f32[1024]{0:T(1024)S(1)}, f32[1024]{0:T(1024)}, u32[]{:S(2)}) copy-start(%row.0)
  %fetched = f32[1024]{0:T(1024)S(1)} copy-done(%fetch)
  %before = (s32[], f32[4,1024]{1,0}, f32[1024]{0:S(1)}) tuple(%copy.0, %stack.0, %fetched)
  %loop = (s32[], f32[4,1024]{1,0}, f32[1024]{0:S(1)}) while(%before), \
condition=%condition, body=%body
  %stack.9 = f32[4,1024]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %begun = (bf16[64]{0}, bf16[1024]{0}, s32[2]{0:S(4)}, /*index=3*/u32[]{:S(2)}) \
fusion(%part.0), calls=%start
  %part.9 = bf16[64]{0:T(1024)} get-tuple-element(%begun), index=0
  %whole.9 = bf16[1024]{0:T(1024)} get-tuple-element(%begun), index=1
  %step = (f32[2048]{0}, bf16[64]{0}, bf16[1024]{0}) fusion(%part.9, %whole.9, %x.0), \
calls=%beside
  %sum.9 = f32[2048]{0:T(1024)} get-tuple-element(%step), index=0
  %ended = bf16[1024]{0:T(1024)} fusion(%part.9, %whole.9), kind=kCustom, calls=%end
  %reduced = (f32[2048]{0}, bf16[1024]{0}) all-reduce(%sum.9, %ended), to_apply=%unused
  ROOT %row.9 = f32[1024]{0:T(1024)} fusion(%stack.9, %zero.0), kind=kLoop, calls=%take
}
"""


def test_collectives_of_a_module_written_by_hand():
    assert collectives(MODULE) == {
        "all-gather": counted(1, 2 * 1024, 1),
        "all-reduce": counted(1, 2 * (4 * 2048 + 2 * 1024), 0),
        "collective-permute": counted(4, 4 * 4 * 1024, 4),
    }


def test_hbm_bytes_of_a_module_written_by_hand():
    fetched = 4 * 1024
    updated = 4 * 4 * 1024
    taken = 2 * 4 * 1024
    gathered = 2 * 64 + 2 * 1024  # the shard is read where the gather starts
    added = 2 * 4 * 2048
    reduced = 2 * (4 * 2048 + 2 * 1024)
    scalars = 4 + 4 * (4 + 4) + 4  # what is copied, added, and where to slice
    total = fetched + updated + taken + gathered + added + reduced + scalars
    assert hbm_bytes(MODULE) == total


BETWEEN_SLICES = """
HloModule hand, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[100,8,128], y: bf16[64]) -> f32[100,8,128] {
  %x = f32[100,8,128]{2,1,0:T(8,128)} parameter(0)
  %y = bf16[64]{0:T(1024)} parameter(1)
  %token = token[] after-all()
  %send = (f32[100,8,128]{2,1,0:T(8,128)}, u32[]{:S(2)}, token[]) send(%x, %token), channel_id=2, \
frontend_attributes={_xla_megascale_reduce_operation="SUM",\
_xla_megascale_target="{1,2:4}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[100,8,128]{2,1,0}, u32[]{:S(2)}, token[]) recv(%token), channel_id=1, \
frontend_attributes={_xla_megascale_reduce_operation="SUM",\
_xla_megascale_target="{1,2:4}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %received = (f32[100,8,128]{2,1,0:T(8,128)}, token[]) recv-done(%recv), channel_id=1
  %gathered = bf16[256]{0:T(1024)} all-gather(%y), channel_id=3, replica_groups={{0,1,2,3}}
  ROOT %result = f32[100,8,128]{2,1,0:T(8,128)} get-tuple-element(%received), index=0
}
"""


def test_traffic_between_slices_is_counted_apart():
    """libtpu compiles each slice as a module; a ring of 4 hosts passes 2 x 3/4 on."""
    size = 4 * 100 * 8 * 128
    assert collectives(BETWEEN_SLICES) == {
        "all-gather": counted(1, 512, 0),
        "all-reduce between slices": counted(1, size * 3 // 2, 1),
    }
    assert hbm_bytes(BETWEEN_SLICES) == 2 * size + 128 + 512


@pytest.mark.parametrize(
    ("old", "new", "rounds"),
    [
        ("direction=LT", "direction=LE", 5),
        ("constant(8)", "constant(0)", 0),
        ("%zero.0 = s32[]{:T(128)} constant(0)", "%zero.0 = s32[]{:T(128)} constant(4)", 2),
        ("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}', 3),
    ],
)
def test_a_loop_runs_as_often_as_its_condition_says(old, new, rounds):
    assert MODULE.count(old) == 1
    assert count_rounds(MODULE.replace(old, new)) == rounds


def count_rounds(text):
    return collectives(text)["collective-permute"]["count"]


@pytest.mark.parametrize(("direction", "rounds"), [("GE", 4), ("GT", 3), ("NE", 3)])
def test_a_loop_may_count_down(direction, rounds):
    """From 7 by 2 to 1, with it or without."""
    text = MODULE.replace("direction=LT", f"direction={direction}")
    text = text.replace("%zero.0 = s32[]{:T(128)} constant(0)", "%zero.0 = s32[] constant(7)")
    text = text.replace("constant(2)", "constant(-2)").replace("constant(8)", "constant(1)")
    assert count_rounds(text) == rounds


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("direction=LT", "direction=EQ"),
        ("add(%i.4, %two)", "multiply(%i.4, %two)"),
        ("add(%i.4, %two)", "add(%i.4, %two)\n  %next = s32[] add(%next, %i.4)"),
        ("constant(2)", "constant(0)"),
        ("constant(8)", "partition-id()"),
        ("get-tuple-element(%state.2), index=0", "get-tuple-element(%state.2), index=1"),
    ],
)
def test_a_loop_of_unknown_length_is_named(old, new):
    assert MODULE.count(old) == 1
    with pytest.raises(ValueError, match="the loop %loop runs cannot be read"):
        collectives(MODULE.replace(old, new))


CONDITIONAL = """
HloModule hand

%yes (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%p), to_apply=%add
}

%no (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}

ENTRY %main (i: s32[], x: f32[8]) -> f32[8] {
  %i = s32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %c = f32[8]{0} conditional(%i, %x, %x), branch_computations={%yes, %no}
}
"""


def test_the_costliest_branch_of_a_conditional_counts():
    assert collectives(CONDITIONAL) == {"all-reduce": counted(1, 64, 0)}
    assert hbm_bytes(CONDITIONAL) == 64


ASYNCHRONOUS = """
HloModule hand

%wrapped (x: f32[64]) -> f32[8] {
  %x.1 = f32[64]{0} parameter(0)
  ROOT %scattered = f32[8]{0} reduce-scatter(%x.1), channel_id=1, dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[64]) -> f32[16] {
  %x = f32[64]{0} parameter(0)
  %begun = ((f32[64]{0}), f32[8]{0}, u32[]) async-start(%x), calls=%wrapped
  %moving = ((f32[64]{0}), f32[8]{0}, u32[]) async-update(%begun)
  %ended = f32[8]{0} async-done(%moving)
  %gathering = (f32[8]{0}, f32[16]{0}) all-gather-start(%ended), dimensions={0}
  ROOT %gathered = f32[16]{0} all-gather-done(%gathering)
}
"""


def test_asynchronous_computations_count_once():
    assert collectives(ASYNCHRONOUS) == {
        "all-gather": counted(1, 64, 1),
        "reduce-scatter": counted(1, 256, 1),
    }
    sync = r'\1, backend_config={"is_sync":true}'
    assert collectives(re.sub(r"(.*(?:async|gather)-start.*)", sync, ASYNCHRONOUS)) == {
        "all-gather": counted(1, 64, 0),
        "reduce-scatter": counted(1, 256, 0),
    }
    assert hbm_bytes(ASYNCHRONOUS) == (256 + 32) + (32 + 64)


# A row of 8 is read from a stack of 4 and written into another, beside what the GPU does next.
ASYNC_FUSIONS = """
%take (stack: f32[4,8], i: s32[]) -> f32[8] {
  %stack.1 = f32[4,8]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %row.1 = f32[1,8]{1,0} dynamic-slice(%stack.1, %i.1, %zero.1), dynamic_slice_sizes={1,8}
  ROOT %bitcast.1 = f32[8]{0} bitcast(%row.1)
}

%put (stack: f32[4,8], row: f32[8], i: s32[]) -> f32[4,8] {
  %stack.2 = f32[4,8]{1,0} parameter(0)
  %row.2 = f32[8]{0} parameter(1)
  %i.2 = s32[] parameter(2)
  %zero.2 = s32[] constant(0)
  %bitcast.2 = f32[1,8]{1,0} bitcast(%row.2)
  ROOT %put.2 = f32[4,8]{1,0} dynamic-update-slice(%stack.2, %bitcast.2, %i.2, %zero.2)
}

ENTRY %main (x: f32[4,8], y: f32[4,8], i: s32[]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %y = f32[4,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %taking = ((f32[4,8]{1,0}, s32[]), f32[8]{0}, u32[]) fusion-start(%x, %i), kind=kLoop, calls=%take
  %taken = f32[8]{0} fusion-done(%taking)
  %putting = ((f32[4,8]{1,0}, f32[8]{0}, s32[]), f32[4,8]{1,0}, u32[]) \
fusion-start(%y, %taken, %i), kind=kLoop, calls=%put
  ROOT %result = f32[4,8]{1,0} fusion-done(%putting)
}
"""


def test_an_asynchronous_fusion_reads_and_writes_what_its_computation_does():
    row = 4 * 8
    index = 4
    assert hbm_bytes(ASYNC_FUSIONS) == (row + index + row) + (row + index + row)


def test_an_elementwise_program_reads_and_writes_once():
    def compare(x, y):
        return x * 2 > y

    x = jnp.zeros((100, 128), jnp.bfloat16)
    y = jnp.zeros((100, 128))
    compiled = jax.jit(compare).lower(x, y).compile()
    assert hbm_bytes(compiled.as_text()) == 100 * 128 * (2 + 4 + 1)


# 3 x 5 layers. The comments give the elements of each collective's larger side on one device.
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from prope.cost import hlo, traced, traffic

devices, D, dtype = DEVICES
n = len(devices)
mesh = Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))

def layer(x, w):
    y = x @ jax.lax.all_gather(w, "x", axis=0, tiled=True)  # D D
    z = jax.lax.ppermute(y[: D // n], "x", [(i, (i + 1) % n) for i in range(n)])  # D / n D
    z = jax.lax.all_to_all(z, "x", 1, 0, tiled=True)  # D D / n
    summed = jax.lax.psum(y.astype(jnp.float32), "x")  # 2 D D, float32
    return jnp.tanh(jnp.tile(z, (1, n))), summed.sum()

def step(x, weights, unroll):
    def layers(x, w):
        return jax.lax.scan(layer, x, w, unroll=unroll)
    return jax.lax.scan(layers, x, weights, unroll=unroll)

result = {}
for unroll in (1, True):
    specs = {"in_specs": (P(), P(None, None, "x")), "out_specs": P()}
    spread = jax.shard_map(lambda x, w: step(x, w, unroll), mesh=mesh, check_vma=False, **specs)
    arguments = jax.ShapeDtypeStruct((D, D), dtype), jax.ShapeDtypeStruct((3, 5, D, D), dtype)
    program = jax.jit(spread).trace(*arguments)
    text = program.lower().compile().as_text()
    flops = traced.count_flops(program.jaxpr)
    result[str(unroll)] = flops, traffic.collectives(hlo.parse(text)), text.count(" while(")
    open(sys.argv[1] + str(unroll), "w").write(text)
print(json.dumps(result))
"""


def run_program(devices, folder, **environment):
    program = PROGRAM.replace("DEVICES", devices)
    command = [sys.executable, "-c", program, str(folder / "text")]
    env = os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_program(result, devices, D, itemsize):
    """Compares with what the comments of the program say.

    Scanned, and unrolled, where XLA merges all-reduces.
    """
    traffic = {
        "all-gather": {"count": 15, "bytes": 15 * itemsize * D * D},
        "all-reduce": {"count": 15, "bytes": 15 * 2 * 4 * D * D},
        "all-to-all": {"count": 15, "bytes": 15 * itemsize * D * D // devices},
        "collective-permute": {"count": 15, "bytes": 15 * itemsize * D * D // devices},
    }
    for _, kinds, _ in result.values():
        assert all(0 <= counts.pop("async") <= counts["count"] for counts in kinds.values())
    flops = 15 * devices * 2 * D**3
    assert result["1"] == [flops, traffic, 2]
    unrolled_flops, unrolled, loops = result["True"]
    assert unrolled_flops == flops
    assert loops == 0
    assert 1 <= unrolled["all-reduce"].pop("count") <= traffic["all-reduce"].pop("count")
    assert unrolled == traffic


@pytest.mark.slow
def test_a_program_for_eight_cpu_devices(tmp_path):
    environment = {"XLA_FLAGS": devices_flags(8)}
    result = run_program("jax.devices(), 64, jnp.float32", tmp_path, **environment)
    check_program(result, 8, 64, 4)
    text = (tmp_path / "text1").read_text()
    # The compiler for TPUs does not write the loops' lengths.
    bare = re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"other":{}', text)
    assert bare != text
    assert collectives(bare) == collectives(text)


TPU = """__import__("jax.experimental.topologies").experimental.topologies.get_topology_desc(
    platform="tpu", topology_name="v5e:4x4").devices, 2048, jnp.bfloat16"""


@pytest.mark.slow
@needs_libtpu
def test_a_program_for_a_tpu_slice_that_is_not_here(tmp_path):
    environment = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
    check_program(run_program(TPU, tmp_path, **environment), 16, 2048, 2)


ALL_REDUCE = """
ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  %start = f32[1024]{0} all-reduce-start(%x), channel_id=1, GROUPS
  ROOT %done = f32[1024]{0} all-reduce-done(%start)
}
"""


@pytest.mark.parametrize(
    ("groups", "between"),
    [
        # 4 chips on 2 nodes of 2: those of one node, one of each, all.
        ("replica_groups={{0,2},{1,3}}", 4096),
        ("replica_groups=[2,2]<=[4], use_global_device_ids=true", None),
        ("replica_groups=[2,2]<=[2,2]T(1,0), use_global_device_ids=true", 4096),
        ("replica_groups=[1,4]<=[4]", 2048),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", 4096),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, to_apply=%add", None),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, to_apply=%add", 2048),
    ],
)
def test_what_leaves_a_node_of_gpus_is_counted_apart(groups, between):
    """Between two nodes half of twice the bytes pass, shared by the GPUs of a node."""
    text = ALL_REDUCE.replace("GROUPS", groups)
    within = {"all-reduce": counted(1, 8192, 1)}
    assert collectives(text) == within
    apart = {"all-reduce between slices": counted(1, between, 1)}
    assert collectives(text, 2) == (apart if between else within)


def test_an_exchange_between_nodes_is_not_shared_by_their_gpus():
    text = ALL_REDUCE.replace("all-reduce", "all-to-all")
    text = text.replace("GROUPS", "replica_groups={{0,1,2,3}}")
    assert collectives(text, 2) == {"all-to-all between slices": counted(1, 4096 // 2, 1)}


# --- Classes of kernels -------------------------------------------------------------------------

# A loop of 3 rounds with a matmul of a GPU's library, scanned weights that are cast, and an
# activation; then the head's matmul, within a fusion as TPUs write it, and one kernel of each other
# class. Two kernels have no path of their own: one that is fused, and one that another reads. A
# Pallas kernel's metadata is on lines of its own.
KERNELS = """
%cast (w: f32[3,64,32], i: s32[]) -> bf16[64,32] {
  %w.1 = f32[3,64,32]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %at.1 = s32[] add(%i.1, %zero.1)
  %row.1 = f32[1,64,32]{2,1,0} dynamic-slice(%w.1, %at.1, %zero.1, %zero.1)
  %bitcast.1 = f32[64,32]{1,0} bitcast(%row.1)
  ROOT %cast.1 = bf16[64,32]{1,0} convert(%bitcast.1)
}

%act (x: bf16[16,32]) -> bf16[16,32] {
  %x.2 = bf16[16,32]{1,0} parameter(0)
  ROOT %tanh.2 = bf16[16,32]{1,0} tanh(%x.2), metadata={op_name="jit(step)/Block/mlp/tanh"}
}

%body (state: (s32[], bf16[16,64], f32[3,64,32])) -> (s32[], bf16[16,64], f32[3,64,32]) {
  %state = (s32[], bf16[16,64]{1,0}, f32[3,64,32]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[16,64]{1,0} get-tuple-element(%state), index=1
  %w = f32[3,64,32]{2,1,0} get-tuple-element(%state), index=2
  %w16 = bf16[64,32]{1,0} fusion(%w, %i), kind=kLoop, calls=%cast
  %gate = (bf16[16,32]{1,0}, s8[99]{0}) custom-call(%x, %w16), \
custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(step)/Block/mlp/RD,DF->RF/dot"}
  %gated = bf16[16,32]{1,0} get-tuple-element(%gate), index=0
  %act.3 = bf16[16,32]{1,0} fusion(%gated), kind=kLoop, calls=%act
  ROOT %after = (s32[], bf16[16,64]{1,0}, f32[3,64,32]{2,1,0}) tuple(%i, %x, %w)
}

%head (x: bf16[16,64], table: bf16[100,64]) -> f32[16,100] {
  %x.4 = bf16[16,64]{1,0} parameter(0)
  %table.4 = bf16[100,64]{1,0} parameter(1)
  %logits.4 = f32[16,100]{1,0} convolution(%x.4, %table.4), dim_labels=bf_oi->bf, \
metadata={op_name="jit(step)/jvp(loss)/while/body/RD,VD->RV/dot_general"}
  ROOT %exp.4 = f32[16,100]{1,0} exponential(%logits.4)
}

ENTRY %main (x: bf16[16,64], w: f32[3,64,32], table: bf16[100,64], s: f32[40], ..) -> f32[40] {
  %x.0 = bf16[16,64]{1,0} parameter(0)
  %w.0 = f32[3,64,32]{2,1,0} parameter(1)
  %table.0 = bf16[100,64]{1,0} parameter(2)
  %s = f32[40]{0} parameter(3)
  %square = f32[40,40]{1,0} parameter(4)
  %zero = s32[] constant(0)
  %state.0 = (s32[], bf16[16,64]{1,0}, f32[3,64,32]{2,1,0}) tuple(%zero, %x.0, %w.0)
  %loop = (s32[], bf16[16,64]{1,0}, f32[3,64,32]{2,1,0}) while(%state.0), condition=%unused, \
body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %logits = f32[16,100]{1,0} fusion(%x.0, %table.0), kind=kOutput, calls=%head
  %max = f32[16]{0} reduce(%logits, %zero), metadata={op_name="jit(step)/jvp(loss)/reduce_max"}
  %q = f32[40]{0} dot(%s, %square), lhs_contracting_dims={0}, \
metadata={op_name="jit(step)/Block/attn/q_einsum/BTD,NDH->BTNH/dot_general"}
  %turned = f32[40]{0} multiply(%q, %s), metadata={op_name="jit(step)/Block/attn/mul"}
  %cores = f32[40]{0} custom-call(%turned), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(step)/Block/attn/attention/dot_product_attention_fwd"}
  %normed = f32[40]{0} multiply(%cores, %s), metadata={op_name="jit(step)/jvp(RMSNorm)/mul"}
  %stack.5 = f32[4,40]{1,0} broadcast(%zero)
  %stacked = f32[4,40]{1,0} dynamic-update-slice(%stack.5, %s, %zero, %zero)
  %moved = f32[4,40]{1,0} copy(%stacked)
  %summed = f32[40]{0} all-reduce(%normed), to_apply=%add
  %unnamed = f32[40]{0} sqrt(%summed)
  %updated = f32[40]{0} add(%unnamed, %s), metadata={op_name="jit(step)/optimizer/add"}
  ROOT %result = f32[40]{0} negate(%updated), metadata={op_name="jit(step)/jvp()/neg"}
}
"""


def test_kernels_are_sorted_by_what_they_are_for():
    array = 4 * 40
    head = 2 * 16 * 64 * 100
    gate = 2 * 16 * 64 * 32
    logits = 4 * 16 * 100
    expected = {  # bytes, FLOPs, kernels
        "weight casts": (3 * (4 * 64 * 32 + 4 + 2 * 64 * 32), 0, 3),
        "matmul MLP": (3 * 2 * (16 * 64 + 64 * 32 + 16 * 32), 3 * gate, 3),
        "activation": (3 * 2 * 2 * 16 * 32, 0, 3),
        "matmul head": (2 * (16 * 64 + 100 * 64) + logits, head, 1),
        "loss": (logits + 4 + 4 * 16, 0, 1),
        "matmul attention projections": (42 * array, 2 * 40 * 40, 1),
        "rotation": (3 * array, 0, 1),
        "attention": (2 * array, 0, 1),
        "norms": (3 * array, 0, 1),
        "zero-init": (4 + 4 * array, 0, 1),
        "scan stacking": (2 * array + 2 * 4, 0, 1),
        "copies": (8 * array, 0, 1),
        "collectives": (2 * array, 0, 1),
        "optimizer": (2 * array + 3 * array, 0, 2),
        "other": (2 * array, 0, 1),
    }
    chip = CHIPS["v5e"]._replace(flops=1e9, hbm_bandwidth=1e9)
    classes = count_classes(hlo.parse(KERNELS), chip)
    amounts = ("bytes", "flops", "kernels")
    assert {name: tuple(map(row.get, amounts)) for name, row in classes.items()} == expected
    for name, (size, flops, _) in expected.items():
        assert classes[name]["milliseconds"] == pytest.approx(1e-6 * max(size, flops)), name


@pytest.mark.parametrize("text", [MODULE, BETWEEN_SLICES, CONDITIONAL, ASYNCHRONOUS, ASYNC_FUSIONS])
def test_classes_hold_all_bytes(text):
    classes = count_classes(hlo.parse(text), CHIPS["v5e"])
    assert sum(row["bytes"] for row in classes.values()) == hbm_bytes(text)
