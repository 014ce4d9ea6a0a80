"""P-EAGLE as a plain torch module: an EAGLE-3 head whose mask rows propose a whole chain in one
forward.

Slot p takes the target's features of position p and the token of position p + 1, as in EAGLE-3.
Behind the newest slot s stand K - 1 mask rows, at slots s + 1, s + 2, ...: the mask token's
embedding, and one learned feature. The row at slot s + d predicts the token at position s + d + 2.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.draft.heads import Eagle3Head, HeadLayer, HeadShape, save_head
from training.draft.unroll import DraftInputs
from training.export import write_json


class ParallelHead(Eagle3Head):
    """P-EAGLE: EAGLE-3's layer, ordinary layers after it, and the learned feature of mask rows.

    Args:
        shape: Configuration of an EAGLE-3 head, with the draft's number of layers.
        mask_token: Token id of the target that stands for tokens to be drafted.
        block: Number of tokens that one forward proposes.
    """

    def __init__(self, shape: HeadShape, mask_token: int, block: int) -> None:
        super().__init__(shape)
        self.prefix, self.mask_token, self.block = "layers.0.", mask_token, block
        size, layer = shape.layer.hidden_size, shape.layer
        self.further = nn.ModuleList(
            HeadLayer(layer, size, False, ("input_layernorm",)) for _ in range(layer.num_layers - 1)
        )
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(shape.aux_layers) * size))

    def initialize(self, seed: int) -> None:
        """Fills the weights like DraftHead; mask rows' features get the size of hidden states."""
        super().initialize(seed)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            self.mask_hidden.copy_(torch.randn(self.mask_hidden.shape, generator=generator))

    def forward(self, inputs: DraftInputs, mask_embed: Tensor, anchors: Tensor) -> Tensor:
        """Computes hidden states before the final norm of the rows that propose, [B, A, K, H].

        Args:
            inputs: Windows of T tokens.
            mask_embed: Embedding of the mask token [H].
            anchors: Newest slots of the proposals, int64 [A], each below T - 1.
        """
        features = self.fuse(inputs.hidden, inputs.captured)[:, :-1]
        (batch, slots, size), (count,) = features.shape, anchors.shape
        num_masks = self.block - 1
        device = anchors.device
        depths = torch.arange(1, self.block, device=device)
        index = torch.arange(slots, device=device)
        positions = torch.cat((index, (anchors[:, None] + depths).flatten()))
        group = torch.arange(count, device=device).repeat_interleave(num_masks)
        depth = depths.repeat(count)
        # A mask row sees the slots up to its anchor, and the mask rows of its proposal before it.
        own = (group[:, None] == group) & (depth[:, None] >= depth)
        before = anchors[group][:, None] >= index
        blank = torch.zeros(slots, count * num_masks, dtype=torch.bool, device=device)
        causal = index[:, None] >= index
        seen = torch.cat((torch.cat((causal, blank), 1), torch.cat((before, own), 1)))

        mask_feature = self._mask_feature(features.dtype)
        masks = batch, count * num_masks, size
        embeds = torch.cat((inputs.embeds[:, 1:], mask_embed.to(features.dtype).expand(masks)), 1)
        x, stream = self.prepare(
            embeds, torch.cat((features, mask_feature.expand(masks)), 1), positions
        )
        stream = self._attend(self.layer, x, stream, positions, seen)
        for layer in self.further:
            assert isinstance(layer, HeadLayer)
            norm: Any = layer.input_layernorm
            stream = self._attend(layer, norm(stream), stream, positions, seen)
        first = stream[:, :slots][:, anchors][:, :, None]
        rest = stream[:, slots:].view(batch, count, num_masks, size)
        return torch.cat((first, rest), 2)

    def _mask_feature(self, dtype: torch.dtype) -> Tensor:
        streams = self.mask_hidden.to(dtype).chunk(len(self.shape.aux_layers), -1)
        return self.fuse(streams[0], list(streams))

    def _attend(
        self, layer: HeadLayer, x: Tensor, stream: Tensor, positions: Tensor, seen: Tensor
    ) -> Tensor:
        cos, sin = self.cos[positions], self.sin[positions]
        q, k, v = layer.self_attn.project(x, cos, sin)
        return layer.finish(F.scaled_dot_product_attention(q, k, v, attn_mask=seen), stream)

    def _stored_name(self, name: str) -> str:
        if name.startswith("further."):
            _, index, rest = name.split(".", 2)
            return f"layers.{int(index) + 1}.{rest}"
        return name.replace("layer.", self.prefix, 1) if name.startswith("layer.") else name

    def checkpoint(self) -> dict[str, Tensor]:
        """See DraftHead."""
        return {self._stored_name(name): tensor for name, tensor in self.state_dict().items()}

    def load_checkpoint(self, tensors: Mapping[str, Tensor]) -> None:
        """See DraftHead."""
        own = {self._stored_name(name): name for name in self.state_dict()}
        self.load_state_dict({own.get(name, name): tensor for name, tensor in tensors.items()})

    def config(self) -> dict[str, Any]:
        """Returns the checkpoint's `config.json`, in the form of the speculators library."""
        shape = self.shape
        norms = {"fc_norm": True} if shape.stream_norms else {}
        layer = shape.layer.to_config("bfloat16", 0, 0) | {"tie_word_embeddings": False}
        return norms | {
            "architectures": ["PEagleDraftModel"],
            "speculators_model_type": "peagle",
            "transformer_layer_config": layer,
            "draft_vocab_size": shape.draft_vocab_size,
            "target_hidden_size": shape.layer.hidden_size,
            # The layers that the streams enter.
            "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
            "norm_before_residual": False,
            "mask_token_id": self.mask_token,
            "dtype": "bfloat16",
            "speculators_config": {
                "algorithm": "peagle",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": self.block},
                ],
            },
        }


