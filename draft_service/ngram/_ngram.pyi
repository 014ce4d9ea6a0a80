from collections.abc import Sequence

class Trie:
    num_nodes: int
    num_bytes: int
    def __new__(cls, capacity: int, depth: int) -> Trie: ...
    def match(
        self,
        scope: int,
        context: Sequence[int],
        max_nodes: int,
        min_window: int,
        max_window: int,
        min_breadth: int,
        max_breadth: int,
        by_probability: bool,
        /,
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]: ...
    def has_scope(self, scope: int, /) -> bool: ...
    def dump(self) -> list[tuple[int, int, int]]: ...

class Context:
    num_tokens: int
    num_bytes: int
    def __new__(cls, trie: Trie | None, scope: int) -> Context: ...
    def extend(self, tokens: Sequence[int], /) -> None: ...
    def propose(
        self,
        max_nodes: int,
        min_window: int,
        max_window: int,
        depth: int,
        min_breadth: int,
        max_breadth: int,
        by_probability: bool,
        /,
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]: ...
