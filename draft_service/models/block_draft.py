"""Block drafters, which propose a block of tokens by one forward: DFlash and DSpark.

DFlash is by Chen et al. 2026 (arXiv 2602.06036). The context costs only projections: the keys and
values of a committed token come from its hidden state in the target, which is projected and
normalised once for all layers. A block's rows are the newest token and mask tokens; each attends to
the context and to its whole block.
"""

import torch
from torch import nn

from draft_service.models.context_keys import ContextKeys
from draft_service.models.draft_head import DraftHead, HeadSpec, Pass
from draft_service.models.markov import MarkovHead
from foredraft.attention.base import AttentionBackend, Batch
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.fusion import Fusion
from foredraft.layers.parameters import Target
from foredraft.models.block_config import BlockOptions
from foredraft.types import FusionShape


class BlockDraft(DraftHead):
    """Layers over [newest token, mask tokens] that read the target's hidden states as context.

    Args:
        spec: See `DraftHead`. The layout decides what config.json leaves open: whether the draft
            has its own LM head, and whether query, key and value weights are one matrix.

    Attributes:
        options: Options of the block.
        markov: DSpark's bias by the previous token; None for DFlash.
    """

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec)
        config, dtype, device = spec.config, spec.dtype, spec.device
        assert config.block is not None
        self.options: BlockOptions = config.block
        layer, size = config.layer, config.layer.hidden_size
        eps = layer.rms_norm_eps
        shape = FusionShape(self.hidden_width, size, normalizes_output=True, eps=eps)
        self.fusion = Fusion(shape, dtype, device, self._forms.of("")(["fc"]))
        self.norm = self.make_norm(size)
        self._layers = [self.make_layer(index, size) for index in range(layer.num_layers)]
        self._norms = [self.make_norm(size) for _ in self._layers]
        self.layers, self.norms = nn.ModuleList(self._layers), nn.ModuleList(self._norms)
        self._context_keys: ContextKeys | None = None
        self._own_lm_head = self.make_lm_head()
        self.markov: MarkovHead | None = None
        if self.options.markov_rank:
            columns = self.lm_head.weight.shape[0] if self._own_lm_head else layer.vocab_size
            self.markov = MarkovHead(self.options, size, layer.vocab_size, columns, dtype, device)

    @property
    def has_causal_layers(self) -> bool:
        """Whether some layers need the block's rows in causal order."""
        return self.options.is_window_causal and any(self.config.layer.windows)

    def prepare(self) -> None:
        """Makes what kernels read beside the loaded weights; before anything is captured."""
        layer, blocks = self.config.layer, [each.attention for each in self._layers]
        is_able = len(set(layer.ropes)) == 1 and ContextKeys.works(blocks)
        # Graphs of an earlier attach hold the addresses of what is there.
        if is_able and self._context_keys is None:
            self._context_keys = ContextKeys(blocks, layer.num_heads * layer.head_dim)

    def targets(self) -> dict[str, Target]:
        """See DraftHead."""
        assert self.fusion is not None
        assert self.fusion.projection is not None
        found = self.fusion.projection.targets("fc")
        tensors = {
            "hidden_norm.weight": self.fusion.norms()["output_norm"],
            "norm.weight": self.norm.weight,
        }
        for index, layer in enumerate(self._layers):
            found |= self.layer_targets(f"layers.{index}.", layer)
            tensors[f"layers.{index}.input_layernorm.weight"] = self._norms[index].weight
        if self._own_lm_head:
            tensors["lm_head.weight"] = self.lm_head.weight
        if self.markov is not None:
            tensors |= self.markov.tensors()
        return found | {name: Target.whole(tensor) for name, tensor in tensors.items()}

    def extend(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, kv: PagedKV
    ) -> None:
        """Writes the keys and values of committed tokens.

        Args:
            features: [n, hidden_size], of `fuse` for the tokens' hidden states.
            positions: int64 [n], of the tokens.
            slots: int64 [n], where they go.
        """
        angles, ropes = self.angles(positions), self.config.layer.ropes
        context = self._context_keys
        if context is not None and context.takes(features, kv):
            context.store(features, angles[ropes[0]], slots, kv)
            return
        for index, layer in enumerate(self._layers):
            rope = ropes[index]
            layer.attention.store(features, angles[rope], index, slots, kv)

    def forward(
        self, batch: Batch, causal: Batch | None, kv: PagedKV, attention: AttentionBackend
    ) -> torch.Tensor:
        """Computes hidden states after the final norm for all rows of some blocks, [num_rows,
        hidden_size].

        Args:
            batch: Rows of the blocks; each row sees its whole block.
            causal: The same rows where each sees no later one of its block; None unless
                `has_causal_layers`.
        """
        angles = self.angles(batch.positions)
        whole = Pass(angles, batch, kv, attention, self.plan(batch, kv, attention), None)
        ordered = whole
        if causal is not None:
            ordered = Pass(angles, causal, kv, attention, self.plan(causal, kv, attention), None)
        stream = self.embedding(batch.tokens)
        x = self._norms[0](stream)
        next_norms = [*self._norms[1:], self.norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            run = whole if self.config.layer.windows[index] is None else ordered
            stream, x = layer(x, stream, run, False, next_norm, owns_stream=True)
        return x
