"""Traffic against arithmetic done by hand: of a module's text written here, and of compiled programs."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from compiled import array_shapes
from conftest import ROOT

from prope.cost import hlo

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
  %take.1 = f32[1,1024]{1,0:T(8,128)} dynamic-slice(%stack.2, %i.2, %zero.2), dynamic_slice_sizes={1,1024}
  ROOT %bitcast.2 = f32[1024]{0:T(1024)} bitcast(%take.1)
}

%condition (state: (s32[], f32[4,1024], f32[1024])) -> pred[] {
  %limit = s32[]{:T(128)} constant(8)
  %state.1 = (s32[]{:T(128)}, f32[4,1024]{1,0:T(8,128)}, f32[1024]{0:T(1024)S(1)}) parameter(0)
  %i.3 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.3, %limit), direction=LT
}

%body (state: (s32[], f32[4,1024], f32[1024])) -> (s32[], f32[4,1024], f32[1024]) {
  %state.2 = (s32[]{:T(128)}, f32[4,1024]{1,0:T(8,128)}, f32[1024]{0:T(1024)S(1)}) parameter(0)
  %i.4 = s32[]{:T(128)} get-tuple-element(%state.2), index=0
  %stack.4 = f32[4,1024]{1,0:T(8,128)} get-tuple-element(%state.2), index=1
  %row.4 = f32[1024]{0:T(1024)S(1)} get-tuple-element(%state.2), index=2
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)S(6)} add(%i.4, %two)
  %send = (f32[1024]{0:T(1024)S(1)}, f32[1024]{0:T(1024)S(1)}, u32[]{:S(2)}) collective-permute-start(%row.4)
  %sent = f32[1024]{0:T(1024)S(1)} collective-permute-done(%send)
  %updated = f32[4,1024]{1,0:T(8,128)} fusion(%stack.4, %sent, %next), kind=kLoop, calls=%put
  ROOT %after = (s32[]{:T(128)}, f32[4,1024]{1,0:T(8,128)}, f32[1024]{0:T(1024)S(1)}) tuple(%next, %updated, %sent)
}

%start (part: bf16[64]) -> (bf16[64], bf16[1024], s32[2], /*index=3*/u32[]) {
  %part.1 = bf16[64]{0:T(1024)} parameter(0)
  %gather.1 = bf16[1024]{0:T(1024)} all-gather(%part.1), channel_id=1, frontend_attributes={chain_id="0"}
  ROOT %call.1 = (bf16[64]{0}, bf16[1024]{0}, s32[2]{0:S(4)}, /*index=3*/u32[]{:S(2)}) custom-call(%gather.1), \
custom_call_target="AsyncCollectiveStart"
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
  %gather.2 = bf16[1024]{0:T(1024)} all-gather(%part.2), channel_id=1, frontend_attributes={chain_id="0"}
  ROOT %tuple.2 = (f32[2048]{0}, bf16[64]{0}, bf16[1024]{0}) tuple(%sum.2, %part.2, %gather.2)
}

%end (part: bf16[64], whole: bf16[1024]) -> bf16[1024] {
  %part.3 = bf16[64]{0:T(1024)} parameter(0)
  %whole.3 = bf16[1024]{0:T(1024)} parameter(1)
  %gather.3 = bf16[1024]{0:T(1024)} all-gather(%part.3), channel_id=1, frontend_attributes={chain_id="0"}
  ROOT %call.3 = bf16[1024]{0} custom-call(%part.3, %whole.3, %gather.3), custom_call_target="AsyncCollectiveDone"
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
  %before = (s32[], f32[4,1024]{1,0:T(8,128)}, f32[1024]{0:S(1)}) tuple(%copy.0, %stack.0, %fetched)
  %loop = (s32[], f32[4,1024]{1,0:T(8,128)}, f32[1024]{0:S(1)}) while(%before), condition=%condition, body=%body
  %stack.9 = f32[4,1024]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %begun = (bf16[64]{0}, bf16[1024]{0}, s32[2]{0:S(4)}, /*index=3*/u32[]{:S(2)}) fusion(%part.0), calls=%start
  %part.9 = bf16[64]{0:T(1024)} get-tuple-element(%begun), index=0
  %whole.9 = bf16[1024]{0:T(1024)} get-tuple-element(%begun), index=1
  %step = (f32[2048]{0}, bf16[64]{0}, bf16[1024]{0}) fusion(%part.9, %whole.9, %x.0), calls=%beside
  %sum.9 = f32[2048]{0:T(1024)} get-tuple-element(%step), index=0
  %ended = bf16[1024]{0:T(1024)} fusion(%part.9, %whole.9), kind=kCustom, calls=%end
  %reduced = (f32[2048]{0}, bf16[1024]{0}) all-reduce(%sum.9, %ended), channel_id=2, to_apply=%unused
  ROOT %row.9 = f32[1024]{0:T(1024)} fusion(%stack.9, %zero.0), kind=kLoop, calls=%take
}
"""


