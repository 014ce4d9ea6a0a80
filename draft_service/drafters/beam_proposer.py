"""Proposes trees from a draft model that runs level by level, with its own KV on the verifier's
page numbers.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from draft_service.drafters.beam_drafting import BeamDrafter, LevelRunner, Scratch, TreeRequest
from draft_service.drafters.paged_proposer import Limits, PagedProposer
from draft_service.drafters.paged_sequences import Extension, PagedSequence
from foredraft.api.draft.v1 import draft_pb2
from foredraft.models.config import ModelConfig
from foredraft.runner.batch import SequenceRows
from foredraft.runner.warm_up import Reach, forwards_to_run
from foredraft.trees.draft_tree import DraftTree

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of one sequence at consecutive keys.

    Attributes:
        sequence: Sequence that the rows belong to.
        start: Key index of the first row.
        tokens: Input tokens of the rows.
        is_wanted: Whether the last row's logits are wanted.
    """

    sequence: PagedSequence
    start: int
    tokens: Sequence[int]
    is_wanted: bool

    def rows(self, first: int, end: int) -> SequenceRows:
        """Returns rows [first, end) of the run."""
        start = self.start + first
        is_wanted = self.is_wanted and end == len(self.tokens)
        return SequenceRows(
            tokens=self.tokens[first:end],
            positions=range(start, self.start + end),
            pages=self.sequence.pages,
            prefix_len=start,
            write_index=start,
            prefix_start=min(self.sequence.valid_from, start),
            logits="last" if is_wanted else "none",
        )


def forwards(runs: Sequence[Run], most_rows: int) -> Iterator[list[tuple[int, int, int]]]:
    """Divides runs into as few forwards as possible, of about equal size.

    Args:
        runs: Runs to divide; a run may be split over several forwards.
        most_rows: Maximum number of rows in a forward.

    Yields:
        The parts of a forward, in order: (index of the run, first row, end row).
    """
    num_rows = sum(len(run.tokens) for run in runs)
    most_rows = -(-num_rows // max(1, -(-num_rows // most_rows)))
    parts: list[tuple[int, int, int]] = []
    room = most_rows
    for index, run in enumerate(runs):
        done = 0
        while done < len(run.tokens):
            end = min(len(run.tokens), done + room)
            parts.append((index, done, end))
            room -= end - done
            done = end
            if room == 0:
                yield parts
                parts, room = [], most_rows
    if parts:
        yield parts


class BeamProposer(PagedProposer):
    """Drafts trees for one verifier, with a model that runs level by level.

    Args:
        runner: Runs the draft model; its KV includes the scratch pages.
        scratch: Pages for the KV of drafted tokens.

    See PagedProposer for the other arguments.
    """

    def __init__(
        self,
        runner: LevelRunner,
        config: ModelConfig,
        attach: draft_pb2.AttachRequest,
        limits: Limits,
        scratch: Scratch,
        device: torch.device,
        shift: int = 0,
    ) -> None:
        super().__init__(config, attach, limits, device, shift)
        self._runner = runner
        self._drafter = BeamDrafter(runner, scratch, attach.page_size, self._ordering)

    def close(self) -> None:
        """See PagedProposer."""
        super().close()
        del self._runner, self._drafter

    def _warm_up(self) -> None:
        """Compiles the kernels of all extensions that run outside of the graphs.

        Writes to the first page, which no sequence has yet.
        """
        started = time.monotonic()
        attach, config = self._attach, self._config
        reach = Reach(self._most_rows, attach.max_batch, attach.max_context, cut_keys=False)
        group_size = config.num_heads // config.num_kv_heads
        for rows in forwards_to_run(reach, self._runner.kv, group_size, self._runner.attention):
            num_rows = sum(len(sequence.tokens) for sequence in rows)
            self._runner.run(rows, self._blank_features(num_rows))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        logger.info("ran what no graph takes in %.1f s", time.monotonic() - started)

    def _extend(self, extensions: Sequence[Extension]) -> list[TreeRequest]:
        """See PagedProposer."""
        runs = [
            Run(extension.sequence, extension.start, extension.tokens, extension.limits is not None)
            for extension in extensions
        ]
        states = [self._states(extension) for extension in extensions]
        requests: list[TreeRequest] = []
        for parts in forwards(runs, self._most_rows):
            read = [
                part[first:end]
                for index, first, end in parts
                if (part := states[index]) is not None
            ]
            logits, following = self._runner.run(
                [runs[index].rows(first, end) for index, first, end in parts],
                self._fuse(torch.cat(read)) if read else None,
            )
            ending = [i for i, _, end in parts if runs[i].is_wanted and end == len(runs[i].tokens)]
            for row, index in enumerate(ending):
                extension = extensions[index]
                assert extension.limits is not None
                feature = following[row] if following is not None else None
                requests.append(
                    TreeRequest(extension.sequence, extension.limits, logits[row], feature)
                )
        return requests

    def _states(self, extension: Extension) -> torch.Tensor | None:
        """Returns the target's hidden states that the rows of an extension read, [n, width]; None
        for a model that reads tokens alone.
        """
        return None

    def _fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Converts hidden states [n, width] to the features [n, H] that the model reads."""
        raise NotImplementedError

    def _blank_features(self, num_rows: int) -> torch.Tensor | None:
        """Returns meaningless features [n, H] for warm-up; None for a model that reads tokens
        alone.
        """
        return None

    def _draft(self, requests: Sequence[TreeRequest]) -> list[DraftTree]:
        """See PagedProposer."""
        return self._drafter.draft(requests)
