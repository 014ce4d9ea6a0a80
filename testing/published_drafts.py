"""Draft models of published shapes, without weights, on the meta device or on a GPU, and their
inputs.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from draft_service.drafters.beam_drafting import Scratch
from draft_service.drafters.graph_drafting import GraphSettings
from draft_service.drafters.head_method import HeadMethod
from draft_service.drafters.method import DraftMethod
from draft_service.drafters.module_chain import ModuleChainMethod
from draft_service.drafters.paged_proposer import PagedProposer
from draft_service.drafters.paged_sequences import Extension, PagedSequence
from draft_service.drafters.standalone import ModelMethod
from draft_service.drafters.tree_limits import TreeLimits
from draft_service.models.draft_head import DraftHead, HeadSpec, SharedWeights
from draft_service.models.eagle import EagleHead
from draft_service.models.eagle3 import Eagle3Head
from draft_service.models.mtp import MTPHead
from draft_service.steps.head_runner import HeadRunner
from foredraft.api.draft.v1 import draft_pb2
from foredraft.attention.paged_triton import TritonAttention
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.head_config import HeadConfig
from foredraft.runner.model_runner import ModelRunner
from foredraft.transport.inline import InlineReader
from foredraft.transport.rows import RowFormat
from foredraft.types import SamplingParams
from testing.draft_cases import limits_of
from testing.drafts import attach_request

BF16, PAGE, NUM_PAGES = torch.bfloat16, 16, 64
STEPS, TOPK, TOKENS = 5, 8, 32
LIMITS = TreeLimits(STEPS, TOPK, TOKENS - 1)

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
# Few and odd numbers of heads, narrow matrices.
SMOLLM_135M = {
    **LLAMA_8B,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
QWEN2_05B = {
    **SMOLLM_135M,
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
# Wide heads, windows, norms of heads and around blocks.
GEMMA3_1B = {
    **SMOLLM_135M,
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
# Sizes of layers, and what else a head is.
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3": (LLAMA_8B, {"algorithm": "EAGLE3", "num_streams": 3, "draft_vocab_size": 32000}),
    "eagle3 of speculators": (
        LLAMA_8B,
        {"algorithm": "EAGLE3", "num_streams": 3, "fc_norm": True, "norm_before_residual": True},
    ),
    "eagle": (LLAMA_8B, {"algorithm": "EAGLE"}),
    "mtp": (LLAMA_8B, {"algorithm": "MTP"}),
    "mtp, several": ({**LLAMA_8B, "num_hidden_layers": 3}, {"algorithm": "MTP"}),
}
MODELS = {"smollm": SMOLLM_135M, "qwen2": QWEN2_05B, "gemma3": GEMMA3_1B}
DRAFTS = (*HEADS, *MODELS)


def make_proposer(
    name: str,
    device: torch.device,
    prepared: Callable[[nn.Module], None],
    graphs: GraphSettings | None = None,
    **attach: Any,
) -> PagedProposer:
    """Creates a draft that a verifier has attached.

    Args:
        prepared: Called with the model.
    """
    limits = limits_of((STEPS, TOPK, TOKENS))
    settings = {"page_size": PAGE, "num_pages": NUM_PAGES, "limits": limits, **attach}
    request = attach_request(**settings)
    slots = request.max_batch + 1
    scratch = Scratch(NUM_PAGES, PAGE, max(1, (STEPS - 1) * TOPK), slots)
    if name in MODELS:
        config = ModelConfig.from_dict(MODELS[name])
        model = DecoderModel(config, BF16, device)
        prepared(model)
        kv, attention = _kv(config, scratch, device), TritonAttention()
        runner = ModelRunner(model, kv, attention, cut_keys=False)
        return PagedProposer(ModelMethod(runner, None, request, scratch), request, LIMITS, graphs)
    head = _head(name, device)
    prepared(head)
    head_runner = HeadRunner(head, _kv(head.config.layer, scratch, device), TritonAttention())
    method: DraftMethod = HeadMethod(head_runner, request, scratch)
    if head.num_modules > 1:
        method, graphs = ModuleChainMethod(head_runner, request), None
    proposer = PagedProposer(method, request, LIMITS, graphs)
    proposer.hidden = BlankReader(RowFormat(head.hidden_width, BF16), device)
    return proposer


class BlankReader(InlineReader):
    """Gives rows of zeros on a device for any that a message names."""

    def __init__(self, row: RowFormat, device: torch.device) -> None:
        super().__init__(row)
        self._row, self._device = row, device

    def read(self, rows: draft_pb2.HiddenRows) -> torch.Tensor:
        return torch.zeros(rows.num_rows, self._row.width, dtype=BF16, device=self._device)


def _kv(config: ModelConfig, scratch: Scratch, device: torch.device) -> PagedKV:
    return PagedKV.for_model(config, NUM_PAGES, PAGE, BF16, device, scratch.num_pages)


def _head(name: str, device: torch.device) -> DraftHead:
    sizes, settings = HEADS[name]
    layer = ModelConfig.from_dict(sizes)
    config = HeadConfig(layer=layer, target_hidden_size=layer.hidden_size, **settings)
    shared = SharedWeights(
        Embedding(layer.vocab_size, layer.hidden_size, 1.0, BF16, device),
        LMHead(layer.hidden_size, layer.vocab_size, None, None, BF16, device),
    )
    vocab = config.draft_vocab_size
    layout = {"lm_head.weight": (vocab, layer.hidden_size)} if vocab else {}
    spec = HeadSpec(config, shared, 32, BF16, device, layout)
    if config.algorithm == "MTP":
        return MTPHead(spec)
    if config.algorithm == "EAGLE":
        return EagleHead(spec, fc_bias=True)
    return Eagle3Head(spec)


def some_extensions(rng: random.Random, max_batch: int, max_context: int) -> list[Extension]:
    """Returns extensions as a step may bring them: a few rows or a thousand, of one sequence or
    many, behind any context.
    """
    num_sequences = rng.choice((1, 1, 1, 2, 5, 16, max_batch))
    most = rng.choice((1, 3, 5, 17, 40, 70, 300, 1500) if num_sequences < 8 else (1, 4, 70))
    longest = int(math.exp(rng.uniform(0, math.log(max_context))))
    counts = [rng.randint(1, min(most, max_context)) for _ in range(num_sequences)]
    starts = [rng.randint(0, min(longest, max_context - count)) for count in counts]
    wanted = [rng.random() < 0.7 for _ in counts]
    return make_extensions(counts, starts, wanted)


def make_extensions(counts: list[int], starts: list[int], wanted: list[bool]) -> list[Extension]:
    """Returns extensions of sequences that share their pages, since nothing reads the results."""
    found = []
    for slot, (count, start, is_wanted) in enumerate(zip(counts, starts, wanted, strict=True)):
        pages = [i % NUM_PAGES for i in range(-(-(start + count) // PAGE))]
        sequence = PagedSequence(
            slot, SamplingParams(), 0, start + count, start + count, pages=pages
        )
        limits = LIMITS if is_wanted else None
        hidden = draft_pb2.HiddenRows(num_rows=count)
        found.append(Extension(sequence, start, [2] * count, hidden, limits))
    return found