def test_collectives_of_a_module_written_by_hand():
    assert hlo.collectives(MODULE) == {
        "all-gather": {"count": 1, "bytes": 2 * 1024, "async": 1},
        "all-reduce": {"count": 1, "bytes": 2 * (4 * 2048 + 2 * 1024), "async": 0},
        "collective-permute": {"count": 4, "bytes": 4 * 4 * 1024, "async": 4},
    }


BETWEEN_SLICES = """
HloModule hand, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[100,8,128], y: bf16[64]) -> f32[100,8,128] {
  %x = f32[100,8,128]{2,1,0:T(8,128)} parameter(0)
  %y = bf16[64]{0:T(1024)} parameter(1)
  %token = token[] after-all()
  %send = (f32[100,8,128]{2,1,0:T(8,128)}, u32[]{:S(2)}, token[]) send(%x, %token), channel_id=2, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",\
_xla_megascale_target="{1,2:4}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[100,8,128]{2,1,0:T(8,128)}, u32[]{:S(2)}, token[]) recv(%token), channel_id=1, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",\
_xla_megascale_target="{1,2:4}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %received = (f32[100,8,128]{2,1,0:T(8,128)}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  %gathered = bf16[256]{0:T(1024)} all-gather(%y), channel_id=3, replica_groups={{0,1,2,3}}
  ROOT %result = f32[100,8,128]{2,1,0:T(8,128)} get-tuple-element(%received), index=0
}
"""


