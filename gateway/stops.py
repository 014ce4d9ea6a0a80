"""Finds stop strings in streamed text, also across chunks, and never releases a part of one."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of several stop strings in text that comes in pieces.

    The cost per character is constant however long the text or the stop strings (Knuth, Morris,
    Pratt 1977, one automaton per stop string). The result does not depend on how the text is cut:
    the stop string that is complete first wins, and the longest of several that are complete at
    once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._stops = [stop for stop in stops if stop]
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)  # characters of each stop string seen so far
        self._held = ""
        self._firsts = {stop[0] for stop in self._stops}

    def feed(self, text: str) -> str:
        """Takes the next piece; returns the text that cannot belong to a stop string.

        After a match (`matched` is set) it returns what stood before the stop string, then nothing.
        """
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        if not self._held and not any(first in text for first in self._firsts):
            return text
        buffer = self._held + text
        offset = len(self._held)
        for index, character in enumerate(text):
            complete = self._advance(character)
            if complete is not None:
                self.matched = complete
                self._held = ""
                return buffer[: offset + index + 1 - len(complete)]
        keep = len(buffer) - max(self._states)
        self._held = buffer[keep:]
        return buffer[:keep]

    def flush(self) -> str:
        """Ends the text; returns the text that was held back."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Moves every automaton by one character; returns the longest stop string now complete."""
        complete: str | None = None
        for number, stop in enumerate(self._stops):
            state, failure = self._states[number], self._failures[number]
            while state and stop[state] != character:
                state = failure[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                if complete is None or len(stop) > len(complete):
                    complete = stop
                state = failure[state - 1]
            self._states[number] = state
        return complete


def _failure_table(stop: str) -> list[int]:
    """Returns table[i] = length of the longest proper prefix of stop that ends at i."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
