"""Drafts chains with several MTP modules, one for each depth (DeepSeek-V3, arXiv 2412.19437,
section 2.2).

At key p, module k reads the output of module k - 1 there (module 0: the target's hidden state of
position p) and token p + 1 + k, and predicts token p + 2 + k. At the newest keys it reads drafted
tokens. Once the real tokens are known, these keys are computed again; a window of the last
`num_modules - 1` keys is kept for that. A prefix that another sequence has filled has no window, so
the deeper modules' last keys of the prefix may have read other tokens. That only costs a little
acceptance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.drafters.beam_drafting import TreeRequest, empty_trees
from draft_service.drafters.extending import Run, ending, forwards
from draft_service.drafters.head_method import StatesMethod
from draft_service.drafters.paged_sequences import Extension, PagedSequence
from draft_service.drafters.tree_limits import TreeLimits
from draft_service.steps.head_runner import HeadRunner
from foredraft.api.draft.v1 import draft_pb2
from foredraft.transport.base import HiddenReader
from foredraft.trees.draft_tree import EMPTY, DraftTree
from foredraft.trees.tree_building import BeamTree


@dataclass(slots=True)
class _Window:
    """Keys of one sequence that a step computes, with the modules' inputs.

    Attributes:
        sequence: Sequence that the keys belong to.
        start: Index of the first key.
        tokens: For each key, the token after its position, which module 0 reads.
        features: [n, H], the target's hidden states; later the output of the previous module.
        wanted: Number of tokens to draft after the last key; 0 for none.
        drafted: Tokens that the modules have proposed so far.
    """

    sequence: PagedSequence
    start: int
    tokens: list[int]
    features: torch.Tensor
    wanted: int
    drafted: list[int]

    def run(self, depth: int) -> Run:
        """Returns the rows that module `depth` computes."""
        if depth >= self.wanted:
            return Run(self.sequence, self.start, self.tokens[depth:], False)
        tokens = [*self.tokens, *self.drafted][depth : depth + len(self.tokens)]
        return Run(self.sequence, self.start, tokens, True)


class ModuleChainMethod(StatesMethod):
    """Drafts chains for one verifier with a head of several modules.

    Args:
        runner: Runs the head.
        attach: The verifier's sizes.
    """

    def __init__(self, runner: HeadRunner, attach: draft_pb2.AttachRequest) -> None:
        super().__init__(runner, attach)
        self._runner, self._num_modules = runner, runner.head.num_modules
        self._kept: dict[int, _Window] = {}  # by slot: the last keys that were computed
        self._windows: list[_Window] = []

    def extend(
        self, extensions: Sequence[Extension], reader: HiddenReader | None
    ) -> list[TreeRequest]:
        """See DraftMethod."""
        self._windows = [self._window(extension, reader) for extension in extensions]
        logits = self._compute(0)
        wanted = [
            (extension, row)
            for extension, row in zip(extensions, logits, strict=True)
            if row is not None
        ]
        return [
            TreeRequest(extension.sequence, extension.limits, row)
            for extension, row in wanted
            if extension.limits is not None
        ]

    def draft(self, requests: Sequence[TreeRequest]) -> list[DraftTree]:
        """See DraftMethod."""
        rows = {
            request.sequence.slot: request.logits
            for request in requests
            if request.logits is not None
        }
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
                    tokens, _ = tree.expand(logits, self._runner.head.token_map)
                    for window, token in zip(windows, tokens[:, 0].tolist(), strict=True):
                        window.drafted.append(token)
        self._windows = []
        trees: dict[int, DraftTree] = {}
        for tree, windows in chains:
            finished = tree.finish()
            trees |= {w.sequence.slot: t for w, t in zip(windows, finished, strict=True)}
        return [trees.get(request.sequence.slot, EMPTY) for request in requests]

    def _window(self, extension: Extension, reader: HiddenReader | None) -> _Window:
        """Returns an extension's keys, and before them the keys that deeper modules must compute
        again with the real tokens.
        """
        sequence, start = extension.sequence, extension.start
        states = self._states
        tokens, features = extension.tokens, states.fuse(states.read(reader, extension))
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
        wanted = min(extension.limits.steps, self._num_modules) if extension.limits else 0
        return _Window(sequence, start, tokens, features, wanted, [])

    def _chains(self) -> list[tuple[BeamTree, list[_Window]]]:
        """Groups the windows by the number of tokens wanted; each group has one chain builder."""
        groups: dict[int, list[_Window]] = {}
        for window in self._windows:
            if window.wanted:
                groups.setdefault(window.wanted, []).append(window)
        chains = []
        for steps, windows in groups.items():
            sequences = [window.sequence for window in windows]
            limits = TreeLimits(steps, 1, steps)
            tree = empty_trees(sequences, limits, self._ordering, self.sizes.device)
            chains.append((tree, windows))
        return chains

    def _compute(self, depth: int) -> list[torch.Tensor | None]:
        """Runs a module on all windows; its output becomes their features.

        Returns the last row's logits for each window, None where they are not wanted.
        """
        runs = [window.run(depth) for window in self._windows]
        following: list[list[torch.Tensor]] = [[] for _ in runs]
        logits: list[torch.Tensor | None] = [None] * len(runs)
        for parts in forwards(runs, self._most_rows):
            output = self._runner.forward(
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
            for index, row in zip(ending(runs, parts), output.logits, strict=True):
                logits[index] = row
        for window, pieces in zip(self._windows, following, strict=True):
            window.features = torch.cat(pieces) if pieces else window.features[:0]
        return logits
