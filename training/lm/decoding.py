"""Generates text by a model of `training.lm`: many rows at once, with cached keys and values."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from training.lm.model import DecoderLayer, Llama


@torch.no_grad()
def write_text(
    model: Llama,
    prompts: Tensor,
    new_tokens: int,
    temperature: float,
    seed: int,
    on_token: Callable[[], None] = lambda: None,
) -> Tensor:
    """Continues prompts int64 [B, P] by `new_tokens` tokens each, int64 [B, P + new_tokens].

    Args:
        model: The model; it computes in its own dtype.
        temperature: Temperature of sampling; 0 takes the likeliest token.
        seed: Seed of sampling.
        on_token: Called after each token of the batch.
    """
    rows, length = prompts.shape
    cache = _Cache(model, rows, length, new_tokens)
    generator = torch.Generator(prompts.device).manual_seed(seed)
    tokens = [prompts]
    for _ in range(new_tokens):
        logits = cache.forward(tokens[-1]).float()
        if temperature > 0:
            # The largest of the logits with Gumbel noise is a sample of their softmax.
            noise = torch.empty_like(logits).exponential_(generator=generator).log_()
            logits = logits / temperature - noise
        tokens.append(logits.argmax(-1, keepdim=True))
        on_token()
    return torch.cat(tokens, 1)


class _Cache:
    """Keys and values of rows of equal length, in memory for their full length."""

    def __init__(self, model: Llama, rows: int, prompt: int, new_tokens: int) -> None:
        shape, self._model, self._length = model.shape, model, 0
        size = (shape.num_layers, 2, rows, shape.num_kv_heads, prompt + new_tokens, shape.head_dim)
        weight = model.output_weight
        self._memory = torch.zeros(size, dtype=model.compute_dtype, device=weight.device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Takes the next tokens, int64 [B, T]; returns logits after the last, [B, V]."""
        model, start = self._model, self._length
        self._length += tokens.shape[1]
        cos, sin = (table[start : self._length] for table in (model.cos, model.sin))
        x = model.model.embed_tokens(tokens).to(model.compute_dtype)
        for layer, memory in zip(model.model.layers, self._memory, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = x + self._mix(layer, memory, layer.input_layernorm(x), cos, sin)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return model.logits(model.model.norm(x[:, -1]))

    def _mix(
        self, layer: DecoderLayer, memory: Tensor, x: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        attention, start, end = layer.self_attn, self._length - x.shape[1], self._length
        q, k, v = attention.qkv(x, cos, sin)
        memory[0, :, :, start:end], memory[1, :, :, start:end] = k, v
        keys, values = memory[:, :, :, :end]
        is_prompt = start == 0
        if not is_prompt:  # one query a row: the query heads of a group are rows of one product
            q = q.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        mixed = F.scaled_dot_product_attention(
            q, keys, values, is_causal=is_prompt, enable_gqa=is_prompt
        )
        if not is_prompt:
            mixed = mixed.unflatten(2, (-1, 1)).flatten(1, 2)
        return attention.o_proj(mixed.transpose(1, 2).flatten(-2))
