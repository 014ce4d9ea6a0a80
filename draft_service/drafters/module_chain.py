"""Draft chains from several MTP modules, one for each depth (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Module k pairs, at key p, what module k - 1 gave there (module 0: the target's hidden state of position p) with token
p + 1 + k, and says what comes at p + 2 + k. Of the newest keys it sees drafted tokens; once the real ones are known, the
keys are computed again: a window of the last `num_modules - 1` keys is kept for that. Across a prefix that another
sequence has filled there is no window, so the deeper modules' last keys before it may have seen other tokens; that costs
a little acceptance and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.drafters.beam_drafting import Scratch, Wish
from draft_service.drafters.head_proposer import HeadProposer
from draft_service.drafters.paged import Limits, Run, forwards
from draft_service.drafters.paged_sequences import Extension, PagedSequence
from draft_service.steps.head_runner import HeadRunner
from foredraft.api.draft.v1 import draft_pb2
from foredraft.sampling.rows import SamplingRows
from foredraft.trees.draft_tree import EMPTY, DraftTree
from foredraft.trees.tree_building import BeamTree


@dataclass(slots=True)
class _Window:
    """Keys of one sequence that are computed in this step, and what module 0 reads there.

    Attributes:
        start: The first key.
        tokens: For each key the token after its position, as module 0 reads it.
        features: [n, H]: the target's hidden states; later those of the module before.
        wanted: Depths that are wanted after the last key; 0 for none.
        drafted: What the modules have proposed so far.
    """

    sequence: PagedSequence
    start: int
    tokens: list[int]
    features: torch.Tensor
    wanted: int
    drafted: list[int]

    def run(self, depth: int) -> Run:
        """What module `depth` computes."""
        if depth >= self.wanted:
            return Run(self.sequence, self.start, self.tokens[depth:], False)
        tokens = [*self.tokens, *self.drafted][depth : depth + len(self.tokens)]
        return Run(self.sequence, self.start, tokens, True)


class ModuleChainProposer(HeadProposer):
    """Drafts for one verifier."""

    def __init__(
        self,
        runner: HeadRunner,
        attach: draft_pb2.AttachRequest,
        limits: Limits,
        scratch: Scratch,
    ) -> None:
        super().__init__(runner, attach, limits, scratch)
        self._num_modules = runner.head.num_modules
        self._kept: dict[int, _Window] = {}  # by slot; the last keys of what was computed
        self._windows: list[_Window] = []

    def _extend(self, extensions: Sequence[Extension]) -> list[Wish]:
        self._windows = [self._window(extension) for extension in extensions]
        logits = self._compute(0)
        wanted = [
            (extension, row)
            for extension, row in zip(extensions, logits, strict=True)
            if row is not None
        ]
        return [
            Wish(extension.sequence, extension.limits, row)
            for extension, row in wanted
            if extension.limits is not None
        ]

    def _draft(self, wishes: Sequence[Wish]) -> list[DraftTree]:
        rows: dict[int, torch.Tensor] = {wish.sequence.slot: wish.logits for wish in wishes}
        chains = self._chains()
        for depth in range(self._num_modules):
            if depth:
                computed = self._compute(depth)
                rows = {
                    window.sequence.slot: row
                    for window, row in zip(self._windows, computed, strict=True)
                    if row is not None
                }
            for tree, windows in chains:
                if depth < windows[0].wanted:
                    logits = torch.stack([rows[w.sequence.slot] for w in windows])[:, None]
                    tokens, _ = tree.expand(logits, self._runner.token_map)
                    for window, token in zip(windows, tokens[:, 0].tolist(), strict=True):
                        window.drafted.append(token)
        self._windows = []
        trees: dict[int, DraftTree] = {}
        for tree, windows in chains:
            finished = tree.finish()
            trees |= {w.sequence.slot: t for w, t in zip(windows, finished, strict=True)}
        return [trees.get(wish.sequence.slot, EMPTY) for wish in wishes]

    def _window(self, extension: Extension) -> _Window:
        """The extension, and before it the keys that deeper modules have not seen with their real tokens."""
        sequence, start = extension.sequence, extension.start
        tokens, features = extension.tokens, self._fuse(self._states(extension))
        kept = self._kept.get(sequence.slot)
        if kept is not None and kept.sequence is sequence and kept.start < start:
            count = start - kept.start
            if count <= len(kept.tokens):
                tokens = kept.tokens[:count] + tokens
                features = torch.cat((kept.features[:count], features))
                start = kept.start
        keep = min(self._num_modules - 1, len(tokens))
        self._kept[sequence.slot] = _Window(
            sequence,
            start + len(tokens) - keep,
            tokens[len(tokens) - keep :],
            features[len(tokens) - keep :].clone(),
            0,
            [],
        )
        wanted = min(extension.limits[0], self._num_modules) if extension.limits else 0
        return _Window(sequence, start, tokens, features, wanted, [])

    def _chains(self) -> list[tuple[BeamTree, list[_Window]]]:
        """The windows that want drafts, by how many; one chain builder for each number."""
        groups: dict[int, list[_Window]] = {}
        for window in self._windows:
            if window.wanted:
                groups.setdefault(window.wanted, []).append(window)
        chains = []
        for steps, windows in groups.items():
            rows = None
            if self._ordering == "coupled":
                rows = SamplingRows.from_params(
                    [window.sequence.sampling for window in windows],
                    [window.sequence.num_tokens for window in windows],
                    self._head_runner.head.device,
                )
            chains.append(
                (BeamTree(len(windows), steps, 1, steps + 1, self._ordering, rows), windows)
            )
        return chains

    def _compute(self, depth: int) -> list[torch.Tensor | None]:
        """Runs a module; its output becomes the windows' features. Gives the last row's logits where they are wanted."""
        runs = [window.run(depth) for window in self._windows]
        following: list[list[torch.Tensor]] = [[] for _ in runs]
        logits: list[torch.Tensor | None] = [None] * len(runs)
        for parts in forwards(runs, self._most_rows):
            output = self._head_runner.forward(
                [runs[index].rows(first, end) for index, first, end in parts],
                torch.cat(
                    [self._windows[index].features[first:end] for index, first, end in parts]
                ),
                depth,
                all_features=True,
            )
            sizes = [end - first for _, first, end in parts]
            for (index, _, _), part in zip(parts, output.features.split(sizes), strict=True):
                following[index].append(part)
            ending = [i for i, _, end in parts if runs[i].is_wanted and end == len(runs[i].tokens)]
            for index, row in zip(ending, output.logits, strict=True):
                logits[index] = row
        for window, pieces in zip(self._windows, following, strict=True):
            window.features = torch.cat(pieces) if pieces else window.features[:0]
        return logits
