"""Plans steps: which sequences run, with how many rows, on which pages. No torch, no drafts.

Sequences are ranked by priority, then arrival. Each step holds every running decode and at most one
chunk of prompt tokens. What a better-ranked sequence needs to go on is taken from worse-ranked
ones, so the best-ranked one always progresses.
"""

import time
from collections.abc import Callable

from foredraft.errors import InvalidRequest, Overloaded, PromptTooLong
from foredraft.types import FinishReason
from verify_service.scheduler.page_tables import PageTables
from verify_service.scheduler.prefill_budget import PrefillBudget
from verify_service.scheduler.prefill_split import split_chunk
from verify_service.scheduler.request import Sequence, Status
from verify_service.scheduler.run_queue import RunQueue, insert_by_rank
from verify_service.scheduler.step_plan import DecodeSlot, PrefillChunk, StepPlan


class Scheduler:
    """Plans steps, and owns the queue and the page tables of all sequences.

    One thread calls: `add` and `cancel` between steps, then per step `schedule`, and for each
    sequence of the plan `Sequence.append_tokens`, `on_committed`, and `finish` when it has ended.
    While the outcome of one step is not known, `schedule_ahead` plans the step after it.

    Args:
        tables: Changes the page tables of all sequences.
        prefill_budget: Bounds the prompt tokens of a step.
        max_running_requests: Number of slots.
        max_queue: Number of waiting sequences above which `add` refuses, besides those that free
            slots will take.
        context_length: Maximum number of tokens that the model can hold, or None.
        admission_headroom: Output tokens that admission keeps room for per running sequence (as
            far as it may still generate them), so that admitting does not soon preempt.

    Attributes:
        pool, prefix_tree: Those of the tables.
        max_sequence_tokens: Maximum number of tokens of a sequence.
    """

    def __init__(
        self,
        tables: PageTables,
        prefill_budget: PrefillBudget,
        *,
        max_running_requests: int,
        max_queue: int = 1024,
        context_length: int | None = None,
        admission_headroom: int = 64,
    ) -> None:
        self._tables = tables
        self.pool, self.prefix_tree = tables.pool, tables.prefix_tree
        self.prefill_budget = prefill_budget
        self.max_running_requests = max_running_requests
        self.max_queue = max_queue
        self.admission_headroom = admission_headroom
        # The newest token is never in KV, so a sequence may be one longer than the pool.
        capacity = self.pool.num_pages * self.pool.page_size + 1
        self.max_sequence_tokens = min(capacity, context_length or capacity)
        self._longest_prompt = min(capacity - 1, context_length or capacity)
        self._queue = RunQueue(tables, max_running_requests)
        self._rows_each = 1  # rows of a decoding sequence in the newest step

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with a slot, best rank first."""
        return tuple(self._queue.running)

    @property
    def num_running(self) -> int:
        """Number of sequences with a slot."""
        return len(self._queue.running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the queue, preempted ones included."""
        return len(self._queue.waiting)

    @property
    def num_available_pages(self) -> int:
        """Number of pages that are free, or cached and used by no sequence."""
        return self.pool.num_free + self.pool.num_idle

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may have something to do or to report."""
        return len(self._queue) > 0

    def check(self, num_prompt: int, max_new_tokens: int) -> None:
        """Raises what `add` would raise for such a request now. Any thread may call it.

        Raises:
            InvalidRequest: No prompt.
            PromptTooLong: Prompt and max_new_tokens can never fit.
            Overloaded: The queue is full.
        """
        num_tokens = num_prompt + max_new_tokens
        if num_prompt < 1:
            raise InvalidRequest("prompt", "is empty")
        # A single token is not computed, so it needs no place in the context.
        is_scored = max_new_tokens == 1 and num_prompt <= self._longest_prompt
        if num_tokens > self.max_sequence_tokens and not is_scored:
            raise PromptTooLong(
                "prompt",
                f"{num_prompt} tokens and max_new_tokens {max_new_tokens} make {num_tokens}; this"
                f" model's maximum context length is {self.max_sequence_tokens} tokens on this"
                " server",
            )
        # Sequences that get a free slot in the next step do not count as waiting.
        num_free = self.max_running_requests - self.num_running
        if self.num_waiting >= self.max_queue + num_free:
            raise Overloaded(f"{self.num_waiting} requests are waiting")

    def add(self, seq: Sequence) -> None:
        """Queues a sequence.

        Raises:
            InvalidRequest: No prompt, or the id of a live request.
            PromptTooLong, Overloaded: See `check`.
        """
        self.check(seq.num_prompt, seq.sampling.max_new_tokens)
        if seq.request_id in self._queue:
            raise InvalidRequest("request_id", f"{seq.request_id} is in use")
        self._queue.add(seq)

    def cancel(self, request_id: int) -> bool:
        """Ends a request at the next `schedule`; False when it is not known (any more)."""
        return self._queue.cancel(request_id)

    def schedule(
        self,
        wanted_nodes: Callable[[list[Sequence], int], list[int]],
        now: float | None = None,
        with_prompts: bool = True,
    ) -> StepPlan:
        """Plans the next step and reserves its pages.

        Args:
            wanted_nodes: Tree nodes that each decoding sequence would verify, given these and the
                prompt tokens.
            now: `time.monotonic()` seconds.
            with_prompts: Whether sequences may join and prompts be computed, where others decode.
        """
        plan = StepPlan()
        plan.ended = self._queue.drop_ended(time.monotonic() if now is None else now)
        decoding, has_room = self._reserve_roots(plan)
        if with_prompts or not decoding:
            if has_room:
                self._admit(plan, decoding)
            self._reserve_chunks(plan, len(decoding))
        decoding = [seq for seq in decoding if seq.status is Status.RUNNING]
        if decoding:
            num_prompt = sum(chunk.num_tokens for chunk in plan.prefill)
            nodes = wanted_nodes(decoding, num_prompt)
            self._rows_each = 1 + max(nodes)
            for seq, num_nodes in zip(decoding, nodes, strict=True):
                plan.decode.append(DecodeSlot(seq, self._reserve_tree(seq, num_nodes)))
        plan.released_slots = self._queue.take_released_slots()
        return plan

    def schedule_prompts(self) -> StepPlan:
        """Plans prompts that are computed behind a running step, and reserves their pages.

        The last token of each is left for the step after it, so that they choose no token and the
        host need not wait for them. Nobody is preempted. A plan without chunks leaves prompts to
        `schedule`: a sequence leaves, pages are short, or a prompt's log-probabilities are wanted.
        """
        plan = StepPlan()
        if self._queue.has_to_drop(time.monotonic()):
            return plan
        if self._queue.may_admit:
            self._admit(plan, [])
            plan.released_slots = self._queue.take_released_slots()
        prefilling = [seq for seq in self._queue.running if not seq.is_decoding]
        if not prefilling or any(seq.score_from is not None for seq in prefilling):
            return plan
        size = self.prefill_budget.tokens(max(seq.num_computed for seq in prefilling))
        for seq, num_tokens in split_chunk(prefilling, size, self._tables):
            start = seq.num_computed
            end = min(start + num_tokens, len(seq.tokens) - 1)
            if not self._tables.grow_all([(seq, end)]):
                break  # a sequence that comes later must not take its pages
            if start < end:
                plan.prefill.append(PrefillChunk(seq, start, end - start))
        plan.prefill.sort(key=lambda chunk: chunk.seq.rank)
        return plan

    def going_on(self, flying: list[Sequence]) -> list[Sequence]:
        """Returns the sequences of a running step that surely take part in the next one."""
        running = Status.RUNNING
        return [seq for seq in flying if seq.status is running and seq.num_output_left > 1]

    def schedule_ahead(self, going: list[Sequence], num_nodes: int) -> str | None:
        """Plans a step of decoding only, while the outcome of the previous one is unknown, and
        reserves its pages.

        Args:
            going: Sequences of the step, with `num_in_flight` set.
            num_nodes: Number of tree nodes that each would verify beside its root.

        Returns:
            None where the step may start, else the reason: a sequence joins or leaves, a prompt has
            to be computed, no sequence goes on, or pages are short.
        """
        if self._queue.has_to_drop(time.monotonic()):
            return "leaves"
        queue = self._queue
        if queue.may_admit and queue.waiting and queue.free_slots:
            return "joins"
        # A running sequence outside the started step computes its prompt, or has just done so.
        if any(not seq.num_in_flight for seq in self._queue.running):
            return "prompt"
        if not going:
            return "ends"
        size = self.pool.page_size
        wanted = [
            (seq, num_keys)
            for seq in going
            if (num_keys := len(seq.tokens) + seq.num_in_flight + num_nodes) > len(seq.pages) * size
        ]
        return None if self._tables.grow_all(wanted) else "pages"

    def on_committed(self, seq: Sequence, num_tokens: int) -> None:
        """Notes that the KV of `num_tokens` more tokens of `seq.tokens` is in its pages.

        Called after `append_tokens`, with the rows of a chunk or the tokens kept of a
        verification. Full pages go to the prefix tree at once, so live sequences share them; an
        entry of the page table may change to the page that another sequence filled the same way.
        """
        if not 0 <= num_tokens < seq.num_uncomputed:
            raise ValueError(f"{num_tokens} of {seq.num_uncomputed} uncomputed tokens committed")
        self._tables.commit(seq, num_tokens)

    def on_token(self, seq: Sequence) -> None:
        """Does `on_committed` for one token, the usual case."""
        seq.num_computed += 1
        if seq.num_computed % self.pool.page_size == 0:
            self._tables.commit(seq, 0)

    def finish(self, seq: Sequence, reason: FinishReason | None = None) -> None:
        """Ends a live sequence and releases slot and pages; its full pages stay cached.

        Args:
            seq: Waiting or running sequence; one that has ended is left unchanged.
            reason: Reason, where `append_tokens` has not set one.
        """
        self._queue.finish(seq, reason)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each page has as many references as owners, and each slot one.

        Walks the whole pool: for idle moments.
        """
        holders = self.prefix_tree.holders()
        for seq in self._queue.running:
            for page in seq.pages:
                holders[page] = holders.get(page, 0) + 1
        self.pool.check_integrity(holders)
        self.prefix_tree.check_integrity()
        self._queue.check_integrity()

    def _reserve_roots(self, plan: StepPlan) -> tuple[list[Sequence], bool]:
        """Gives every decoding sequence the page of its root, by preemption if need be.

        Returns:
            The sequences that got it, and whether pages sufficed for all.
        """
        decoding = []
        has_room, size = True, self.pool.page_size
        for seq in list(self._queue.running):
            if seq.status is not Status.RUNNING or not seq.is_decoding:
                continue
            num_tokens = len(seq.tokens)
            if num_tokens > len(seq.pages) * size:
                missing = self.pool.pages_for(num_tokens) - len(seq.pages)
                if missing > self.num_available_pages:
                    has_room = False
                    self._take_back(missing, seq, plan)
                if self._tables.grow(seq, num_tokens) < num_tokens:
                    continue
            decoding.append(seq)
        return decoding, has_room

    def _admit(self, plan: StepPlan, decoding: list[Sequence]) -> None:
        """Moves waiting sequences to running, in order, while there are slots and pages.

        Never overtakes: a sequence that does not fit holds the others back until it fits.
        """
        queue = self._queue
        queue.may_admit = False
        if not queue.waiting or not queue.free_slots:
            return
        unclaimed = self.num_available_pages
        for seq in queue.running:
            unclaimed -= max(0, self._target_pages(seq) - len(seq.pages))
        while queue.waiting and queue.free_slots:
            seq = queue.waiting[0]
            node = self._tables.find_prefix(seq)
            needed = self._target_pages(seq) - node.depth
            if needed > unclaimed:
                return
            needed += self.prefix_tree.num_idle_on_path(node)
            if needed > unclaimed:
                return
            unclaimed -= needed
            queue.start_first()
            self._tables.take_prefix(seq, node)
            plan.admitted.append(seq)
            if seq.is_decoding and self._tables.grow(seq, len(seq.tokens)) >= len(seq.tokens):
                insert_by_rank(decoding, seq)

    def _reserve_chunks(self, plan: StepPlan, num_decoding: int) -> None:
        """Splits the step's prompt tokens over the prefilling sequences and reserves their
        pages.

        Args:
            num_decoding: Number of sequences that decode in the step; as many rows each as in the
                step before.
        """
        prefilling = [seq for seq in self._queue.running if not seq.is_decoding]
        if not prefilling:
            return
        chunk_size = self.prefill_budget.chunk_size
        if num_decoding:
            num_keys = max(seq.num_computed for seq in prefilling)
            chunk_size = self.prefill_budget.tokens(num_keys, num_decoding * self._rows_each)
        chunks = []
        for seq, num_tokens in split_chunk(prefilling, chunk_size, self._tables):
            if seq.status is not Status.RUNNING:
                continue
            end = seq.num_computed + num_tokens
            if self.pool.pages_for(end) - len(seq.pages) > self.num_available_pages:
                # One more token must get room; further ones get the room that is free.
                first = self.pool.pages_for(seq.num_computed + 1) - len(seq.pages)
                self._take_back(first, seq, plan)
            end = min(end, self._tables.grow(seq, end))
            if end > seq.num_computed:
                chunks.append(PrefillChunk(seq, seq.num_computed, end - seq.num_computed))
        plan.prefill = [chunk for chunk in chunks if chunk.seq.status is Status.RUNNING]
        plan.prefill.sort(key=lambda chunk: chunk.seq.rank)

    def _target_pages(self, seq: Sequence) -> int:
        """Returns the pages for all tokens and the output that admission keeps room for."""
        headroom = min(self.admission_headroom, seq.num_output_left - 1)
        return self.pool.pages_for(len(seq.tokens) + headroom)

    def _reserve_tree(self, seq: Sequence, num_nodes: int) -> int:
        """Reserves room for up to `num_nodes` after the root; the last output token needs none."""
        if num_nodes <= 0 or seq.num_output_left <= 1:
            return 0
        covered = self._tables.grow(seq, len(seq.tokens) + num_nodes)
        return min(num_nodes, covered - len(seq.tokens))

    def _take_back(self, num_pages: int, seq: Sequence, plan: StepPlan) -> None:
        """Makes `num_pages` available to `seq`.

        First takes pages that others hold for draft trees, then preempts sequences from the worst
        rank up, but none better than `seq`. Where that is not enough, `seq` takes no part in this
        step.
        """
        for other in self._queue.running:
            if other.is_decoding:
                self._tables.truncate(other, self.pool.pages_for(len(other.tokens)))
        running = self._queue.running
        while self.num_available_pages < num_pages and running[-1] is not seq:
            plan.preempted.append(running[-1])
            self._queue.preempt(running[-1])
