"""Computes committed tokens in forwards of bounded size, for methods that have KV.

A step may bring a thousand tokens of one sequence, or a few of many.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from draft_service.drafters.beam_drafting import LevelRunner, TreeRequest
from draft_service.drafters.method import MethodSizes
from draft_service.drafters.paged_sequences import Extension, PagedSequence
from foredraft.api.draft.v1 import draft_pb2
from foredraft.runner.batch import SequenceRows
from foredraft.runner.warm_up import Reach, forwards_to_run

# Maximum rows of one forward of long extensions, over all sequences: enough to use the device well,
# few enough to fit in memory.
CHUNK_ROWS, GPU_CHUNK_ROWS = 512, 1024

# Parts of runs, in order: (index of the run, first row, end row).
Parts = list[tuple[int, int, int]]

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


def most_rows(device: torch.device) -> int:
    """Returns the maximum number of rows of one forward on a device."""
    return CHUNK_ROWS if device.type == "cpu" else GPU_CHUNK_ROWS


def forwards(runs: Sequence[Run], most_rows: int) -> Iterator[Parts]:
    """Divides runs into as few forwards as possible, of about equal size.

    Args:
        runs: Runs to divide; a run may be split over several forwards.
        most_rows: Maximum number of rows in a forward.

    Yields:
        The parts of a forward.
    """
    num_rows = sum(len(run.tokens) for run in runs)
    most_rows = -(-num_rows // max(1, -(-num_rows // most_rows)))
    parts: Parts = []
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


def ending(runs: Sequence[Run], parts: Parts) -> list[int]:
    """Returns the runs that end in a forward and whose logits are wanted, in their order."""
    return [i for i, _, end in parts if runs[i].is_wanted and end == len(runs[i].tokens)]


def extend(
    runner: LevelRunner,
    extensions: Sequence[Extension],
    most_rows: int,
    features: Callable[[Parts], torch.Tensor] | None = None,
) -> list[TreeRequest]:
    """Computes the KV of committed tokens, in order; returns the trees that are wanted.

    Args:
        runner: Runs the model.
        extensions: The committed tokens.
        most_rows: Maximum number of rows in a forward.
        features: Returns the features [n, H] of the rows of a forward's parts; None for a model
            that reads tokens alone.
    """
    runs = [Run(e.sequence, e.start, e.tokens, e.limits is not None) for e in extensions]
    requests: list[TreeRequest] = []
    for parts in forwards(runs, most_rows):
        logits, following = runner.run(
            [runs[index].rows(first, end) for index, first, end in parts],
            None if features is None else features(parts),
        )
        for row, index in enumerate(ending(runs, parts)):
            extension = extensions[index]
            assert extension.limits is not None
            feature = following[row] if following is not None else None
            requests.append(TreeRequest(extension.sequence, extension.limits, logits[row], feature))
    return requests


def warm_up(
    runner: LevelRunner,
    sizes: MethodSizes,
    attach: draft_pb2.AttachRequest,
    blank: Callable[[int], torch.Tensor] | None = None,
) -> None:
    """Compiles the kernels of all forwards that `extend` may run.

    Writes to the first page, which no sequence has yet.

    Args:
        runner: Runs the model.
        sizes: Sizes of the model.
        attach: The verifier's sizes.
        blank: Returns meaningless features [n, H] of n rows; None for a model that reads tokens
            alone.
    """
    started, config = time.monotonic(), sizes.config
    rows = most_rows(sizes.device)
    reach = Reach(rows, attach.max_batch, attach.max_context, cut_keys=False)
    group_size = config.num_heads // config.num_kv_heads
    for forward in forwards_to_run(reach, runner.kv, group_size, runner.attention):
        num_rows = sum(len(sequence.tokens) for sequence in forward)
        runner.run(forward, None if blank is None else blank(num_rows))
    if sizes.device.type == "cuda":
        torch.cuda.synchronize(sizes.device)
    logger.info("ran what no graph takes in %.1f s", time.monotonic() - started)
