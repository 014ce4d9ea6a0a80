"""Pool, prefix tree, draft marks and scheduler together, with a model of the content of every
KV slot.
"""

import random
import zlib
from dataclasses import dataclass, field

from foredraft.errors import Overloaded, PromptTooLong
from foredraft.types import FinishReason, SamplingParams
from testing.scheduling import scheduler_of
from verify_service.drafts.page_marks import DraftMarks
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.prefix_tree import PrefixTree
from verify_service.scheduler.request import Sequence, Status
from verify_service.scheduler.step_plan import StepPlan

VOCABULARY = 6
EOS = 0


def extend_history(history, token):
    """Returns the stand-in for the key and value of `token` after the tokens that `history`
    stands for.
    """
    return zlib.crc32(b"%d" % token, history)


def histories(seq):
    """Returns the expected content of each key index of a sequence."""
    history = 0
    result = []
    for token in seq.tokens:
        history = extend_history(history, token)
        result.append(history)
    return result


def choose(history):
    """Returns the model's next token: a fixed function of everything before."""
    draw = history % 97
    return EOS if draw < 3 else 1 + draw % (VOCABULARY - 1)


def expected_output(seq):
    """Returns the output of a sequence that runs alone."""
    history = histories(Sequence(0, seq.prompt, seq.sampling))[-1]
    output = []
    while len(output) < seq.sampling.max_new_tokens:
        output.append(choose(history))
        if output[-1] == EOS:
            break
        history = extend_history(history, output[-1])
    return output


@dataclass(frozen=True)
class Request:
    text: int
    length: int
    ending: int
    max_new_tokens: int
    priority: int
    patience: int | None


@dataclass
class DraftCopy:
    """Page tables as a draft knows them, from changes alone; `now` or later."""

    number: int
    slots: dict[int, list[int]] = field(default_factory=dict)

    def read(self, plan: StepPlan, running: tuple[Sequence, ...], now: bool) -> None:
        for slot in plan.released_slots:
            self.slots.pop(slot, None)
        for seq in plan.admitted:
            assert seq.slot not in self.slots
            self.slots[seq.slot] = []
        for seq in running if now else ():
            table = self.slots[seq.slot]
            first = min(seq.take_pages_changed(self.number), len(table))
            table[first:] = seq.pages[first:]
            assert table == seq.pages
        assert len(self.slots) == len(running)


