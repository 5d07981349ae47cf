"""Do the kernels compile for GPUs that this machine lacks? `python tests/kernels/compile_kernels.py` prints a line each.

Triton's compiler and ptxas run without a GPU. Tiles are those of 8B models; the lines say shared memory and use of tensor
cores, so that a tile that does not fit is seen before a GPU sees it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.kernels import draft_ingest, slot_attention, tree_accept, tree_budget, tree_build

I64, I32, F32, BF16 = "*i64", "*i32", "*fp32", "*bf16"


def _build() -> tuple[Any, dict, dict, int]:
    types = {
        "scores": F32, "parents": I64, "token_ids": I64, "depths": I64, "anchors": I64, "wanted": I64,
        "out_tokens": I64, "out_parents": I64, "out_depths": I64, "out_scores": F32, "out_candidates": I64,
        "out_bits": I32, "out_counts": I64, "num_candidates": "i32", "max_nodes": "i32",
    }  # fmt: skip
    constants = {"C": 512, "W": 128, "V": 3, "V_PADDED": 4, "MAX_DEPTH": 8, "NUM_JUMPS": 3, "CHUNK": 32}
    return tree_build._build_kernel, types, constants, 4


def _budget() -> tuple[Any, dict, dict, int]:
    types = {
        "masses": F32, "table_rows": I64, "table_seconds": F32, "fixed_seconds": F32, "min_nodes": I64,
        "out_nodes": I64, "out_cu": I64, "num_requests": "i32", "num_masses": "i32", "num_steps": "i32",
        "max_rows": "i32",
    }  # fmt: skip
    return tree_budget._budget_kernel, types, {"B": 16, "M": 64, "IS_STEPPED": True}, 8


def _accept() -> tuple[Any, dict, dict, int]:
    names = (
        "token_ids parents depths cu_nodes next_token_ids scratch_rows context_lens slot_table out_path out_accepted "
        "out_bonus out_src out_dst"
    )
    types = dict.fromkeys(names.split(), I64) | {"ancestor_bits": I32}
    types |= dict.fromkeys(("width", "table_length", "max_depth"), "i32")
    return tree_accept._accept_kernel, types, {"W": 128, "V": 3, "D": 16}, 4


def _ingest() -> tuple[Any, dict, dict, int]:
    types = {
        "kv": BF16, "k_norm_weight": BF16, "cos": F32, "sin": F32, "positions": I64, "pool_rows": I64, "pool": BF16,
        "kv_stride": "i64", "layer_stride": "i64", "row_stride": "i64", "eps": "fp32",
    }  # fmt: skip
    constants = {"HEADS": 8, "DIM": 128, "HEADS_PADDED": 8, "HALF_PADDED": 64, "HAS_NORM": True}
    return draft_ingest._write_kernel, types, constants, 4


def _slots(dtype: str) -> tuple[Any, dict, dict, int]:
    types = {
        "query": dtype, "current": dtype, "pool": dtype, "slot_table": I64, "context_rows": I64, "own_slots": I64,
        "out_parts": F32, "out_lse": F32, "num_blocks": "i32", "num_tiles": "i32", "num_rows": "i32", "scale": "fp32",
    }  # fmt: skip
    strides = "q_stride_b q_stride_f q_stride_k q_stride_h c_stride_b c_stride_f c_stride_k pool_stride table_stride"
    types |= dict.fromkeys(strides.split(), "i64")
    constants = {
        "K": 4, "G": 4, "HKV": 8, "DIM": 128, "DIM_PADDED": 128, "TILE": 4, "M": 64, "N": 64, "N_CURRENT": 16,
        "NUM_SPLITS": 8, "DTYPE": tl.bfloat16 if dtype == BF16 else tl.float32,
    }  # fmt: skip
    if dtype == F32:
        constants |= {"TILE": 1, "M": 16, "N": 32}
    return slot_attention._partial_kernel, types, constants, 4


def _merge() -> tuple[Any, dict, dict, int]:
    types = {"parts": F32, "lse": F32, "out": BF16, "num_rows": "i32"}
    return slot_attention._merge_kernel, types, {"NUM_SPLITS": 8, "DIM": 128, "DIM_PADDED": 128, "ROWS": 16}, 4


CASES = {
    "tree_build": _build,
    "tree_budget": _budget,
    "tree_accept": _accept,
    "draft_ingest": _ingest,
    "slot_attention bf16": lambda: _slots(BF16),
    "slot_attention fp32": lambda: _slots(F32),
    "slot_attention merge": _merge,
}


def compile_kernel(name: str, capability: int) -> dict:
    """Compile one case for compute capability `capability` (90 = Hopper); raises what Triton or ptxas raise."""
    kernel, types, constants, num_warps = CASES[name]()
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    places = {(names.index(n),): value for n, value in constants.items()}
    # Pointers and strides of 8B models are multiples of 16, which Triton finds at a launch and lets the compiler know.
    multiples = [i for i, n in enumerate(names) if types.get(n, "").startswith("*") or "stride" in n]
    hints = {(i,): [["tt.divisibility", 16]] for i in multiples}
    compiled = triton.compile(
        ASTSource(kernel, signature, places, hints),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": 2},
    )
    ptx = compiled.asm["ptx"]
    return {
        "kernel": name,
        "capability": capability,
        "has_machine_code": bool(compiled.asm.get("cubin")),
        "shared_bytes": compiled.metadata.shared,
        "uses_tensor_cores": "mma" in ptx,
    }


if __name__ == "__main__":
    for case in CASES:
        for sm in [int(a) for a in sys.argv[1:]] or [90]:
            print(json.dumps(compile_kernel(case, sm)), flush=True)
