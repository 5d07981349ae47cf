"""Tree building on the device: the trees of a round without a host read, one Triton program a request.

Shape legend: as in tree_build_ref, which says what is computed.
A program sorts its candidates once by (score, index), then walks the order in small chunks and keeps what is new, until
it has enough. Two candidates are the same node when their token paths are equal, which 64-bit path hashes decide: a
collision (odds of about C * C / 2 ** 65 a tree) would drop a node, and costs speed, never text.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import check_tensor, check_tensors
from paceline.kernels.reference.tree_build import MAX_CANDIDATES, MAX_DEPTH, MAX_NODES, BuiltTrees, num_words

_CHUNK = 32


@triton.jit
def _mix(x):
    """Spread the bits of a uint64 (the finaliser of MurmurHash3)."""
    x = x ^ (x >> 33)
    x = x * 0xFF51AFD7ED558CCD
    x = x ^ (x >> 33)
    x = x * 0xC4CEB9FE1A85EC53
    return x ^ (x >> 33)


@triton.jit(do_not_specialize=["num_candidates", "max_nodes"])
def _build_kernel(
    scores,
    parents,
    token_ids,
    depths,
    anchors,
    wanted,
    out_tokens,
    out_parents,
    out_depths,
    out_scores,
    out_candidates,
    out_bits,
    out_counts,
    num_candidates,
    max_nodes,
    C: tl.constexpr,
    W: tl.constexpr,
    V: tl.constexpr,
    V_PADDED: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    NUM_JUMPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    base = b * num_candidates
    c = tl.arange(0, C)
    inside = c < num_candidates
    score = tl.load(scores + base + c, mask=inside, other=float("-inf"))
    is_present = score > float("-inf")  # NaN is absent, too
    score = tl.where(is_present, score, float("-inf"))
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 equals 0.0, but its bits say otherwise

    # Order: float bits as an integer that rises with the score; below it, the reversed index breaks ties.
    bits = score.to(tl.int32, bitcast=True)
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (rising.to(tl.int64) << 32) + (C - 1 - c)
    order = C - 1 - (tl.sort(key, descending=True) & (C - 1)).to(tl.int32)
    num_present = tl.sum(is_present.to(tl.int32))

    # Path hashes by pointer jumping: after k jumps a hash covers 2 ** k tokens of the path.
    parent = tl.load(parents + base + c, mask=inside, other=-1).to(tl.int32)
    token = tl.load(token_ids + base + c, mask=inside, other=0)
    depth = tl.load(depths + base + c, mask=inside, other=0)
    path_hash = _mix((token ^ (depth << 40)).to(tl.uint64) + 1)
    jump = parent
    for _ in tl.static_range(NUM_JUMPS):
        safe = tl.where(jump < 0, 0, jump)
        above = tl.gather(path_hash, safe, 0)
        path_hash = tl.where(jump < 0, path_hash, _mix(path_hash * 3 + above))
        jump = tl.where(jump < 0, -1, tl.gather(jump, safe, 0))

    # Keep what is new, chunk by chunk.
    row = tl.arange(0, W)
    lane = tl.arange(0, CHUNK)
    limit = tl.maximum(tl.minimum(tl.load(wanted + b), max_nodes), 0).to(tl.int32)
    kept = tl.full((W,), -1, tl.int32)  # candidate of each row
    count = tl.sum(tl.zeros((W,), tl.int32))  # a scalar the loop may carry
    start = count
    while (count < limit) & (start < num_present):
        at = start + lane
        chunk = tl.gather(order, tl.minimum(at, C - 1), 0)
        mine = tl.gather(path_hash, chunk, 0)
        theirs = tl.gather(path_hash, tl.where(kept < 0, 0, kept), 0)
        is_known = (mine[:, None] == theirs[None, :]) & (kept >= 0)[None, :]
        is_repeat = (mine[:, None] == mine[None, :]) & (lane[None, :] < lane[:, None])
        is_old = tl.max(is_known.to(tl.int32), axis=1) + tl.max(is_repeat.to(tl.int32), axis=1)
        is_new = ((is_old == 0) & (at < num_present)).to(tl.int32)
        place = count + tl.cumsum(is_new, axis=0)  # rows start behind the root
        lands = (row[:, None] == place[None, :]) & ((is_new > 0) & (place <= limit))[None, :]
        kept = tl.maximum(kept, tl.max(tl.where(lands, chunk[None, :], -1), axis=1))
        count = tl.minimum(count + tl.sum(is_new), limit)
        start += CHUNK

    is_node = kept >= 0
    source = tl.where(is_node, kept, 0)
    # The parent's row is the one with the hash of the parent: the parent itself may have been merged away.
    row_hash = tl.gather(path_hash, source, 0)
    up = tl.gather(parent, source, 0)
    up_hash = tl.gather(path_hash, tl.where(up < 0, 0, up), 0)
    parent_row = tl.zeros((W,), tl.int32)
    for first in range(0, W, CHUNK):
        other = first + lane
        other_hash = tl.gather(row_hash, tl.minimum(other, W - 1), 0)
        is_row = (other >= 1) & (other <= count)
        hit = (up_hash[:, None] == other_hash[None, :]) & is_row[None, :]
        parent_row = tl.maximum(parent_row, tl.max(tl.where(hit, other[None, :], 0), axis=1))
    parent_row = tl.where(is_node & (up >= 0), parent_row, 0)

    word = tl.arange(0, V_PADDED)
    ancestors = tl.zeros((W, V_PADDED), tl.int32)
    current = row
    for _ in range(MAX_DEPTH + 1):
        bit = tl.full((W,), 1, tl.int32) << (current & 31)
        ancestors = ancestors | tl.where((current >> 5)[:, None] == word[None, :], bit[:, None], 0)
        current = tl.where(is_node, tl.gather(parent_row, current, 0), current)

    is_out = row <= max_nodes
    is_root = row == 0
    to = b * (max_nodes + 1) + row
    at = base + source
    found_token = tl.load(token_ids + at, mask=is_node, other=0)
    found_token = tl.where(is_root, tl.load(anchors + b), found_token)
    found_depth = tl.load(depths + at, mask=is_node, other=0)
    found_score = tl.load(scores + at, mask=is_node, other=float("-inf"))
    tl.store(out_tokens + to, found_token, mask=is_out)
    tl.store(out_parents + to, tl.where(is_node, parent_row, -1).to(tl.int64), mask=is_out)
    tl.store(out_depths + to, found_depth, mask=is_out)
    tl.store(out_scores + to, tl.where(is_root, 0.0, found_score), mask=is_out)
    tl.store(out_candidates + to, kept.to(tl.int64), mask=is_out)
    tl.store(out_bits + to[:, None] * V + word[None, :], ancestors, mask=is_out[:, None] & (word < V)[None, :])
    tl.store(out_counts + b, count.to(tl.int64))


def build_trees(
    *,
    scores: torch.Tensor,
    parents: torch.Tensor,
    token_ids: torch.Tensor,
    depths: torch.Tensor,
    anchor_token_ids: torch.Tensor,
    num_nodes: torch.Tensor,
    max_nodes: int,
    max_depth: int,
) -> BuiltTrees:
    """`tree_build_ref.build_trees` on the device; shapes of the result follow from B and max_nodes alone.

    max_depth: of any candidate; deeper ones would get wrong ancestors. A candidate that is taken before its parent
    hangs below the root here.
    Raises: ValueError on a wrong shape, dtype, layout or device, and on sizes beyond the kernel's.  Syncs: none.
    """
    device = scores.device
    check_tensors(device)
    check_tensor("scores", scores, (None, None), torch.float32)
    shape = batch, num_candidates = scores.shape
    for name, tensor in (("parents", parents), ("token_ids", token_ids), ("depths", depths)):
        check_tensor(name, tensor, shape, torch.int64, device)
    for name, tensor in (("anchor_token_ids", anchor_token_ids), ("num_nodes", num_nodes)):
        check_tensor(name, tensor, (batch,), torch.int64, device)
    if not 0 <= max_nodes <= MAX_NODES:
        raise ValueError(f"max_nodes must be in [0, {MAX_NODES}], got {max_nodes}")
    if num_candidates > MAX_CANDIDATES:
        raise ValueError(f"scores must have at most {MAX_CANDIDATES} candidates a request, got {num_candidates}")
    if not 1 <= max_depth <= MAX_DEPTH:
        raise ValueError(f"max_depth must be in [1, {MAX_DEPTH}], got {max_depth}")
    width = max_nodes + 1
    out = BuiltTrees.empty(batch, width, device)
    if batch == 0:
        return out
    words = num_words(width)
    padded = max(triton.next_power_of_2(num_candidates), _CHUNK)
    _build_kernel[(batch,)](
        scores,
        parents,
        token_ids,
        depths,
        anchor_token_ids,
        num_nodes,
        out.token_ids,
        out.parents,
        out.depths,
        out.scores,
        out.candidates,
        out.ancestor_bits,
        out.num_nodes,
        num_candidates,
        max_nodes,
        C=padded,
        W=max(triton.next_power_of_2(width), _CHUNK),
        V=words,
        V_PADDED=triton.next_power_of_2(words),
        MAX_DEPTH=max_depth,
        NUM_JUMPS=(max_depth - 1).bit_length(),
        CHUNK=_CHUNK,
        num_warps=4 if padded <= 1024 else 8,
    )
    return out