def save_parallel_head(head: ParallelHead, out: Path, target: str) -> None:
    """Writes a checkpoint directory that names its target like the speculators library does."""
    save_head(head, out)
    config = json.loads((out / "config.json").read_text())
    verifier = {"name_or_path": target, "architectures": []}
    config["speculators_config"]["verifier"] = verifier
    write_json(out / "config.json", config)


def parallel_loss(
    head: ParallelHead,
    inputs: DraftInputs,
    probs: Tensor,
    anchors: Tensor,
    mask_embed: Tensor,
    output_weight: Tensor,
    decay: float,
) -> tuple[Tensor, Tensor]:
    """Computes cross-entropy to the target's distribution over the tokens of a proposal.

    Also returns the share of rows at each depth whose best token is the target's, [K].

    Args:
        inputs: Windows of T tokens.
        probs: The target's probabilities [B, T, draft vocabulary] of the token after each position.
        anchors: Newest slots of the proposals, int64 [A], each at most T - K - 1.
        mask_embed: Embedding of the mask token [H].
        output_weight: The target's output head.
        decay: Weight of a depth relative to the one before it.
    """
    depths = torch.arange(head.block, device=anchors.device)
    goal = probs[:, anchors[:, None] + depths + 1].float()
    logits = head.logits(head(inputs, mask_embed, anchors), output_weight).float()
    entropy = -(goal * F.log_softmax(logits, -1)).sum(-1).mean((0, 1))
    agreement = (logits.argmax(-1) == goal.argmax(-1)).float().mean((0, 1))
    weights = decay**depths
    return (entropy * weights).sum() / weights.sum(), agreement


@torch.no_grad()
def parallel_chain(
    head: ParallelHead,
    inputs: DraftInputs,
    tokens: Tensor,
    mask_embed: Tensor,
    output_weight: Tensor,
    anchors: Tensor,
    steps: int,
) -> Tensor:
    """Counts how many of `steps` greedily drafted tokens match the text, int64 [B, A]."""
    logits = head.logits(head(inputs, mask_embed, anchors)[:, :, :steps], output_weight)
    best = logits.argmax(-1)
    best = best + head.d2t[best]
    ahead = anchors[:, None] + torch.arange(steps, device=anchors.device) + 2
    return (best == tokens[:, ahead]).long().cumprod(-1).sum(-1)
