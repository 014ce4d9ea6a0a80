"""The training loop of block drafters, which draft one block behind each random anchor."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.draft.anchor_trainer import AnchorTrainer
from training.draft.blocks import (
    BlockHead,
    BlockShape,
    block_chain,
    block_loss,
    save_block_head,
    spread_layers,
)
from training.progress import say


class BlockTrainer(AnchorTrainer):
    """One run of `foredraft train draft --algorithm DFLASH | DSPARK`."""

    head: BlockHead
    first_anchor = 1

    def _make_head(self) -> BlockHead:
        config, target = self.config, self.target.shape
        layer = dataclasses.replace(
            self.shape.layer, num_layers=config.draft_layers, num_heads=target.num_heads
        )
        streams = spread_layers(target.num_layers, config.streams)
        mask_token = self._mask_token()
        rank = config.markov_rank if config.algorithm == "DSPARK" else 0
        shape = BlockShape(
            config.algorithm, layer, streams, target.num_layers, config.block, mask_token, rank
        )
        say(f"streams entering layers {list(streams)}; token {mask_token} is the mask")
        return BlockHead(shape)

    def _train_loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            hidden, captured = self._features(tokens, self.head.shape.aux_layers)
        anchors = self._anchors()
        result: tuple[Tensor, Tensor] = self._loss(tokens, hidden, captured, anchors)
        return result

    def _loss_function(self) -> Callable[..., Any]:
        return self._block_loss

    def _block_loss(
        self, tokens: Tensor, hidden: Tensor, captured: list[Tensor], anchors: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight = self.target.output_weight
        with torch.no_grad():
            probs = F.softmax(F.linear(hidden, weight).float(), dim=-1).to(self.dtype)
        return block_loss(
            self.head,
            tokens,
            captured,
            probs,
            anchors,
            self.target.embed_weight,
            weight,
            self.config.gamma,
        )

    def _chain(self, tokens: Tensor, steps: int) -> Callable[[Tensor], Tensor]:
        _, captured = self.target.features(tokens, self.head.shape.aux_layers)
        embed_weight, output_weight = self.target.embed_weight, self.target.output_weight

        def chain(anchors: Tensor) -> Tensor:
            return block_chain(
                self.head, tokens, captured, embed_weight, output_weight, anchors, steps
            )

        return chain

    def _save_head(self) -> None:
        save_block_head(self.head, self.config.out, self.config.target.name)
