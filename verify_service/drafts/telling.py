"""Whom a draft is told of in a step that it is asked by value, and for whom it is asked."""

from collections.abc import Sequence

from verify_service.drafts.ask_ahead import AskAhead
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.news import PATIENCE, DraftNews
from verify_service.drafts.proposals import Asked, Wanted
from verify_service.drafts.wire import DraftWire, wish
from verify_service.scheduler.request import Sequence as RequestSequence

MOST_READ = 512  # tokens that sequences left out until now make a step read, if there are several


class Telling:
    """Puts news into a request.

    Args:
        tree_shape: (steps, topk) of the server.
        refill_tokens: Tokens per step that a draft with KV may catch up on.
    """

    def __init__(
        self,
        news: DraftNews,
        wire: DraftWire,
        hidden: HiddenStates,
        ahead: AskAhead,
        tree_shape: tuple[int, int],
        refill_tokens: int,
    ) -> None:
        self._news, self._wire, self._hidden, self._ahead = news, wire, hidden, ahead
        self._tree_shape, self._refill_tokens = tree_shape, refill_tokens
        self._is_cheap = self._can_follow = False

    def attach(self, is_cheap: bool, can_follow: bool) -> None:
        """Another draft is attached: whether asking it costs next to nothing, and whether it can follow on the device."""
        self._is_cheap, self._can_follow = is_cheap, can_follow

    def is_silent(self, wanted: Sequence[Wanted], is_resting: bool, must_tell: bool) -> bool:
        """Whether nothing is to be told at all: whoever is asked for is told then; see `tell` for the arguments."""
        if not is_resting or must_tell or self._is_cheap:
            return False
        return not any(want.max_nodes for want in wanted)

    def tell(
        self,
        wanted: Sequence[Wanted],
        extending: Sequence[RequestSequence],
        is_resting: bool,
        must_tell: bool,
    ) -> None:
        """Puts news into the request; sends it where the hidden states of one step do not fit the arena.

        Args:
            wanted: Sequences that decode.
            extending: Whose prompts are computed.
            is_resting: Nothing but trials is drafted at present.
            must_tell: What is kept for the draft has become too much.
        """
        is_asked = any(want.max_nodes for want in wanted)
        # Nothing follows a step with prompts on the device, so that the step after it is soon enough.
        is_put_off = self._can_follow and bool(extending) and not is_asked
        # Whoever joins may stand on pages that are marked as told.
        may_wait = not extending and self._all_are_kept(wanted)
        # Where one follows on the device, all do; and the step behind one without drafts may be followed.
        may_wait &= not (self._can_follow and (is_asked or not is_resting))
        may_rest = self._may_rest(wanted, is_resting, must_tell)
        # Of a draft that the step does not need nothing is waited for: what finds no room is told later, with all behind it,
        # which may rest on it.
        may_stop = not must_tell and all(want.is_trial or not want.max_nodes for want in wanted)
        budget, num_read = self._refill_tokens, 0
        for want in wanted:
            sequence = want.sequence
            if is_put_off and self._can_put_off(sequence):
                continue
            if may_rest and (want.max_nodes == 0 or num_read):
                behind = self._news.behind(sequence)
                is_left_out = want.max_nodes == 0 and (is_resting or behind > PATIENCE)
                # On a CPU, of those that have been left out long, a few at a time: they make everyone wait.
                is_much = behind > PATIENCE and num_read + behind > MOST_READ
                if is_left_out or (is_much and not self._can_follow):
                    continue
            if may_wait and want.max_nodes == 0 and self._news.may_wait(sequence):
                continue
            if may_stop and not self._wire.has_room(self._news.behind(sequence)):
                return
            num_tokens = self._tell_one(want, budget)
            budget -= num_tokens
            num_read += num_tokens
        if may_rest and is_resting:
            return
        for sequence in extending:
            if is_put_off and self._can_put_off(sequence):
                continue
            if may_stop and not self._wire.has_room(self._news.behind(sequence)):
                return
            budget -= self._tell_one(Wanted(sequence, 0), budget)

    def _tell_one(self, want: Wanted, budget: int) -> int:
        """Adds what is new of a sequence, and the wish for a tree; gives the number of tokens."""
        sequence, news_of = want.sequence, self._news
        # What a step commits is never too much, or who is told last would fall behind for good.
        news, num_tokens = news_of.news(sequence, max(budget, self._tree_shape[0] + 1))
        # A draft that reads hidden states proposes after the last one that it is given.
        may_ask = num_tokens > 0 or self._hidden.layers is None
        is_asked = want.max_nodes > 0 and may_ask and news_of.has_caught_up(sequence)
        if is_asked:
            steps, topk = self._shape(sequence)
            # Deeper than the output may grow would be drafted in vain.
            steps = min(steps, want.max_nodes, sequence.num_output_left - 1)
            num_nodes = self._ahead.num_nodes(want)
            news.propose.CopyFrom(wish(steps, topk, num_nodes))
        if num_tokens or is_asked or news.HasField("begin"):
            self._wire.add_rows(sequence, news)
        if is_asked:
            self._wire.ask(news.slot, Asked(want, len(sequence.tokens), num_nodes))
        return num_tokens

    def _can_put_off(self, sequence: RequestSequence) -> bool:
        """Whether a sequence can be told of later: its news are few, or rest on those of others that may be put off."""
        return self._news.may_wait(sequence) or not self._news.stands_alone(sequence)

    def _all_are_kept(self, wanted: Sequence[Wanted]) -> bool:
        if self._hidden.layers is None:
            return True
        return all(self._hidden.run(want.sequence) is not None for want in wanted)

    def _may_rest(self, wanted: Sequence[Wanted], is_resting: bool, must_tell: bool) -> bool:
        """Whether those for whom nothing is asked need not be told of, however much they have read.

        Not where others follow on the device: then all do.
        """
        if self._is_cheap or must_tell or (self._can_follow and not is_resting):
            return False
        return all(self._news.stands_alone(want.sequence) for want in wanted if want.max_nodes)

    def _shape(self, sequence: RequestSequence) -> tuple[int, int]:
        steps, topk = self._tree_shape
        asked = sequence.speculation
        return min(asked.num_steps or steps, steps), min(asked.topk or topk, topk)
