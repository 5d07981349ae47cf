"""Randomly initialised files in the layouts in which drafters are published, and what their networks compute.

The forwards are written from the papers on the released tensors, row by row, and share nothing with the package.
Shape legend: n committed rows, K slots, H hidden size, Dh head dim.
"""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from tests.helpers.fakes import tiny_model, tiny_tokenizer

VOCAB, HIDDEN, DRAFT_VOCAB, EPS, THETA = 50, 8, 30, 1e-5, 5000.0
NUM_HEADS, NUM_KV_HEADS, WIDTH, BLOCK, MASK_ID = 2, 1, 12, 5, 49
TAPS = (1, 5, 8)  # the usual three of a target with 12 layers


def make_target(**changes):
    g = torch.Generator().manual_seed(7)
    values = {
        "version": "target-1", "vocab_size": VOCAB, "feature_size": 3 * HIDDEN, "device": "cpu", "num_layers": 12, "tap_layers": TAPS,
        "embed_weight": torch.randn(VOCAB, HIDDEN, generator=g), "head_weight": torch.randn(VOCAB, HIDDEN, generator=g),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def write_target(folder):
    """Write a checkpoint whose sizes fit the files."""
    tiny_model(vocab=VOCAB, layers=12, width=HIDDEN, heads=2, kv_heads=1, head_dim=4).save_pretrained(folder)
    tiny_tokenizer(VOCAB).save_pretrained(folder)
    return folder


class _Maker:
    def __init__(self, seed):
        self.g, self.tensors = torch.Generator().manual_seed(seed), {}

    def add(self, name, *shape):
        scale = 0.35 if len(shape) > 1 else 0.2
        self.tensors[name + ".weight"] = torch.randn(*shape, generator=self.g) * scale + (len(shape) == 1)

    def layer(self, prefix, width, head_dim, norms):
        for n, rows in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
            self.add(f"{prefix}.self_attn.{n}_proj", rows * head_dim, width)
        self.add(f"{prefix}.self_attn.o_proj", HIDDEN, NUM_HEADS * head_dim)
        self.add(f"{prefix}.mlp.gate_proj", WIDTH, HIDDEN)
        self.add(f"{prefix}.mlp.up_proj", WIDTH, HIDDEN)
        self.add(f"{prefix}.mlp.down_proj", HIDDEN, WIDTH)
        for n in norms:
            self.add(f"{prefix}.{n}", HIDDEN)

    def vocabulary(self):
        ids = torch.randperm(VOCAB, generator=self.g)[:DRAFT_VOCAB].sort().values
        self.tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
        self.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)


def _common(**more):
    return {
        "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_KV_HEADS,
        "rms_norm_eps": EPS, "rope_theta": THETA, "rope_scaling": None, "vocab_size": VOCAB, "hidden_act": "silu", "attention_bias": False, **more,
    }  # fmt: skip


def eagle3_files(seed=0):
    m = _Maker(seed)
    m.add("fc", HIDDEN, 3 * HIDDEN)
    m.layer("midlayer", 2 * HIDDEN, 6, ("input_layernorm", "hidden_norm", "post_attention_layernorm"))
    m.add("norm", HIDDEN)
    m.add("lm_head", DRAFT_VOCAB, HIDDEN)
    m.vocabulary()
    names = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    return _common(head_dim=6, draft_vocab_size=DRAFT_VOCAB, **names), m.tensors


def speculators_files(seed=0):
    """EAGLE-3 as `speculators` writes it: nested settings, a copy of the embedding, the residual behind the norm."""
    flat, tensors = eagle3_files(seed)
    nested = {k: v for k, v in flat.items() if k not in ("architectures", "draft_vocab_size")}
    values = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "norm_before_residual": True,
        "draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [t + 1 for t in TAPS], "transformer_layer_config": nested,
    }  # fmt: skip
    renamed = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
    return values, {**renamed, "embed_tokens.weight": make_target().embed_weight.clone()}


