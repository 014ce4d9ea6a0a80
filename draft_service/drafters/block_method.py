"""Drafts with a block drafter (DFlash, DSpark).

A committed token costs projections only; a proposal costs one forward of a block.
"""

from collections.abc import Sequence

import torch

from draft_service.drafters.beam_drafting import Scratch, TreeRequest
from draft_service.drafters.chains import draft_trees, rows_behind
from draft_service.drafters.extending import Run, forwards, most_rows
from draft_service.drafters.hidden_source import HiddenSource
from draft_service.drafters.method import DraftMethod, MethodSizes, ordering_of
from draft_service.drafters.paged_sequences import Extension
from draft_service.drafters.target_states import TargetStates
from draft_service.models.markov import MarkovHead
from draft_service.steps.block_runner import BlockRunner
from draft_service.steps.block_step import BlockStep
from draft_service.steps.draft_step import StepOptions
from foredraft.api.draft.v1 import draft_pb2
from foredraft.runner.batch import SequenceRows
from foredraft.transport.base import HiddenReader
from foredraft.trees.draft_tree import DraftTree


class BlockMethod(DraftMethod):
    """Drafts blocks of tokens for one verifier.

    Args:
        runner: Runs the block drafter; its KV includes the scratch pages.
        attach: The verifier's sizes.
        scratch: Pages for the KV of a block.
    """

    def __init__(
        self, runner: BlockRunner, attach: draft_pb2.AttachRequest, scratch: Scratch
    ) -> None:
        draft = runner.head
        self._runner, self._draft_model = runner, draft
        self._attach, self._scratch = attach, scratch
        self._states, self._ordering = TargetStates(runner, attach.fused), ordering_of(attach)
        columns = draft.lm_head.weight.shape[0]
        self.sizes = MethodSizes(
            draft.config.layer, draft.dtype, draft.device, columns, row_width=self._states.width
        )
        self._most_rows = most_rows(draft.device)

    def extend(
        self, extensions: Sequence[Extension], reader: HiddenReader | None
    ) -> list[TreeRequest]:
        """See DraftMethod."""
        runs = [Run(e.sequence, e.start, e.tokens, False) for e in extensions]
        features = self._states.features(reader, extensions)
        for parts in forwards(runs, self._most_rows):
            rows = [runs[index].rows(first, end) for index, first, end in parts]
            self._runner.extend(rows, features(parts))
        return [TreeRequest(e.sequence, e.limits) for e in extensions if e.limits is not None]

    def draft(self, requests: Sequence[TreeRequest]) -> list[DraftTree]:
        """See DraftMethod."""
        if not requests:
            return []
        draft, options = self._draft_model, self._draft_model.options
        hidden = self._block_states(requests)[:, int(not options.from_anchor) :]
        deepest = max(request.limits.steps for request in requests)
        hidden = hidden[:, :deepest]
        # All depths in one product: the LM head is read once.
        logits = draft.lm_head(hidden.reshape(-1, hidden.shape[-1]))
        logits = logits.view(len(requests), deepest, -1)
        scores = _Scores(logits, hidden, draft.markov)
        return draft_trees(requests, scores, self._ordering, draft.token_map, draft.device)

    def _block_states(self, requests: Sequence[TreeRequest]) -> torch.Tensor:
        """Computes one block after each sequence.

        Returns the hidden states of its rows, [requests, block_size, hidden_size].
        """
        options = self._draft_model.options
        masks = [options.mask_token_id] * (options.block_size - 1)
        is_both = self._draft_model.has_causal_layers
        blocks = {
            is_causal: [
                rows_behind(
                    request.sequence,
                    [request.sequence.last_token or 0, *masks],
                    self._scratch.pages(request.sequence.slot),
                    self._attach.page_size,
                    is_causal,
                )
                for request in requests
            ]
            for is_causal in ((False, True) if is_both else (False,))
        }
        hidden = self._runner.propose(blocks[False], blocks.get(True))
        return hidden.view(len(requests), options.block_size, -1)

    def warm_up(self) -> None:
        """See DraftMethod. Long pieces of context are all that runs outside of the graphs."""
        draft, page_size = self._draft_model, self._attach.page_size
        num_rows = min(self._most_rows, self._attach.max_context)
        while num_rows:
            features = torch.zeros(
                num_rows, draft.config.layer.hidden_size, dtype=draft.dtype, device=draft.device
            )
            # All rows go to one page, which no sequence has yet.
            pages = [0] * -(-num_rows // page_size)
            self._runner.extend([SequenceRows.chunk(pages, 0, [0] * num_rows)], features)
            num_rows //= 4

    def fixed_step(self, options: StepOptions, source: HiddenSource | None) -> BlockStep:
        """See DraftMethod."""
        runner, features = self._runner, self._states.at(source)
        return BlockStep(self._draft_model, features, runner.kv, runner.attention, options)


class _Scores:
    """Computes the logits of blocks' rows depth by depth, as `NextLogits` describes.

    DSpark's Markov head adds a bias that depends on the previous token.

    Args:
        logits: [requests, depths, columns], logits of the rows.
        hidden: [requests, depths, hidden_size], hidden states of the rows.
        markov: Markov head; None for a draft without one.
    """

    def __init__(
        self, logits: torch.Tensor, hidden: torch.Tensor, markov: MarkovHead | None
    ) -> None:
        self._logits, self._hidden, self._markov = logits, hidden, markov
        self._state = torch.empty(0)

    def __call__(
        self, indices: list[int], depth: int, previous: torch.Tensor, beams: torch.Tensor | None
    ) -> torch.Tensor:
        count, width = previous.shape
        base = self._logits[indices, depth][:, None].expand(-1, width, -1)
        markov = self._markov
        if markov is None:
            return base
        state = markov.start(count)[:, None]
        if beams is not None:
            state = self._state.gather(1, beams[..., None].expand(-1, -1, state.shape[-1]))
        hidden = self._hidden[indices, depth][:, None].expand(-1, width, -1)
        bias, after = markov.bias(
            markov.embed(previous.flatten()), hidden.flatten(0, 1), state.flatten(0, 1)
        )
        self._state = after.view(count, width, -1)
        return base + bias.view(count, width, -1)
