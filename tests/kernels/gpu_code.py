"""What code does the compiler make of the kernels for a GPU? `python tests/kernels/gpu_code.py 90` needs no GPU.

Each launcher is called as on a CUDA device; instead of being launched, a kernel is compiled for the architecture given
(90 = sm_90) with the signature that the launch would have had, and a line of JSON says what came out.
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

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.kernels import triton_launch

triton_launch.check_tensors = lambda device, **tensors: None  # before the launchers import it: tensors lie on the CPU

from paceline.kernels import (  # noqa: E402
    kv_commit,
    kv_scatter,
    rope_scatter,
    topk_lse,
    tree_attention,
    tree_attention_plan,
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
        if parameter.is_constexpr or (type(value) is int and value == 1 and is_special):
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
        "constants": {k: str(v) for k, v in constants.items()},
        "shared_bytes": compiled.metadata.shared,
        "registers": registers,
        "stack_bytes": stack,
        "memory": memory,
        "uses_tensor_cores": bool(re.search(r"\b(wgmma\.mma_async|mma\.sync)", compiled.asm["ptx"])),
    }
    print(json.dumps(report), flush=True)


def attention(dtype, *, dim=128, heads=32, kv_heads=8, batch=4, rows=32, length=4096, is_causal=False, splits=None):
    """Launch both phases over `batch` requests of `rows` rows."""
    count = batch * rows
    plan = tree_attention_plan.plan_attention(
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


def rows() -> None:
    """Launch the kernels that move K/V rows, and top-k."""
    pool, index = torch.zeros(2, 8, 2, 8, 128, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.int64)
    kv = torch.zeros(9, 8, 128, dtype=torch.bfloat16)
    kv_scatter.scatter_rows(pool[0], index, kv, kv)
    for count in (5, 320):
        kv_commit.commit_rows(pool, torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64))
    query, norm, table = torch.zeros(9, 32, 128, dtype=torch.bfloat16), torch.zeros(128), torch.zeros(64, 128)
    rope_scatter.rope_scatter(query, kv, kv, pool[0], index, index, table, table, q_norm=norm, k_norm=norm)
    topk_lse.topk_lse(torch.zeros(3, 151936, dtype=torch.bfloat16), 8)


def main(arch: int) -> None:
    triton.JITFunction.run = lambda kernel, *args, **kwargs: compile_launch(kernel, *args, arch=arch, **kwargs)
    rows()
    attention(torch.bfloat16, splits=4)
    attention(torch.bfloat16, splits=1, rows=1)
    attention(torch.bfloat16, splits=1, rows=512, is_causal=True)
    attention(torch.bfloat16, splits=4, dim=256)
    attention(torch.float32, splits=4)


if __name__ == "__main__":
    main(int(sys.argv[1]))