class Engine:
    """Runs the verifier's loop with a dictionary for a model."""

    def __init__(self, seed: int, pool: PagePool, max_nodes: int, **options) -> None:
        self.random = random.Random(seed)
        self.pool = pool
        self.tree = PrefixTree(pool)
        self.look_ahead = options.get("look_ahead", 0)
        self.scheduler = scheduler_of(pool, self.tree, usable_prefix=self.usable_prefix, **options)
        self.marks = DraftMarks(pool)
        self.epoch = 0  # number of the draft, which comes and goes
        self.noted: dict[int, tuple[int, int, list[int]]] = {}  # expected content of `marks`
        self.contents: dict[int, int] = {}  # KV slot -> history
        self.drafts = [DraftCopy(number) for number in range(2)]
        self.sequences: list[Sequence] = []
        self.now = 0.0
        self.max_nodes = max_nodes

    def add(self, request: Request) -> None:
        prompt = [(i * i + request.text) % VOCABULARY for i in range(request.length)]
        prompt[-1] = request.ending
        patience = request.patience
        seq = Sequence(
            len(self.sequences),
            prompt,
            SamplingParams(max_new_tokens=request.max_new_tokens),
            eos_token_ids=frozenset([EOS]),
            priority=request.priority,
            deadline=None if patience is None else self.now + patience,
        )
        num_keys = request.length + request.max_new_tokens - 1
        fits = num_keys <= self.pool.num_pages * self.pool.page_size
        try:
            self.scheduler.add(seq)
        except PromptTooLong:
            assert not fits
        except Overloaded:
            assert self.scheduler.num_waiting >= self.scheduler.max_queue
        else:
            assert fits
            self.sequences.append(seq)

    @property
    def live(self) -> list[Sequence]:
        return [seq for seq in self.sequences if seq.status is not Status.FINISHED]

    def restart_draft(self) -> None:
        """Another draft takes the place of the one that filled pages."""
        self.epoch += 1
        self.marks = DraftMarks(self.pool)

    def drain(self) -> None:
        """Runs until all sequences have ended, and checks for leftovers."""
        # In each step at least the best-ranked sequence advances by a token.
        limit = 1 + 2 * sum(seq.num_prompt + seq.sampling.max_new_tokens for seq in self.live)
        while self.scheduler.has_work and limit:
            limit -= 1
            self.step()
        assert not self.scheduler.has_work
        for seq in self.sequences:
            assert seq.status is Status.FINISHED
            assert seq.output == expected_output(seq)[: seq.num_output]
        self.step()
        assert [draft.slots for draft in self.drafts] == [{}, {}]
        self.tree.clear()
        self.scheduler.check_integrity()
        assert self.pool.num_free == self.pool.num_pages
        assert self.tree.num_cached == 0

    def usable_prefix(self, seq, pages):
        """Returns the usable prefix like a verifier whose draft came and went."""
        valid = self.marks.valid_prefix(pages)
        for i, page in enumerate(pages[:valid]):
            next_tokens = self.next_tokens(seq, i)
            assert self.noted[page] == (self.epoch, self.pool.generation(page), next_tokens)
        return self.pool.page_size * (len(pages) if self.random.random() < 0.5 else valid)

    def next_tokens(self, seq, i):
        """Returns the tokens after page i that must agree for all sequences that share it."""
        end = (i + 1) * self.pool.page_size
        return seq.tokens[end : end + self.look_ahead]

    def slot(self, seq, index):
        page, offset = divmod(index, self.pool.page_size)
        return seq.pages[page] * self.pool.page_size + offset

    def step(self) -> StepPlan:
        was_running = self.scheduler.running
        plan = self.scheduler.schedule(
            lambda seqs, _: [self.random.randint(0, self.max_nodes) for _ in seqs], self.now
        )
        self.check_plan(plan, was_running)
        for draft in self.drafts:
            now = draft.number == 0 or self.random.random() < 0.3
            draft.read(plan, self.scheduler.running, now)
        trees = {slot.seq.request_id: self.draw_tree(slot) for slot in plan.decode}
        self.write(plan, trees)
        self.check_reads(plan)
        for chunk in plan.prefill:
            tokens = [choose(histories(chunk.seq)[-1])] if chunk.is_last else []
            self.commit(chunk.seq, tokens, chunk.num_tokens)
        for slot in plan.decode:
            self.verify(slot.seq, *trees[slot.seq.request_id])
        return plan

    def check_plan(self, plan, was_running):
        scheduler = self.scheduler
        assert (
            sum(chunk.num_tokens for chunk in plan.prefill) <= scheduler.prefill_budget.chunk_size
        )
        planned = [slot.seq for slot in plan.decode] + [chunk.seq for chunk in plan.prefill]
        assert len(planned) == len(set(planned))
        assert set(planned) <= set(scheduler.running)
        assert not (plan.admitted and plan.preempted)
        if scheduler.has_work:
            assert scheduler.running[0] in planned  # the best-ranked always progresses
        for seq in scheduler.running:
            # A chunk never displaces a decode; only a lack of pages does.
            if seq.is_decoding and seq not in planned:
                assert len(seq.pages) * self.pool.page_size < len(seq.tokens)
                assert not plan.admitted
        for seq in plan.preempted:
            worse = [other for other in was_running if other.rank > seq.rank]
            assert all(other.status is not Status.RUNNING for other in worse)
        for slot in plan.decode:
            covered = len(slot.seq.pages) * self.pool.page_size
            assert 0 <= slot.max_tree_nodes <= self.max_nodes
            assert covered >= slot.seq.num_computed + 1 + slot.max_tree_nodes

    def draw_tree(self, slot):
        """Returns random nodes; some of them continue what the target will choose."""
        tokens, parents = [], []
        history = [histories(slot.seq)[-1]]  # history of each row
        for i in range(self.random.randint(0, slot.max_tree_nodes)):
            parent = self.random.randint(-1, i - 1)
            lucky = self.random.random() < 0.7
            token = choose(history[parent + 1]) if lucky else self.random.randrange(VOCABULARY)
            siblings = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
            if token in siblings:
                token = next(t for t in range(99) if t not in siblings)
            tokens.append(token)
            parents.append(parent)
            history.append(extend_history(history[parent + 1], token))
        return tokens, parents, history

    def write(self, plan, trees):
        """Writes all rows of the step; two sequences may write the same slot only with the same
        content.
        """
        written = {}
        for chunk in plan.prefill:
            own = histories(chunk.seq)
            for index in range(chunk.start, chunk.start + chunk.num_tokens):
                slot = self.slot(chunk.seq, index)
                assert written.setdefault(slot, own[index]) == own[index]
        for decode in plan.decode:
            for row, history in enumerate(trees[decode.seq.request_id][2]):
                slot = self.slot(decode.seq, decode.seq.num_computed + row)
                assert slot not in written
                written[slot] = history
        self.contents.update(written)

    def check_reads(self, plan):
        for chunk in plan.prefill:
            self.check_keys(chunk.seq, chunk.start + chunk.num_tokens)
        for decode in plan.decode:
            self.check_keys(decode.seq, decode.seq.num_computed + 1)

    def check_keys(self, seq, num_keys):
        for index, history in enumerate(histories(seq)[:num_keys]):
            assert self.contents[self.slot(seq, index)] == history

    def verify(self, seq, tokens, parents, history):
        row, path, chosen = 0, [0], []
        while True:
            chosen.append(choose(history[row]))
            children = [
                i + 1
                for i, (token, parent) in enumerate(zip(tokens, parents, strict=True))
                if parent == row - 1 and token == chosen[-1]
            ]
            if not children:
                break
            row = children[0]
            path.append(row)
        start = seq.num_computed
        values = [self.contents[self.slot(seq, start + row)] for row in path]
        for i, value in enumerate(values):
            self.contents[self.slot(seq, start + i)] = value
        seq.count_step(len(tokens), len(path) - 1)
        self.commit(seq, chosen, None)

    def commit(self, seq, tokens, num_computed):
        appended = seq.append_tokens(tokens)
        before = seq.num_computed
        self.scheduler.on_committed(
            seq, appended.num_kept if num_computed is None else num_computed
        )
        page_size = self.pool.page_size
        for i in range(before // page_size, seq.num_computed // page_size):
            page, next_tokens = seq.pages[i], self.next_tokens(seq, i)
            assert len(next_tokens) == self.look_ahead
            if self.random.random() < 0.7:
                self.marks.mark(page)
                self.noted[page] = (self.epoch, self.pool.generation(page), next_tokens)
        if appended.finish_reason:
            self.scheduler.finish(seq)
            assert seq.output == expected_output(seq)
            stopped = seq.output[-1] == EOS
            assert seq.stop_token == (EOS if stopped else None)
            assert seq.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
