"""GPU code: what the compiler makes of the kernels; `python tests/helpers/gpu_code.py 90 rest` needs no GPU.

Each launcher is called as on a CUDA device; instead of being launched, a kernel is compiled for the architecture given
(90 = sm_90) with the signature that the launch would have had, and a line of JSON says what came out.
The largest tree takes about as long as all the rest: it is a part of its own, for two processes side by side.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.kernels.gpu import launch

launch.check_tensors = lambda device, **tensors: None  # before the launchers import it: tensors lie on the CPU

from paceline.kernels.gpu import (  # noqa: E402
    dense_layer,
    draft_ingest,
    kv_rows,
    rope_scatter,
    slot_attention,
    topk_lse,
    tree_accept,
    tree_attention,
    tree_build,
)

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32",
    torch.uint8: "*u8",
}  # fmt: skip
_seen: set[str] = set()


def compile_launch(kernel, *args, grid, warmup=False, arch, **kwargs) -> None:
    """Stand-in for JITFunction.run: specialise the arguments as a launch does, compile, report."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        k: v for k, v in kwargs.items() if k in kernel.arg_names
    }
    options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        is_special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and is_special):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name], is_aligned = POINTERS[value.dtype], True
        elif isinstance(value, float):
            signature[name], is_aligned = "fp32", False
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            is_aligned = is_special and value % 16 == 0
        if is_aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    key = repr((kernel.__name__, signature, constants, attributes, options))
    if key in _seen:
        return
    _seen.add(key)
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    memory = re.findall(r"\b(ld\.global|st\.global|bar\.sync)", compiled.asm["ptx"])
    report = {
        "kernel": kernel.__name__,
        "module": kernel.__module__.rpartition(".")[2],
        "constants": {k: str(v) for k, v in constants.items()},
        "shared_bytes": compiled.metadata.shared,
        "registers": registers,
        "stack_bytes": stack,
        "memory": memory,
        "uses_tensor_cores": bool(re.search(r"\b(wgmma\.mma_async|mma\.sync)", compiled.asm["ptx"])),
    }
    print(json.dumps(report), flush=True)


def launch_attention(
    dtype, *, dim=128, heads=32, kv_heads=8, batch=4, rows=32, length=4096, is_causal=False, splits=None
):
    """Both phases over `batch` requests of `rows` rows."""
    count = batch * rows
    plan = tree_attention.plan_attention(
        cu_rows=torch.zeros(batch + 1, dtype=torch.int64),
        context_lens=torch.zeros(batch, dtype=torch.int64),
        slot_table=torch.zeros(batch, length, dtype=torch.int64),
        out_rows=torch.zeros(count, dtype=torch.int64),
        ancestors=None if is_causal else torch.zeros(count, rows, dtype=torch.bool),
        num_groups=heads // kv_heads,
        dtype=dtype,
    )
    plan = dataclasses.replace(plan, num_splits=splits)
    pool = torch.zeros(8, 2, kv_heads, dim, dtype=dtype)
    tree_attention.tree_attention(torch.zeros(count, heads, dim, dtype=dtype), pool, plan, 0.1)


def launch_rows() -> None:
    """The kernels that move K/V rows, and top-k."""
    pool, index = torch.zeros(2, 8, 2, 8, 128, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.int64)
    kv = torch.zeros(9, 8, 128, dtype=torch.bfloat16)
    kv_rows.scatter_rows(pool[0], index, kv, kv)
    for count in (5, 320):
        kv_rows.commit_rows(pool, torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64))
    query, norm, table = torch.zeros(9, 32, 128, dtype=torch.bfloat16), torch.zeros(128), torch.zeros(64, 128)
    rope_scatter.rope_scatter(query, kv, kv, pool[0], index, index, table, table, q_norm=norm, k_norm=norm)
    rope_scatter.rope_scatter(query, kv, kv, pool[0], index, index, table, table, is_adjacent=True)
    topk_lse.topk_lse(torch.zeros(3, 151936, dtype=torch.bfloat16), 8)
    topk_lse.topk_lse(torch.zeros(3, 151936, dtype=torch.bfloat16), 20, scale=torch.zeros(3))