def parallel_head_files(seed=0, is_causal=False):
    m = _Maker(seed)
    m.add("fc", HIDDEN, 3 * HIDDEN)
    m.add("hidden_norm", HIDDEN)
    for i in range(2):
        m.layer(f"layers.{i}", HIDDEN, 6, ("input_layernorm", "post_attention_layernorm"))
        m.add(f"layers.{i}.self_attn.q_norm", 6)
        m.add(f"layers.{i}.self_attn.k_norm", 6)
    m.add("norm", HIDDEN)
    own = {"mask_token_id": MASK_ID, "target_layer_ids": list(TAPS), **({"causal_head": True} if is_causal else {})}
    return _common(
        head_dim=6, architectures=["DFlashDraftModel"], block_size=BLOCK, num_hidden_layers=2, num_target_layers=12,
        layer_types=["full_attention"] * 2, dflash_config=own,
    ), m.tensors  # fmt: skip


MARKOV_RANK = 3


def dspark_files(seed=0, has_wrapper=False):
    """A DFlash head with DSpark's previous-token bias and its confidence head; early files wrap both."""
    values, tensors = parallel_head_files(seed)
    m, before = _Maker(seed + 1), "logit_head." if has_wrapper else ""
    m.add(before + "markov_head.markov_w1", VOCAB, MARKOV_RANK)
    m.add(before + "markov_head.markov_w2", VOCAB, MARKOV_RANK)
    m.add(before + "confidence_head.proj", 1, HIDDEN + MARKOV_RANK)
    m.tensors[before + "confidence_head.proj.bias"] = torch.zeros(1)
    values["architectures"] = ["DSparkDraftModel"]
    values["dflash_config"] |= {
        "projector_type": "dspark", "markov_rank": MARKOV_RANK, "markov_head_type": "vanilla", "attention_mode": "gqa",
        "enable_confidence_head": True, "confidence_head_with_markov": True, "confidence_head_alpha": 1.0,
    }  # fmt: skip
    return values, {**tensors, **m.tensors}


