"""The n-gram store in dictionaries and lists: slow, and independent of the one in C."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draft_service.ngram.trie import NgramRules

Path = tuple[int, ...]
Children = Callable[
    [object], list[tuple[int, int, object]]
]  # token, frequency, handle; newest first


@dataclass
class Node:
    freq: int = 1
    stamp: int = 0
    children: list[int] = field(default_factory=list)  # newest first


class ReferenceTrie:
    """Stores nodes by path; the first element of a path is the scope."""

    def __init__(self, capacity: int, depth: int) -> None:
        self.capacity, self.depth = capacity, depth
        self.nodes: dict[Path, Node] = {}
        self.scopes: list[int] = []  # newest first
        self.leaves: list[Path] = []  # least recently used first
        self.clock = 0

    def siblings(self, path: Path) -> list[int]:
        return self.nodes[path[:-1]].children if len(path) > 1 else self.scopes

    def evict(self, keep: Path) -> bool:
        victims = [path for path in self.leaves if path != keep]
        if not victims:
            return False
        victim, parent = victims[0], victims[0][:-1]
        self.leaves.remove(victim)
        self.siblings(victim).remove(victim[-1])
        stamp = self.nodes.pop(victim).stamp
        if parent and not self.nodes[parent].children:
            used_since = self.nodes[parent].stamp > stamp
            self.leaves.insert(len(self.leaves) if used_since else 0, parent)
        return True

    def use(self, path: Path) -> None:
        parent = path[:-1]
        if path in self.nodes:
            self.nodes[path].freq += 1
            self.siblings(path).remove(path[-1])
            if path in self.leaves:
                self.leaves.remove(path)
                self.leaves.append(path)
        else:
            if len(self.nodes) >= self.capacity and not self.evict(parent):
                return
            if parent in self.leaves:
                self.leaves.remove(parent)
            self.nodes[path] = Node()
            self.leaves.append(path)
        self.siblings(path).insert(0, path[-1])
        self.clock += 1
        self.nodes[path].stamp = self.clock

    def extend(self, scope: int, history: Sequence[int], tokens: Sequence[int]) -> None:
        known = list(history)
        for token in tokens:
            for length in range(min(len(known) + 1, self.depth), 0, -1):
                parent = (scope, *known[len(known) - length + 1 :])
                if length == 1 and parent not in self.nodes:
                    self.use(parent)
                if parent in self.nodes:
                    self.use((*parent, token))
            known.append(token)

    def children(self, path: object) -> list[tuple[int, int, object]]:
        assert isinstance(path, tuple)
        return [
            (token, self.nodes[(*path, token)].freq, (*path, token))
            for token in self.nodes[path].children
        ]

    def dump(self) -> list[tuple[int, int, int]]:
        out: list[tuple[int, int, int]] = []

        def visit(path: Path) -> None:
            out.append((len(path) - 1, path[-1], self.nodes[path].freq))
            for token in self.nodes[path].children:
                visit((*path, token))

        for scope in self.scopes:
            visit((scope,))
        return out


def grow(
    paths: list[Path], rules: NgramRules, length: int, start: object, children: Children, room: int
) -> None:
    """Adds the continuations of one anchor to `paths` until it holds `room` of them."""
    if rules.match_type == "BFS":
        span = max(1, rules.branch_length - 1)
        slope = (rules.max_breadth - rules.min_breadth) / span
        queue = [((), start, (span - length) * slope + rules.min_breadth)]
        while queue:
            path, handle, breadth = queue.pop(0)
            for token, _, child in children(handle)[: max(1, int(breadth))]:
                if (*path, token) not in paths:
                    if len(paths) == room:
                        return
                    paths.append((*path, token))
                queue.append(((*path, token), child, breadth - slope))
        return
    heap: list[tuple[float, int, Path, object]] = []
    pushed = 0
    path, handle, prob = (), start, 1.0
    while True:
        best = sorted(children(handle), key=lambda c: (-c[1], c[0]))[: rules.max_breadth]
        total = float(sum(freq for _, freq, _ in best))
        for token, freq, child in best:
            heapq.heappush(heap, (-(prob * freq / total), pushed, (*path, token), child))
            pushed += 1
        if not heap:
            return
        negative, _, path, handle = heapq.heappop(heap)
        prob = -negative
        if path not in paths:
            if len(paths) == room:
                return
            paths.append(path)


def propose(
    rules: NgramRules,
    trie: ReferenceTrie | None,
    scope: int,
    own: Sequence[int] | None,
    context: Sequence[int],
    room: int,
) -> tuple[set[Path], int]:
    """Returns the paths proposed after `context`, and the longest match.

    `own` is the sequence's own text, if that is a source.
    """
    paths: list[Path] = []
    longest = 0

    def own_children(handle: object) -> list[tuple[int, int, object]]:
        assert own is not None
        assert isinstance(handle, tuple)
        groups: dict[int, list[int]] = {}
        for position in handle:
            if position < len(own):
                groups.setdefault(own[position], []).append(position + 1)
        return [(token, len(group), tuple(group)) for token, group in groups.items()]

    for length in range(min(rules.max_window, len(context)), rules.min_window - 1, -1):
        suffix = tuple(context[len(context) - length :])
        if own is not None:
            ends = range(len(own) - 1, length - 1, -1)
            starts = tuple(p for p in ends if tuple(own[p - length : p]) == suffix)
            if starts:
                grow(paths, rules, length, starts, own_children, room)
        if trie is not None and (scope, *suffix) in trie.nodes:
            grow(paths, rules, length, (scope, *suffix), trie.children, room)
        if paths and not longest:
            longest = length
    return set(paths), longest