def test_traffic_between_slices_is_apart_from_that_within_one():
    """As libtpu writes it: each slice is a module, and hosts exchange what crosses. A ring of 4 passes 2 x 3/4 on."""
    size = 4 * 100 * 8 * 128
    assert hlo.collectives(BETWEEN_SLICES) == {
        "all-gather": {"count": 1, "bytes": 512, "async": 0},
        "all-reduce between slices": {"count": 1, "bytes": size * 3 // 2, "async": 1},
    }
    assert hlo.hbm_bytes(BETWEEN_SLICES) == 2 * size + 128 + 512


def test_hbm_bytes_of_a_module_written_by_hand():
    fetched, updated, taken = 4 * 1024, 4 * 4 * 1024, 2 * 4 * 1024
    gathered = (
        2 * 64 + 2 * 1024
    )  # the part is read where it starts: it is counted with what is written there
    added, reduced = 2 * 4 * 2048, 2 * (4 * 2048 + 2 * 1024)
    scalars = 4 + 4 * (4 + 4) + 4  # what is copied, added, and where to slice
    assert hlo.hbm_bytes(MODULE) == fetched + updated + taken + gathered + added + reduced + scalars


def test_shapes_are_all_listed():
    assert array_shapes(MODULE) == {
        ("f32", (4, 1024)),
        ("f32", (1, 1024)),
        ("f32", (1024,)),
        ("f32", (2048,)),
        ("bf16", (64,)),
        ("bf16", (1024,)),
        ("s32", ()),
        ("s32", (2,)),
        ("u32", ()),
        ("pred", ()),
    }


@pytest.mark.parametrize(
    ("what", "instead", "runs"),
    [
        ("direction=LT", "direction=LE", 5),
        ("constant(8)", "constant(9)", 5),
        ("constant(8)", "constant(0)", 0),
        ("%zero.0 = s32[]{:T(128)} constant(0)", "%zero.0 = s32[]{:T(128)} constant(4)", 2),
        ("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}', 3),
    ],
)
def test_a_loop_runs_as_often_as_its_condition_says(what, instead, runs):
    assert MODULE.count(what) == 1
    assert hlo.collectives(MODULE.replace(what, instead))["collective-permute"]["count"] == runs


def test_a_loop_of_unknown_length_is_named():
    for what in ("direction=LT", "add(%i.4, %two)"):
        instead = "direction=EQ" if "LT" in what else "multiply(%i.4, %two)"
        with pytest.raises(ValueError, match="the loop %loop runs cannot be read"):
            hlo.collectives(MODULE.replace(what, instead))
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.hbm_bytes("module @jit_step {}")


def test_of_the_branches_of_a_conditional_the_costliest_counts():
    reduce = "  ROOT %r = f32[8]{0} all-reduce(%p), to_apply=%add\n"
    branch = "%NAME (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\nBODY}\n"
    text = "HloModule m\n" + branch.replace("NAME", "yes").replace("BODY", reduce)
    text += branch.replace("NAME", "no").replace("BODY", "  ROOT %n = f32[8]{0} negate(%p)\n")
    text += "ENTRY %main (i: s32[], x: f32[8]) -> f32[8] {\n  %i = s32[] parameter(0)\n  %x = f32[8]{0} parameter(1)\n"
    text += "  ROOT %c = f32[8]{0} conditional(%i, %x, %x), branch_computations={%yes, %no}\n}\n"
    assert hlo.collectives(text) == {"all-reduce": {"count": 1, "bytes": 64, "async": 0}}
    assert hlo.hbm_bytes(text) == 64


def test_asynchronous_computations_count_once():
    text = """HloModule m

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
    for mark, apart in (("", 1), (', backend_config={"is_sync":true}', 0)):
        size = {"all-gather": 64, "reduce-scatter": 256}
        expected = {kind: {"count": 1, "bytes": size[kind], "async": apart} for kind in size}
        marked = re.sub(r"(.*(?:async|gather)-start.*)", rf"\1{mark}", text)
        assert hlo.collectives(marked) == expected
    assert hlo.hbm_bytes(text) == (256 + 32) + (32 + 64)


def test_an_elementwise_program_reads_and_writes_once():
    compiled = (
        jax.jit(lambda x, y: (x * 2 + y).astype(jnp.bfloat16))
        .lower(*[jnp.zeros((100, 128))] * 2)
        .compile()
    )
    assert hlo.hbm_bytes(compiled.as_text()) == 100 * 128 * (4 + 4 + 2)


# 3 x 5 layers. The comments give the elements of each collective's larger side on one device.
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from prope.cost import hlo, traced

devices, D, dtype = DEVICES
n = len(devices)
mesh = Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))

def layer(x, w):
    y = x @ jax.lax.all_gather(w, "x", axis=0, tiled=True)  # D D
    z = jax.lax.ppermute(y[: D // n], "x", [(i, (i + 1) % n) for i in range(n)])  # D / n D
    z = jax.lax.all_to_all(z, "x", 1, 0, tiled=True)  # D D / n
    return jnp.tanh(jnp.tile(z, (1, n))), jax.lax.psum(y.astype(jnp.float32), "x").sum()  # 2 D D, float32

def step(x, weights, unroll):
    return jax.lax.scan(lambda x, w: jax.lax.scan(layer, x, w, unroll=unroll), x, weights, unroll=unroll)

found = {}
for unroll in (1, True):
    spread = jax.shard_map(
        lambda x, w: step(x, w, unroll), mesh=mesh, in_specs=(P(), P(None, None, "x")), out_specs=P(), check_vma=False
    )
    arguments = jax.ShapeDtypeStruct((D, D), dtype), jax.ShapeDtypeStruct((3, 5, D, D), dtype)
    program = jax.jit(spread).trace(*arguments)
    text = program.lower().compile().as_text()
    found[str(unroll)] = traced.count_flops(program.jaxpr), hlo.collectives(text), text.count(" while(")
    open(sys.argv[1] + str(unroll), "w").write(text)
print(json.dumps(found))
"""


def run_program(devices, folder, **environment):
    program = PROGRAM.replace("DEVICES", devices)
    command = [sys.executable, "-c", program, str(folder / "text")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(found, devices, D, itemsize):
    """Against what the comments of the program say: scanned, and unrolled, where XLA merges all-reduces."""
    traffic = {
        "all-gather": {"count": 15, "bytes": 15 * itemsize * D * D},
        "all-reduce": {"count": 15, "bytes": 15 * 2 * 4 * D * D},
        "all-to-all": {"count": 15, "bytes": 15 * itemsize * D * D // devices},
        "collective-permute": {"count": 15, "bytes": 15 * itemsize * D * D // devices},
    }
    for _, kinds, _ in found.values():
        assert all(0 <= counts.pop("async") <= counts["count"] for counts in kinds.values())
    assert found["1"] == [15 * devices * 2 * D**3, traffic, 2]
    flops, unrolled, loops = found["True"]
    assert (flops, loops) == (15 * devices * 2 * D**3, 0)
    assert 1 <= unrolled["all-reduce"].pop("count") <= traffic["all-reduce"].pop("count")
    assert unrolled == traffic


@pytest.mark.slow
def test_a_program_for_eight_cpu_devices(tmp_path):
    found = run_program(
        "jax.devices(), 64, jnp.float32",
        tmp_path,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    check(found, 8, 64, 4)
    text = (
        tmp_path / "text1"
    ).read_text()  # as the compiler for TPUs writes it: without the loops' lengths
    bare = re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"other":{}', text)
    assert bare != text and hlo.collectives(bare) == hlo.collectives(text)


TPU = """__import__("jax.experimental.topologies").experimental.topologies.get_topology_desc(
    platform="tpu", topology_name="v5e:4x4").devices, 2048, jnp.bfloat16"""


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="needs libtpu: pip install -e '.[tpu]'"
)
def test_a_program_for_a_tpu_slice_that_is_not_there(tmp_path):
    environment = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
    check(run_program(TPU, tmp_path, **environment), 16, 2048, 2)


@pytest.mark.parametrize(
    ("groups", "between"),  # of 4 chips on 2 nodes of 2: those of one node, one of each, all
    [
        ("replica_groups={{0,1},{2,3}}", None),
        ("replica_groups={{0,2},{1,3}}", 4096),
        ("replica_groups=[2,2]<=[4], use_global_device_ids=true", None),
        ("replica_groups=[2,2]<=[2,2]T(1,0), use_global_device_ids=true", 4096),
        ("replica_groups=[1,4]<=[4]", 2048),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, use_global_device_ids=true", None),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", 4096),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, to_apply=%add", None),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}, to_apply=%add", 4096),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, to_apply=%add", 2048),
    ],
)
def test_what_leaves_a_node_of_gpus_is_counted_apart(groups, between):
    """A sum over 1024 floats: between two nodes half of twice their bytes, shared by the GPUs of a node."""
    text = f"""ENTRY %main (x: f32[1024]) -> f32[1024] {{
  %x = f32[1024]{{0}} parameter(0)
  %start = f32[1024]{{0}} all-reduce-start(%x), channel_id=1, {groups}
  ROOT %done = f32[1024]{{0}} all-reduce-done(%start)
}}"""
    within = {"all-reduce": {"count": 1, "bytes": 8192, "async": 1}}
    expected = (
        {"all-reduce between slices": {"count": 1, "bytes": between, "async": 1}}
        if between
        else within
    )
    assert hlo.collectives(text, 2) == expected
    assert hlo.collectives(text) == within