def specblock_files(seed=0, num_slots=4):
    m = _Maker(seed)
    m.add("input_layer.condition_proj", HIDDEN, 3 * HIDDEN)
    for n in ("condition_norm", "token_norm", "query_norm"):
        m.add("input_layer." + n, HIDDEN)
    m.add("input_layer.position_queries", num_slots, HIDDEN)
    m.add("input_layer.fuse", HIDDEN, 3 * HIDDEN)
    for i in range(2):
        m.layer(f"layers.{i}", HIDDEN, HIDDEN // NUM_HEADS, ("input_layernorm", "post_attention_layernorm"))
    m.add("shift_proj.0", HIDDEN, 2 * HIDDEN)
    m.add("norm", HIDDEN)
    m.add("lm_head", DRAFT_VOCAB, HIDDEN)
    m.add("rank_head.0", 16, HIDDEN + 15)
    m.add("rank_head.2", 4, 16)
    m.vocabulary()
    names = {"architectures": ["LlamaForCausalLMSpecBlockShift"], "num_hidden_layers": 2, "rank_classes": 4}
    return _common(draft_vocab_size=DRAFT_VOCAB, diffspec_draft_token_num=num_slots, **names), m.tensors


def write(folder, values, tensors, shards=None):
    """Write config.json and model.safetensors, or so many shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    if shards is None:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = {n: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, n in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({n: tensors[n] for n, f in names.items() if f == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


# ---- what the released networks compute


def _rms(x, weight):
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def _frequency(i, head_dim, scaling):
    """The i-th of the head's angles per position; scaling: Llama-3.1's config.json entry or None."""
    frequency = THETA ** (-2 * i / head_dim)
    if scaling is None:
        return frequency
    wave, context = 2 * math.pi / frequency, scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wave < context / high:
        return frequency
    if wave > context / low:
        return frequency / scaling["factor"]
    smooth = (context / wave - low) / (high - low)
    return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency


def _rope(x, positions, scaling=None):
    """x (T, heads, Dh), positions (T,): element i pairs with element i + Dh / 2."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = positions.double() * _frequency(i, x.shape[-1], scaling)
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        out[..., i] = x[..., i] * cos - x[..., i + half] * sin
        out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
    return out


def _heads(x, count):
    return x.view(x.shape[0], count, -1)


def _attend(q, k, v, sees):
    """q (Tq, heads, Dh), k and v (Tk, kv heads, Dh), sees (Tq, Tk) bool -> (Tq, heads * Dh)."""
    out = []
    for h in range(NUM_HEADS):
        g = h * NUM_KV_HEADS // NUM_HEADS
        scores = q[:, h] @ k[:, g].T / q.shape[-1] ** 0.5
        out.append(scores.masked_fill(~sees, float("-inf")).softmax(-1) @ v[:, g])
    return torch.cat(out, -1)


def _mlp(w, prefix, x):
    gate, up = x @ w[prefix + ".gate_proj.weight"].T, x @ w[prefix + ".up_proj.weight"].T
    return (gate / (1 + torch.exp(-gate)) * up) @ w[prefix + ".down_proj.weight"].T


class Eagle3Forward:
    """Rows (target feature, next token), then rows of the drafter's own hidden state along one path."""

    def __init__(self, tensors, embed, norm_before_residual=False, scaling=None):
        self.w = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
        self.embed, self.norm_before_residual, self.scaling = embed, norm_before_residual, scaling

    def rows(self, hidden, tokens, positions, k, v):
        """Adds rows to k and v; returns the rows' own hidden states."""
        w, n = self.w, "layers.0."
        normed = _rms(hidden, w[n + "hidden_norm.weight"])
        x = torch.cat((_rms(self.embed[tokens], w[n + "input_layernorm.weight"]), normed), -1)
        q, own_k, own_v = (x @ w[f"{n}self_attn.{p}_proj.weight"].T for p in "qkv")
        q = _rope(_heads(q, NUM_HEADS), positions, self.scaling)
        k = torch.cat((k, _rope(_heads(own_k, NUM_KV_HEADS), positions, self.scaling)))
        v = torch.cat((v, _heads(own_v, NUM_KV_HEADS)))
        before = k.shape[0] - len(tokens)
        sees = torch.arange(k.shape[0])[None] <= before + torch.arange(len(tokens))[:, None]
        y = (normed if self.norm_before_residual else hidden) + _attend(q, k, v, sees) @ w[
            n + "self_attn.o_proj.weight"
        ].T
        return y + _mlp(w, n + "mlp", _rms(y, w[n + "post_attention_layernorm.weight"])), k, v

    def logits(self, features, tokens, path):
        """features (n, 3H), tokens (n + 1): (len(path) + 1, Vd) at the newest row and below each token of a path."""
        w, n = self.w, features.shape[0]
        empty = torch.zeros(0, NUM_KV_HEADS, 6)
        hidden, k, v = self.rows(features @ w["fc.weight"].T, tokens[1:], torch.arange(n), empty, empty)
        out = [hidden[-1:]]
        for i, token in enumerate(path):
            hidden, k, v = self.rows(out[-1], torch.tensor([token]), torch.tensor([n + i]), k, v)
            out.append(hidden)
        return _rms(torch.cat(out), w["norm.weight"]) @ w["lm_head.weight"].T


def parallel_head_logits(w, target, features, anchor, is_causal, scaling=None):
    """features (n, 3H) of the rows before the anchor: (block, V), row by row, the anchor's first."""
    n = features.shape[0]
    g = _rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = target.embed_weight[torch.tensor([anchor] + [MASK_ID] * (BLOCK - 1))]
    positions = torch.arange(n + BLOCK)
    block = torch.ones(BLOCK, BLOCK, dtype=torch.bool)
    sees = torch.cat((torch.ones(BLOCK, n, dtype=torch.bool), block.tril() if is_causal else block), 1)
    for i in range(2):
        a = f"layers.{i}.self_attn."
        own = _rms(x, w[f"layers.{i}.input_layernorm.weight"])
        rows = torch.cat((g, own))
        q = _rope(
            _rms(_heads(own @ w[a + "q_proj.weight"].T, NUM_HEADS), w[a + "q_norm.weight"]), positions[n:], scaling
        )
        k = _rope(
            _rms(_heads(rows @ w[a + "k_proj.weight"].T, NUM_KV_HEADS), w[a + "k_norm.weight"]), positions, scaling
        )
        v = _heads(rows @ w[a + "v_proj.weight"].T, NUM_KV_HEADS)
        x = x + _attend(q, k, v, sees) @ w[a + "o_proj.weight"].T
        x = x + _mlp(w, f"layers.{i}.mlp", _rms(x, w[f"layers.{i}.post_attention_layernorm.weight"]))
    return _rms(x, w["norm.weight"]) @ target.head_weight.T


def dspark_logits(w, target, features, path):
    """Logits (block, V) of DSpark's slots behind the tokens of a path, the anchor first; slot k follows path[k]."""
    base = parallel_head_logits(w, target, features, path[0], is_causal=False)
    return base + w["markov_head.markov_w1.weight"][torch.tensor(path)] @ w["markov_head.markov_w2.weight"].T


class SpecBlockForward:
    """Block 1 of all rows, then block 2 below one slot of the newest row, at block 1's positions."""

    def __init__(self, w, embed, num_slots=4):
        self.w, self.embed, self.num_slots = w, embed, num_slots

    def _inputs(self, cond, tokens):
        """cond (R, H), tokens (R,) -> (R * K, H)."""
        w, p, rows = self.w, "input_layer.", []
        for c, t in zip(cond, tokens, strict=True):
            for k in range(self.num_slots):
                paths = (
                    _rms(c, w[p + "condition_norm.weight"]), _rms(self.embed[t], w[p + "token_norm.weight"]),
                    _rms(w[p + "position_queries.weight"][k], w[p + "query_norm.weight"]),
                )  # fmt: skip
                rows.append(w[p + "fuse.weight"] @ torch.cat(paths))
        return torch.stack(rows)

    def _layers(self, x, positions, before, sees):
        """before: per layer keys and values that stand before the new ones. Returns hidden and per-layer K, V."""
        w, kv = self.w, []
        for i in range(2):
            if i:
                slots = x.view(-1, self.num_slots, HIDDEN)
                shifted = torch.stack([slots[:, max(k - 1, 0)] for k in range(self.num_slots)], 1).view(x.shape)
                x = torch.cat((x, shifted), -1) @ w["shift_proj.0.weight"].T
            y, a = _rms(x, w[f"layers.{i}.input_layernorm.weight"]), f"layers.{i}.self_attn."
            q = _rope(_heads(y @ w[a + "q_proj.weight"].T, NUM_HEADS), positions)
            k = torch.cat((before[i][0], _rope(_heads(y @ w[a + "k_proj.weight"].T, NUM_KV_HEADS), positions)))
            v = torch.cat((before[i][1], _heads(y @ w[a + "v_proj.weight"].T, NUM_KV_HEADS)))
            x = x + _attend(q, k, v, sees) @ w[a + "o_proj.weight"].T
            x = x + _mlp(w, f"layers.{i}.mlp", _rms(x, w[f"layers.{i}.post_attention_layernorm.weight"]))
            kv.append((k, v))
        return x, kv

    def run(self, features, tokens, leaves):
        """Logits (K, Vd) and rank classes (K,) of the newest row, then those below each leaf (slot, token)."""
        n, k = features.shape[0], self.num_slots
        row, slot = torch.arange(n * k) // k, torch.arange(n * k) % k
        sees = (row[None] < row[:, None]) | ((row[None] == row[:, None]) & (slot[None] <= slot[:, None]))
        empty = torch.zeros(0, NUM_KV_HEADS, HIDDEN // NUM_HEADS)
        x = self._inputs(features @ self.w["input_layer.condition_proj.weight"].T, tokens[1:])
        x, kv = self._layers(x, row + 1 + slot, [(empty, empty)] * 2, sees)
        newest = x[-k:]
        out = [self._heads(newest)]
        for s, token in leaves:
            context = (row < n - 1) | (slot <= s)
            own = torch.ones(k, k, dtype=torch.bool).tril()
            sees = torch.cat((context[None].expand(k, -1), own), 1)
            y = self._inputs(newest[s : s + 1], torch.tensor([token]))
            y, _ = self._layers(y, n + torch.arange(k), kv, sees)
            out.append(self._heads(y))
        return out

    def _heads(self, x):
        w = self.w
        z = _rms(x, w["norm.weight"])
        logits = z @ w["lm_head.weight"].T
        top = logits.sort(-1, descending=True).values[:, :20]
        p = top.softmax(-1)
        gaps = torch.stack([top[:, 0] - top[:, i] for i in (1, 2, 4)], -1)
        f = torch.cat((p.log()[:, :10], gaps, p[:, :1], -(p * p.log()).sum(-1, keepdim=True)), -1)
        y = torch.cat((z, f), -1) @ w["rank_head.0.weight"].T
        return logits, (y * torch.sigmoid(y) @ w["rank_head.2.weight"].T).argmax(-1)