def _long(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def launch_trees(batch: int = 8, width: int = 65, candidates: int = 352) -> None:
    """A round of trees: two blocks of SpecBlock's candidates."""
    tree_build.build_trees(
        scores=torch.zeros(batch, candidates), parents=_long(batch, candidates), token_ids=_long(batch, candidates),
        depths=_long(batch, candidates), anchor_token_ids=_long(batch), num_nodes=_long(batch), max_nodes=width - 1,
        max_depth=8,
    )  # fmt: skip
    for columns in (17, 65, 257):
        tree_accept.accept_rows(
            token_ids=_long(512), cu_rows=_long(batch + 1), ancestors=torch.zeros(512, columns, dtype=torch.bool),
            next_token_ids=_long(512),
        )  # fmt: skip


def launch_largest_tree(candidates: int, width: int) -> None:
    """The tree kernel, as deep as it takes trees."""
    tree_build.build_trees(
        scores=torch.zeros(1, candidates), parents=_long(1, candidates), token_ids=_long(1, candidates),
        depths=_long(1, candidates), anchor_token_ids=_long(1), num_nodes=_long(1), max_nodes=width - 1,
        max_depth=tree_build.MAX_DEPTH,
    )  # fmt: skip


def launch_ingest(*, has_norm: bool) -> None:
    """Five layers of 8 KV heads of 128."""
    dtype = torch.bfloat16
    draft_ingest.draft_ingest(
        features=torch.zeros(5, 32, dtype=dtype), fc=torch.zeros(32, 16, dtype=dtype),
        norm_weight=torch.zeros(16, dtype=dtype), kv_weight=torch.zeros(16, 5 * 2048, dtype=dtype),
        k_norm_weight=torch.zeros(5, 128, dtype=dtype) if has_norm else None, cos=torch.zeros(64, 64),
        sin=torch.zeros(64, 64), positions=_long(5), pool_rows=_long(5),
        pool=torch.zeros(5, 8, 2, 8, 128, dtype=dtype), eps=1e-6,
    )  # fmt: skip


def launch_slots(dtype: torch.dtype, *, batch: int = 4, blocks: int = 10, heads: int = 32, dim: int = 128) -> None:
    """Leaves of SpecBlock for a target with 8 KV heads."""
    width = 2 * 8 * dim
    slot_attention.slot_attention(
        query=torch.zeros(batch, blocks, 4, heads, dim, dtype=dtype), current=torch.zeros(batch, blocks, 4, width, dtype=dtype),
        pool=torch.zeros(8, 4, width, dtype=dtype), slot_table=_long(batch, 4096), context_rows=_long(batch, blocks),
        own_slots=_long(batch, blocks), scale=0.1,
    )  # fmt: skip


def launch_dense(dtype: torch.dtype) -> None:
    """What is between the products of a layer of Qwen3-8B."""
    x, gate_up = torch.zeros(9, 4096, dtype=dtype), torch.zeros(9, 2 * 12288, dtype=dtype)
    for delta in (None, x.clone()):
        dense_layer.add_norm(x, delta, torch.zeros(4096, dtype=dtype), 1e-6)
    dense_layer.silu_mul(gate_up)


def main(arch: int, part: str) -> None:
    """part: 'largest tree' or 'rest'."""
    triton.JITFunction.run = lambda kernel, *args, **kwargs: compile_launch(kernel, *args, arch=arch, **kwargs)
    if part == "largest tree":
        launch_largest_tree(tree_build.MAX_CANDIDATES, tree_build.MAX_NODES + 1)
        return
    launch_rows()
    launch_attention(torch.bfloat16, splits=4)
    launch_attention(torch.bfloat16, splits=1, rows=1)
    launch_attention(torch.bfloat16, splits=1, rows=512, is_causal=True)
    launch_attention(torch.bfloat16, splits=4, dim=256)
    launch_attention(torch.bfloat16, splits=4, heads=28, kv_heads=4)
    launch_attention(torch.float32, splits=4)
    launch_trees()
    launch_largest_tree(4096, 512)
    for has_norm in (True, False):
        launch_ingest(has_norm=has_norm)
    launch_slots(torch.bfloat16)
    launch_slots(torch.bfloat16, batch=1, blocks=1)
    launch_slots(torch.float32)
    launch_slots(torch.bfloat16, heads=8, dim=256)
    launch_dense(torch.bfloat16)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
