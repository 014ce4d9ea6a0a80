"""Tiny random block drafters in every published layout, and a reference in numpy float64.

The reference follows the published descriptions and shares no code with the drafters.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from testing.draft_heads import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYER,
    VOCAB,
    Array,
    HeadReference,
    TinyHead,
    rms,
    rotated,
    tiny_head,
)

MASK, RANK = 127, 6


def tiny_block(
    algorithm: str,
    seed: int = 0,
    *,
    num_layers: int = 2,
    block: int = 5,
    ids: Sequence[int] = (0, 1),
    markov: str = "vanilla",
    confidence: str = "",
    draft_vocab: int | None = None,
    own_embedding: bool = False,
    layout: str = "zlab",
    window: int | None = None,
    sliding: Sequence[int] = (),
    **options: Any,
) -> TinyHead:
    """Creates a random DFlash or DSpark drafter.

    Args:
        ids: The target's layers, 0-based, whose output is read.
        markov: Kind of DSpark's bias.
        confidence: Inputs of the confidence head: `hidden` or `both`; empty for no head.
        draft_vocab: Number of rows of the drafter's own LM head; None for the target's.
        layout: zlab, deepspec, modelopt or speculators.
        window: Window of the layers in `sliding`.
        options: Further keys of config.json, or of `dflash_config` in z-lab's layout.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors[name] = torch.randn(rows, columns, generator=generator) * 1.5 / math.sqrt(columns)

    def norm(name: str, size: int = HIDDEN) -> None:
        tensors[name] = 1 + 0.2 * torch.randn(size, generator=generator)

    matrix("fc.weight", HIDDEN, len(ids) * HIDDEN)
    norm("hidden_norm.weight")
    norm("norm.weight")
    for index in range(num_layers):
        prefix = f"layers.{index}."
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            matrix(f"{prefix}self_attn.{name}_proj.weight", rows * HEAD_DIM, HIDDEN)
        matrix(f"{prefix}self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM)
        norm(f"{prefix}self_attn.q_norm.weight", HEAD_DIM)
        norm(f"{prefix}self_attn.k_norm.weight", HEAD_DIM)
        for name in ("gate", "up"):
            matrix(f"{prefix}mlp.{name}_proj.weight", INTERMEDIATE, HIDDEN)
        matrix(f"{prefix}mlp.down_proj.weight", HIDDEN, INTERMEDIATE)
        norm(f"{prefix}input_layernorm.weight")
        norm(f"{prefix}post_attention_layernorm.weight")
    columns = draft_vocab or VOCAB
    if draft_vocab is not None:
        chosen = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        matrix("lm_head.weight", draft_vocab, HIDDEN)
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        tensors["t2d"][chosen] = True
    if own_embedding:
        matrix("embed_tokens.weight", VOCAB, HIDDEN)
    if algorithm == "DSPARK":
        matrix("markov_head.markov_w1.weight", VOCAB, RANK)
        matrix("markov_head.markov_w2.weight", columns, RANK)
        if markov == "gated":
            matrix("markov_head.gate_proj.weight", RANK, HIDDEN + RANK)
            tensors["markov_head.gate_proj.bias"] = torch.randn(RANK, generator=generator)
        elif markov == "rnn":
            matrix("markov_head.joint_proj.weight", 3 * RANK, 2 * RANK + HIDDEN)
            tensors["markov_head.joint_proj.bias"] = torch.randn(3 * RANK, generator=generator)
    if confidence:
        matrix("confidence_head.proj.weight", 1, HIDDEN + RANK * (confidence == "both"))
        tensors["confidence_head.proj.bias"] = torch.randn(1, generator=generator)
    config = _config(algorithm, num_layers, block, list(ids), markov, confidence, layout, options)
    layers = config["transformer_layer_config"] if layout == "speculators" else config
    if window is not None:
        kinds = ["full_attention", "sliding_attention"]
        layers["layer_types"] = [kinds[index in sliding] for index in range(num_layers)]
        layers["sliding_window"] = window
    if draft_vocab is not None:
        config["draft_vocab_size"] = draft_vocab
    return TinyHead(algorithm, config, tensors, len(ids))


def _config(
    algorithm: str,
    num_layers: int,
    block: int,
    ids: list[int],
    markov: str,
    confidence: str,
    layout: str,
    options: dict[str, Any],
) -> dict[str, Any]:
    layer = {**LAYER, "num_hidden_layers": num_layers}
    is_dspark = algorithm == "DSPARK"
    extra: dict[str, Any] = {}
    if is_dspark:
        extra = {"markov_rank": RANK, "markov_head_type": markov}
    if confidence:
        extra |= {
            "enable_confidence_head": True,
            "confidence_head_with_markov": confidence == "both",
        }
    if layout == "speculators":
        return {
            "architectures": ["DSparkSpeculator" if is_dspark else "DFlashSpeculator"],
            "speculators_model_type": algorithm.lower(),
            "transformer_layer_config": {**layer, "model_type": "qwen3"},
            "block_size": block,
            "mask_token_id": MASK,
            "aux_hidden_state_layer_ids": [i + 1 for i in ids],
            "target_hidden_size": HIDDEN,
            "sample_from_anchor": is_dspark,
            **extra,
            **options,
        }
    if layout == "deepspec":
        return {
            **layer,
            "architectures": ["Qwen3DSparkModel"],
            "block_size": block,
            "target_layer_ids": ids,
            "mask_token_id": MASK,
            "num_anchors": 512,
            "markov_rank": 0,
            **extra,
            **options,
        }
    nested = {"target_layer_ids": ids, "mask_token_id": MASK, **extra, **options}
    if is_dspark:
        nested["projector_type"] = "dspark"
    if layout == "modelopt":
        nested["use_confidence_head"] = nested.pop("enable_confidence_head", False)
        nested["shift_label"] = is_dspark
        nested["block_size"] = block
        return {**layer, "architectures": ["DFlashDraftModel"], "dflash_config": nested}
    return {
        **layer,
        "architectures": ["DFlashDraftModel"],
        "block_size": block,
        "dflash_config": nested,
    }


class BlockReference:
    """Computes a block drafter in float64, the whole sequence again for each block.

    Args:
        head: Drafter in any layout; tensors by z-lab's names.
        target: Directory of the target, whose embedding and LM head the drafter may share.
        from_anchor: Whether the first row drafts.
        is_window_causal: Whether sliding layers see no later row of the block.
    """

    def __init__(
        self,
        head: TinyHead,
        target: Path,
        from_anchor: bool | None = None,
        is_window_causal: bool = False,
    ) -> None:
        self.t = {n: t.double().numpy() for n, t in head.tensors.items() if t.is_floating_point()}
        shared = load_file(target / "model.safetensors")
        tied = shared["model.embed_tokens.weight"]
        self.embedding = self.t.get("embed_tokens.weight", tied.double().numpy())
        lm_head = shared.get("lm_head.weight", tied).double().numpy()
        self.lm_head = self.t.get("lm_head.weight", lm_head)
        self.columns = np.arange(len(self.lm_head))
        if "d2t" in head.tensors:
            self.columns = self.columns + head.tensors["d2t"].numpy()
        is_dspark = head.algorithm == "DSPARK"
        self.from_anchor = is_dspark if from_anchor is None else from_anchor
        self.is_window_causal = is_window_causal
        nested = head.config.get("dflash_config") or {}
        layer = head.config.get("transformer_layer_config") or head.config
        self.block = head.config.get("block_size") or nested["block_size"]
        self.kind = nested.get("markov_head_type") or head.config.get("markov_head_type")
        self.num_layers = layer["num_hidden_layers"]
        types = layer.get("layer_types") or ["full_attention"] * self.num_layers
        self.windows = [layer["sliding_window"] if "sliding" in t else None for t in types]

    def hidden(self, bonus: int, states: Array, valid_from: int = 0) -> Array:
        """Computes hidden states after the final norm, [block, H].

        `states` [L, width] are the target's for all tokens before the newest.
        """
        t, length = self.t, len(states)
        g = rms(states @ t["fc.weight"].T, t["hidden_norm.weight"])
        x = self.embedding[[bonus] + [MASK] * (self.block - 1)]
        rows = np.arange(length, length + self.block)
        for i in range(self.num_layers):
            p = f"layers.{i}."
            n = rms(x, t[f"{p}input_layernorm.weight"])
            queries = self._heads(f"{p}self_attn.q", n, rows)
            keys = np.concatenate(
                (
                    self._heads(f"{p}self_attn.k", g, np.arange(length)),
                    self._heads(f"{p}self_attn.k", n, rows),
                )
            )
            inputs = np.concatenate((g, n))
            values = (inputs @ t[f"{p}self_attn.v_proj.weight"].T).reshape(-1, KV_HEADS, HEAD_DIM)
            at = np.arange(length + self.block)
            seen = (at[None, :] >= valid_from) & np.ones((self.block, 1), dtype=bool)
            if self.windows[i] is not None:
                seen &= at[None, :] > rows[:, None] - self.windows[i]
                if self.is_window_causal:
                    seen &= at[None, :] <= rows[:, None]
            out = np.zeros((self.block, HEADS, HEAD_DIM))
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = queries[:, head] @ keys[:, group].T / math.sqrt(HEAD_DIM)
                weights = np.exp(scores - scores.max(-1, keepdims=True)) * seen
                weights /= weights.sum(-1, keepdims=True)
                out[:, head] = weights @ values[:, group]
            x = x + out.reshape(self.block, -1) @ t[f"{p}self_attn.o_proj.weight"].T
            n = rms(x, t[f"{p}post_attention_layernorm.weight"])
            gate, up = (n @ t[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ t[f"{p}mlp.down_proj.weight"].T
        return rms(x, t["norm.weight"])

    def chain(
        self,
        bonus: int,
        states: Array,
        steps: int,
        choose: Callable[[int, Array], int] | None = None,
        valid_from: int = 0,
    ) -> list[int]:
        """Returns the drafted tokens.

        Args:
            choose: Picks a token of the target by (depth, scores [VOCAB], minus infinity where
                there is no column); None for the largest.
        """
        hidden = self.hidden(bonus, states, valid_from)[int(not self.from_anchor) :]
        drafted, previous = [], bonus
        state = np.zeros(RANK)
        for depth in range(steps):
            row = hidden[depth]
            logits = self.lm_head @ row
            if "markov_head.markov_w1.weight" in self.t:
                embedded = self.t["markov_head.markov_w1.weight"][previous]
                bias, state = self._bias(row, embedded, state)
                logits = logits + bias
            scores = np.full(VOCAB, -np.inf)
            scores[self.columns] = logits
            previous = int(scores.argmax()) if choose is None else choose(depth, scores)
            drafted.append(previous)
        return drafted

    def after(self, bonus: int, states: Array, path: tuple[int, ...]) -> Array:
        """Computes scores [VOCAB] of the token after a path of drafted tokens."""
        found: list[Array] = []

        def choose(depth: int, scores: Array) -> int:
            found.append(scores)
            return path[depth] if depth < len(path) else 0

        self.chain(bonus, states, len(path) + 1, choose)
        return found[-1]

    def _bias(self, row: Array, embedded: Array, state: Array) -> tuple[Array, Array]:
        t = self.t
        w2 = t["markov_head.markov_w2.weight"]
        if self.kind == "gated":
            both = np.concatenate((row, embedded))
            raw = t["markov_head.gate_proj.weight"] @ both + t["markov_head.gate_proj.bias"]
            return w2 @ (embedded / (1 + np.exp(-raw))), state
        if self.kind == "rnn":
            z = np.concatenate((state, embedded, row))
            raw = t["markov_head.joint_proj.weight"] @ z + t["markov_head.joint_proj.bias"]
            gate, candidate, out = raw[:RANK], raw[RANK : 2 * RANK], raw[2 * RANK :]
            gate = 1 / (1 + np.exp(-gate))
            return w2 @ np.tanh(out), gate * state + (1 - gate) * np.tanh(candidate)
        return w2 @ embedded, state

    def _heads(self, name: str, x: Array, positions: Array) -> Array:
        """Returns normalised and rotated heads, [n, heads, HEAD_DIM]."""
        heads = (x @ self.t[f"{name}_proj.weight"].T).reshape(len(x), -1, HEAD_DIM)
        heads = rms(heads, self.t[f"{name}_norm.weight"])
        return np.stack([rotated(h, int(p)) for h, p in zip(heads, positions, strict=True)])


def tiny_peagle(seed: int = 0, num_layers: int = 2, **options: Any) -> TinyHead:
    """Creates a random P-EAGLE head: EAGLE-3's tensors and the mask rows' tensors."""
    head = tiny_head(
        "EAGLE3", seed, num_layers=num_layers, mask_token_id=MASK, draft_vocab=80, **options
    )
    generator = torch.Generator().manual_seed(seed + 1000)
    head.tensors["mask_hidden"] = torch.randn(1, 1, head.width, generator=generator)
    head.tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    return TinyHead("PEAGLE", head.config, head.tensors, head.num_streams)


def parallel_chain(
    head: TinyHead, target: Path, tokens: list[int], states: Array, steps: int
) -> list[int]:
    """Returns P-EAGLE's greedy draft after `tokens`.

    `states` [n - 1, width] are the target's hidden states of all tokens but the last.
    """
    as_eagle3 = TinyHead("EAGLE3", head.config, head.tensors, head.num_streams)
    reference = HeadReference(as_eagle3, target)
    state, drafted = reference.empty, []
    for p in range(len(tokens) - 1):
        step = reference.row(state, tokens[p + 1], reference.fused(states[p]), p)
        state = step.state
    mask = reference.fused(head.tensors["mask_hidden"].double().numpy().reshape(-1))
    for depth in range(steps):
        if depth:
            step = reference.row(state, MASK, mask, len(tokens) - 2 + depth)
            state = step.state
        drafted.append(int(reference.columns[step.logits.argmax()]))
    return drafted
