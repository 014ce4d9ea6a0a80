"""Tiny random draft heads in every published layout, and a reference in numpy float64.

The reference follows the papers' equations and shares no code with the heads.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tree = tuple[tuple[int, ...], tuple[int, ...]]  # tokens, and indices of parents
Array = np.ndarray
Path_ = tuple[int, ...]

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 48, 64, 4, 2, 12, 128
EPS, THETA = 1e-5, 10000.0

LAYER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


@dataclass(slots=True)
class TinyHead:
    """A head with SGLang's tensor names.

    Attributes:
        config: Content of config.json.
        tensors: float32 tensors by name.
        num_target_layers: Number of layers of its target.
    """

    algorithm: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    num_streams: int = 1

    @property
    def width(self) -> int:
        return HIDDEN * self.num_streams


def tiny_head(
    algorithm: str,
    seed: int = 0,
    *,
    num_layers: int = 1,
    architecture: str = "",
    draft_vocab: int | None = 80,
    fc_bias: bool | None = None,
    **options: Any,
) -> TinyHead:
    """Creates a random head; `options` go into config.json, and determine the tensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors[name] = torch.randn(rows, columns, generator=generator) * 1.5 / math.sqrt(columns)

    def norm(name: str, size: int = HIDDEN) -> None:
        tensors[name] = 1 + 0.2 * torch.randn(size, generator=generator)

    default = {"EAGLE": "LlamaForCausalLMEagle", "EAGLE3": "LlamaForCausalLMEagle3"}
    architecture = architecture or default.get(algorithm, "MiMoMTP")
    has_bias = architecture.startswith(("Qwen2", "MiMo"))

    def layer(prefix: str, width: int) -> None:
        kv = KV_HEADS * HEAD_DIM
        for name, rows in (("q", HEADS * HEAD_DIM), ("k", kv), ("v", kv)):
            matrix(f"{prefix}self_attn.{name}_proj.weight", rows, width)
            if has_bias:
                bias = 0.3 * torch.randn(rows, generator=generator)
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = bias
        matrix(f"{prefix}self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM)
        if architecture.startswith("Qwen3"):
            norm(f"{prefix}self_attn.q_norm.weight", HEAD_DIM)
            norm(f"{prefix}self_attn.k_norm.weight", HEAD_DIM)
        for name in ("gate", "up"):
            matrix(f"{prefix}mlp.{name}_proj.weight", INTERMEDIATE, HIDDEN)
        matrix(f"{prefix}mlp.down_proj.weight", HIDDEN, INTERMEDIATE)
        norm(f"{prefix}post_attention_layernorm.weight")

    config = {**LAYER, "architectures": [architecture], **options}
    num_streams = 1
    if algorithm == "MTP":
        config["num_nextn_predict_layers"] = num_layers
        for index in range(num_layers):
            prefix = f"model.mtp_layers.{index}."
            matrix(f"{prefix}input_proj.weight", HIDDEN, 2 * HIDDEN)
            for name in (
                "token_layernorm",
                "hidden_layernorm",
                "input_layernorm",
                "final_layernorm",
            ):
                norm(f"{prefix}{name}.weight")
            layer(prefix, HIDDEN)
        return TinyHead(algorithm, config, tensors)
    config["num_hidden_layers"] = num_layers
    if algorithm == "EAGLE":
        matrix("fc.weight", HIDDEN, 2 * HIDDEN)
        for index in range(num_layers):
            layer(f"layers.{index}.", HIDDEN)
            if index:
                norm(f"layers.{index}.input_layernorm.weight")
    else:
        num_streams = options.get("num_aux_hidden_states", 3)
        matrix("fc.weight", HIDDEN, num_streams * HIDDEN)
        for index in range(num_layers):
            prefix = f"layers.{index}." if index else "midlayer."
            layer(prefix, HIDDEN if index else 2 * HIDDEN)
            norm(f"{prefix}hidden_norm.weight")
        norm("midlayer.input_layernorm.weight")
        norm("norm.weight")
        if options.get("fc_norm"):
            for index in range(num_streams):
                norm(f"fc_norm.{index}.weight")
        if options.get("norm_before_fc"):
            norm("input_norm.weight", num_streams * HIDDEN)
        if draft_vocab is not None:
            config["draft_vocab_size"] = draft_vocab
            ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
            matrix("lm_head.weight", draft_vocab, HIDDEN)
            tensors["d2t"] = ids - torch.arange(draft_vocab)
            tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
            tensors["t2d"][ids] = True
    if fc_bias if fc_bias is not None else algorithm == "EAGLE":
        tensors["fc.bias"] = 0.3 * torch.randn(HIDDEN, generator=generator)
    return TinyHead(algorithm, config, tensors, num_streams)


def save_head(head: TinyHead, folder: Path, *, file: str = "model.safetensors") -> Path:
    """Writes a head to files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head.config))
    if file.endswith(".bin"):
        torch.save(head.tensors, folder / file)
    else:
        save_file({name: t.contiguous() for name, t in head.tensors.items()}, folder / file)
    return folder


def rms(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def rotated(x: Array, position: int) -> Array:
    """Applies the rotary embedding to [heads, HEAD_DIM]."""
    half = HEAD_DIM // 2
    angles = position / THETA ** (np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


@dataclass(frozen=True)
class State:
    """Keys and values of each layer, for positions [first, ...) one after another."""

    keys: tuple[tuple[Array, ...], ...]
    values: tuple[tuple[Array, ...], ...]


@dataclass(frozen=True)
class Step:
    """Results of a row."""

    state: State
    logits: Array
    feature: Array


class HeadReference:
    """Computes a head in float64, row by row.

    Args:
        target: Directory whose embedding and LM head it shares.
        token_map: FR-Spec.
    """

    def __init__(
        self, head: TinyHead, target: Path, token_map: Sequence[int] | None = None
    ) -> None:
        self.head = head
        self.t = {
            name.removeprefix("model."): tensor.double().numpy()
            for name, tensor in head.tensors.items()
            if tensor.is_floating_point()
        }
        shared = load_file(target / "model.safetensors")
        self.embedding = shared["model.embed_tokens.weight"].double().numpy()
        tied = shared["model.embed_tokens.weight"]
        self.lm_head = shared.get("lm_head.weight", tied).double().numpy()
        self.columns = np.arange(VOCAB)
        if token_map is not None:
            self.columns = np.array(token_map)
            self.lm_head = self.lm_head[self.columns]
        if "lm_head.weight" in self.t and head.algorithm == "EAGLE3":
            self.lm_head = self.t["lm_head.weight"]
            self.columns = np.arange(len(self.lm_head)) + head.tensors["d2t"].numpy()
        if "embed_tokens.weight" in self.t:
            self.embedding = self.t["embed_tokens.weight"]
        self.num_layers = 1 if head.algorithm == "MTP" else head.config["num_hidden_layers"]

    @property
    def empty(self) -> State:
        return State(((),) * self.num_layers, ((),) * self.num_layers)

    def fused(self, row: Array) -> Array:
        if self.head.algorithm != "EAGLE3":
            return row
        if self.head.config.get("fc_norm"):
            chunks = row.reshape(-1, HIDDEN)
            row = np.concatenate(
                [rms(c, self.t[f"fc_norm.{i}.weight"]) for i, c in enumerate(chunks)]
            )
        if self.head.config.get("norm_before_fc"):
            row = rms(row, self.t["input_norm.weight"])
        return self.t["fc.weight"] @ row + self.t.get("fc.bias", 0.0)

    def row(self, state: State, token: int, feature: Array, position: int, module: int = 0) -> Step:
        """Computes one row after those in `state`."""
        t, e = self.t, self.embedding[token]
        keys, values = list(state.keys), list(state.values)

        def layer(index: int, prefix: str, x: Array, stream: Array) -> Array:
            a = self._attention(index, prefix, x, position, keys, values)
            stream = stream + a
            n = rms(stream, t[f"{prefix}post_attention_layernorm.weight"])
            gate, up = (t[f"{prefix}mlp.{name}_proj.weight"] @ n for name in ("gate", "up"))
            return stream + t[f"{prefix}mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

        if self.head.algorithm == "EAGLE":
            s = t["fc.weight"] @ np.concatenate((e, feature)) + t.get("fc.bias", 0.0)
            for i in range(self.num_layers):
                x = rms(s, t[f"layers.{i}.input_layernorm.weight"]) if i else s
                s = layer(i, f"layers.{i}.", x, s)
            scored = following = s
        elif self.head.algorithm == "EAGLE3":
            x = rms(feature, t["midlayer.hidden_norm.weight"])
            s = x if self.head.config.get("norm_before_residual") else feature
            x = np.concatenate((rms(e, t["midlayer.input_layernorm.weight"]), x))
            s = layer(0, "midlayer.", x, s)
            for i in range(1, self.num_layers):
                s = layer(i, f"layers.{i}.", rms(s, t[f"layers.{i}.hidden_norm.weight"]), s)
            scored = rms(s, t["norm.weight"])
            following = scored if self.head.config.get("norm_output") else s
        else:
            p = f"mtp_layers.{module}."
            if position == 0:
                e = np.zeros_like(e)
            pair = (
                rms(feature, t[f"{p}hidden_layernorm.weight"]),
                rms(e, t[f"{p}token_layernorm.weight"]),
            )
            s = t[f"{p}input_proj.weight"] @ np.concatenate(pair)
            s = layer(0, p, rms(s, t[f"{p}input_layernorm.weight"]), s)
            scored = following = rms(s, t[f"{p}final_layernorm.weight"])
        return Step(State(tuple(keys), tuple(values)), self.lm_head @ scored, following)

    def _attention(
        self,
        index: int,
        prefix: str,
        x: Array,
        position: int,
        keys: list[tuple[Array, ...]],
        values: list[tuple[Array, ...]],
    ) -> Array:
        t = self.t

        def heads(name: str) -> Array:
            full = f"{prefix}self_attn.{name}_proj"
            out = (t[f"{full}.weight"] @ x + t.get(f"{full}.bias", 0.0)).reshape(-1, HEAD_DIM)
            weight = t.get(f"{prefix}self_attn.{name}_norm.weight")
            return out if weight is None else rms(out, weight)

        keys[index] = (*keys[index], rotated(heads("k"), position))
        values[index] = (*values[index], heads("v"))
        all_keys, all_values = np.stack(keys[index], 1), np.stack(values[index], 1)
        out = []
        for head, query in enumerate(rotated(heads("q"), position)):
            group = head // (HEADS // KV_HEADS)
            scores = all_keys[group] @ query / math.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max())
            out.append(weights @ all_values[group] / weights.sum())
        return t[f"{prefix}self_attn.o_proj.weight"] @ np.concatenate(out)


@dataclass
class Drafting:
    """A head's drafts after a text:

    `tokens` are t_0 .., `hidden` the target's h_0 .. [len(tokens) - 1, width].
    """

    reference: HeadReference
    tokens: list[int]
    hidden: Array
    valid_from: int = 0
    known: dict[Path_, Step] = field(default_factory=dict)

    def step(self, path: Path_) -> Step:
        """Computes the row after the drafted tokens of `path`, which follow the text."""
        if path in self.known:
            return self.known[path]
        ref = self.reference
        if path:
            before = self.step(path[:-1])
            position = len(self.tokens) - 2 + len(path)
            step = ref.row(before.state, path[-1], before.feature, position)
        else:
            state = ref.empty
            for p in range(self.valid_from, len(self.tokens) - 1):
                step = ref.row(state, self.tokens[p + 1], ref.fused(self.hidden[p]), p)
                state = step.state
        self.known[path] = step
        return step

    def scores(self, path: Path_) -> Array:
        """Returns logits over the target's vocabulary; minus infinity where the head has no
        column.
        """
        out = np.full(VOCAB, -np.inf)
        out[self.reference.columns] = self.step(path).logits
        return out


def module_chain(
    reference: HeadReference, tokens: list[int], hidden: Array, choose: Callable[[int, Array], int]
) -> list[int]:
    """Returns the draft of several modules, computed from scratch: module k over all positions,
    then one token from its last row.
    """
    features = [reference.fused(row) for row in hidden]
    drafted: list[int] = []
    for module in range(reference.head.config["num_nextn_predict_layers"]):
        state, following = reference.empty, []
        text = [*tokens, *drafted]
        for p, feature in enumerate(features):
            step = reference.row(state, text[p + 1 + module], feature, p, module)
            state = step.state
            following.append(step.feature)
        features = following
        drafted.append(choose(module, step.logits))
    return drafted


def best_paths(scores: Callable[[Path_], Array], steps: int, topk: int, nodes: int) -> set[Path_]:
    """Searches beams by cumulative probability, then the best nodes of all levels (EAGLE-2)."""
    beams: list[tuple[float, Path_]] = [(0.0, ())]
    seen: list[tuple[float, Path_]] = []
    for _ in range(steps):
        grown = []
        for value, path in beams:
            row = scores(path)
            row = row - row.max() - math.log(np.exp(row - row.max()).sum())
            best = np.argsort(-row, kind="stable")[:topk]
            grown += [(value + float(row[v]), (*path, int(v))) for v in best]
        seen += grown
        beams = sorted(grown, key=lambda item: -item[0])[:topk]
    return {path for _, path in sorted(seen, key=lambda item: -item[0])[:nodes]}


def paths_of(tree: Tree) -> set[tuple[int, ...]]:
    """Returns every node's tokens from the root's child down to it."""
    out: list[tuple[int, ...]] = []
    for token, parent in zip(*tree, strict=True):
        out.append(((*out[parent], token)) if parent >= 0 else (token,))
    return set(out)
