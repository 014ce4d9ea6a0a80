"""The training loop of P-EAGLE, which drafts behind random slots of a window."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from training.draft.anchor_trainer import AnchorTrainer
from training.draft.heads import HeadShape
from training.draft.parallel import (
    ParallelHead,
    parallel_chain,
    parallel_loss,
    save_parallel_head,
)
from training.draft.unroll import DraftInputs
from training.progress import say


class ParallelTrainer(AnchorTrainer):
    """One run of `foredraft train draft --algorithm PEAGLE`."""

    head: ParallelHead
    first_anchor = 0

    def _head_shape(self) -> HeadShape:
        shape = super()._head_shape()
        layer = dataclasses.replace(shape.layer, num_layers=self.config.draft_layers)
        return dataclasses.replace(shape, layer=layer)

    def _make_head(self) -> ParallelHead:
        mask_token = self._mask_token()
        say(f"token {mask_token} is the mask")
        return ParallelHead(self.shape, mask_token, self.config.block)

    @property
    def _mask_embed(self) -> Tensor:
        return self.target.embed_weight[self.head.mask_token]

    def _train_loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        anchors = self._anchors()
        result: tuple[Tensor, Tensor] = self._loss(self._inputs(tokens), anchors)
        return result

    def _loss_function(self) -> Callable[..., Any]:
        return self._anchor_loss

    def _anchor_loss(self, inputs: DraftInputs, anchors: Tensor) -> tuple[Tensor, Tensor]:
        return parallel_loss(
            self.head,
            inputs,
            self._draft_probs(inputs.hidden),
            anchors,
            self._mask_embed,
            self.target.output_weight,
            self.config.decay,
        )

    def _chain(self, tokens: Tensor, steps: int) -> Callable[[Tensor], Tensor]:
        inputs = self._inputs(tokens)
        mask_embed, output_weight = self._mask_embed, self.target.output_weight

        def chain(anchors: Tensor) -> Tensor:
            return parallel_chain(
                self.head, inputs, tokens, mask_embed, output_weight, anchors, steps
            )

        return chain

    def _save_head(self) -> None:
        save_parallel_head(self.head, self.config.out, self.config.target.name)
