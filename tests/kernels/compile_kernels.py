"""Do the launchers' kernels compile for a GPU that this machine lacks? `python tests/kernels/compile_kernels.py 90`.

Triton's compiler and ptxas run without a GPU. Launchers of trees, ingest and slot attention are called on CPU tensors;
in place of each launch the kernel is compiled for the compute capability given (90 = Hopper) with the types, constants
and alignments that the launch would have had, and a line of JSON tells what came out.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.kernels import triton_launch

triton_launch.check_tensors = lambda device, **tensors: None  # the tensors lie on the CPU on purpose

from paceline.kernels import draft_ingest, slot_attention, tree_accept, tree_budget, tree_build  # noqa: E402

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}


def compile_launch(kernel: Any, capability: int, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Compile what this launch would run; raises what Triton or ptxas raise."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: options.pop(name) for name in kernel.arg_names if name in options}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    hints: dict[tuple[int], Any] = {}
    for i, parameter in enumerate(kernel.params):
        value, adapts = values[parameter.name], not parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[parameter.name], hints[(i,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (adapts and type(value) is int and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if adapts and value % 16 == 0:
                hints[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "kernel": kernel.__name__,
        "dtype": signature.get("query", ""),
        "has_machine_code": bool(compiled.asm.get("cubin")),
        "shared_bytes": compiled.metadata.shared,
        "uses_tensor_cores": bool(re.search(r"\b(wgmma\.mma_async|mma\.sync)", compiled.asm["ptx"])),
    }


def _long(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def launch_trees(batch: int = 8, width: int = 65, candidates: int = 352) -> None:
    """A round of trees: two blocks of SpecBlock's candidates."""
    trees = tree_build.build_trees(
        scores=torch.zeros(batch, candidates), parents=_long(batch, candidates), token_ids=_long(batch, candidates),
        depths=_long(batch, candidates), anchor_token_ids=_long(batch), num_nodes=_long(batch), max_nodes=width - 1,
        max_depth=8,
    )  # fmt: skip
    for is_stepped in (True, False):
        tree_budget.choose_budget(
            masses=torch.zeros(batch, width - 1), table_rows=_long(14), table_seconds=torch.zeros(14),
            fixed_seconds=torch.zeros(1), min_nodes=_long(batch), max_rows=512, is_stepped=is_stepped,
        )  # fmt: skip
    tree_accept.accept_paths(
        token_ids=trees.token_ids, parents=trees.parents, depths=trees.depths, ancestor_bits=trees.ancestor_bits,
        cu_nodes=_long(batch + 1), next_token_ids=_long(batch * width), scratch_rows=_long(batch * width),
        context_lens=_long(batch), slot_table=_long(batch, 4096), max_depth=8,
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


def launch_slots(dtype: torch.dtype, *, batch: int = 4, blocks: int = 10) -> None:
    """Leaves of SpecBlock for a target with 32 heads, 8 KV heads, head dim 128."""
    slot_attention.slot_attention(
        query=torch.zeros(batch, blocks, 4, 32, 128, dtype=dtype), current=torch.zeros(batch, blocks, 4, 2048, dtype=dtype),
        pool=torch.zeros(8, 4, 2048, dtype=dtype), slot_table=_long(batch, 4096), context_rows=_long(batch, blocks),
        own_slots=_long(batch, blocks), scale=0.1,
    )  # fmt: skip


def main(capability: int) -> None:
    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        print(json.dumps(compile_launch(kernel, capability, args, options)), flush=True)

    triton.JITFunction.run = run
    launch_trees()
    for has_norm in (True, False):
        launch_ingest(has_norm=has_norm)
    launch_slots(torch.bfloat16)
    launch_slots(torch.bfloat16, batch=1, blocks=1)
    launch_slots(torch.float32)


if __name__ == "__main__":
    main(int(sys.argv[1]))
