"""Searches for the best speculation: measures a grid of settings, each on a server of its own.

Results are kept in a file, which a later run continues; the caller provides the function that
starts servers.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foredraft.bench.statistics import Summary
from foredraft.config.options import flag_of
from foredraft.config.speculation import SpeculationConfig
from foredraft.errors import ConfigError, ForedraftError

# One short run cannot tell settings apart that differ by less than this share.
NOISE = 0.03


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of speculation. Absent numbers are the algorithm's defaults.

    Attributes:
        draft: Path or name of the draft model or head; empty without one.
        is_again: A second measurement at the end, which shows how steady the machine was.
    """

    algorithm: str
    draft: str = ""
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    is_again: bool = False

    @property
    def name(self) -> str:
        """A few words for tables."""
        numbers = (self.num_steps, self.topk, self.num_draft_tokens)
        shape = "/".join("-" if number is None else str(number) for number in numbers)
        name = self.algorithm if shape == "-/-/-" else f"{self.algorithm} {shape}"
        return f"{name} again" if self.is_again else name

    @property
    def key(self) -> str:
        """Key of the setting's results."""
        return f"{self.name} {self.draft}".strip()

    @property
    def values(self) -> dict[str, Any]:
        """Fields of SpeculationConfig."""
        told = {
            "speculative_algorithm": self.algorithm,
            "speculative_draft_model_path": self.draft or None,
            "speculative_num_steps": self.num_steps,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": self.num_draft_tokens,
        }
        return {name: value for name, value in told.items() if value is not None}

    @property
    def flags(self) -> str:
        """Flags of `foredraft serve`."""
        return " ".join(f"{flag_of(name)} {value}" for name, value in self.values.items())

    @property
    def request_fields(self) -> dict[str, Any]:
        """Returns the fields of one request to a server whose setting is at least this one."""
        if self.algorithm == "NONE":
            return {"speculation": {"enabled": False}}
        told = {
            "num_steps": self.num_steps,
            "topk": self.topk,
            "num_draft_tokens": self.num_draft_tokens,
        }
        known = {name: value for name, value in told.items() if value is not None}
        return {"speculation": known} if known else {}


PLAIN = Setting("NONE")
PLAIN_AGAIN = Setting("NONE", is_again=True)


def grid(
    algorithms: Mapping[str, str],
    num_steps: Sequence[int],
    topks: Sequence[int],
    num_draft_tokens: Sequence[int],
) -> list[Setting]:
    """Returns all settings that can be served: plain decoding first, then each algorithm with
    every useful tree.

    A chain (topk 1) has steps + 1 tokens whatever `num_draft_tokens` says; n-grams know only
    `num_draft_tokens`.

    Args:
        algorithms: Draft model or head of each algorithm; empty for none.
    """
    settings = [PLAIN]
    for algorithm, draft in algorithms.items():
        if algorithm == "NONE":
            continue
        if algorithm == "NGRAM":
            candidates: Iterable[Setting] = (
                Setting("NGRAM", num_draft_tokens=tokens) for tokens in num_draft_tokens
            )
        else:
            candidates = (
                Setting(algorithm, draft, steps, topk, steps + 1 if topk == 1 else tokens)
                for steps in num_steps
                for topk in topks
                for tokens in num_draft_tokens
            )
        for setting in candidates:
            if setting not in settings and _can_be_served(setting):
                settings.append(setting)
    return settings


def _can_be_served(setting: Setting) -> bool:
    try:
        SpeculationConfig(**setting.values)
    except ConfigError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Case:
    """Batch size and temperature that a setting is measured with."""

    batch_size: int
    temperature: float

    @property
    def name(self) -> str:
        """A few words for tables; also part of the key of its results."""
        return f"batch {self.batch_size}, T={self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of a setting in a case: medians over repeats.

    Attributes:
        output_rate: Output tokens per second of all requests together.
        spread: Largest over smallest rate of the repeats.
        accept_length: Tokens per verification; 1 without speculation.
        tpot: Seconds per token of a request, median over requests.
        ttft: Seconds to the first token, median over requests.
    """

    output_rate: float
    spread: float
    accept_length: float
    accept_rate: float | None
    tpot: float
    ttft: float

    @classmethod
    def of(cls, summaries: Sequence[Summary]) -> "Figures":
        """Computes the figures; raises ForedraftError where a request failed."""
        for summary in summaries:
            if summary.num_ok < summary.num_sent:
                raise ForedraftError(f"requests failed: {summary.errors}")
        rates = [summary.output_rate for summary in summaries]
        accepted = [one.accept_rate for one in summaries if one.accept_rate is not None]
        return cls(
            statistics.median(rates),
            max(rates) / min(rates),
            statistics.median(summary.accept_length or 1.0 for summary in summaries),
            statistics.median(accepted) if accepted else None,
            statistics.median(summary.tpot.percentiles[50.0] for summary in summaries),
            statistics.median(summary.ttft.percentiles[50.0] for summary in summaries),
        )


@dataclass(slots=True)
class Results:
    """Figures by setting and case, and the file that holds them.

    Attributes:
        path: The file, written after every case.
        conditions: Other conditions that the figures depend on: model, prompts, machine.
        errors: Reasons why settings could not be measured; the next run tries them again.
    """

    path: Path
    conditions: dict[str, Any]
    found: dict[str, dict[str, Figures]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, conditions: dict[str, Any]) -> "Results":
        """Reads the results of an earlier run, if there are any.

        Raises:
            ConfigError: The file has other conditions, or is no file of results.
        """
        results = cls(path, conditions)
        if not path.exists():
            return results
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            before = told["conditions"]
            found = {
                setting: {case: Figures(**figures) for case, figures in cases.items()}
                for setting, cases in told["found"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"--output-file {path}: not the results of a sweep: {error}"
            ) from None
        # Through JSON, so that tuples and lists are the same.
        now = json.loads(json.dumps(conditions))
        other = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if other:
            raise ConfigError(
                f"--output-file {path} holds results of another {', '.join(sorted(other))}: "
                "give another file, or delete it"
            )
        results.found = found
        return results

    def write(self) -> None:
        """Replaces the file atomically, so that a killed run leaves the previous one."""
        told = {
            "conditions": self.conditions,
            "found": {
                setting: {case: asdict(figures) for case, figures in cases.items()}
                for setting, cases in self.found.items()
            },
            "errors": self.errors,
        }
        draft = self.path.with_suffix(f"{self.path.suffix}.new")
        draft.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.path)

    def get(self, setting: Setting, case: Case) -> Figures | None:
        """Returns the known figures; None where there are none."""
        return self.found.get(setting.key, {}).get(case.name)

    def speedup(self, setting: Setting, case: Case) -> float | None:
        """Returns the output rate divided by plain decoding's."""
        own, plain = self.get(setting, case), self.get(PLAIN, case)
        return own.output_rate / plain.output_rate if own and plain else None

    def mean_speedup(self, setting: Setting, cases: Sequence[Case]) -> float | None:
        """Returns the geometric mean over the cases; None unless all are known."""
        speedups = [self.speedup(setting, case) for case in cases]
        known = [speedup for speedup in speedups if speedup]
        return statistics.geometric_mean(known) if known and len(known) == len(speedups) else None

    def ranking(
        self, settings: Sequence[Setting], cases: Sequence[Case]
    ) -> list[tuple[Setting, float]]:
        """Returns settings with their mean speedup, the best first, without those that failed."""
        known = [(setting, self.mean_speedup(setting, cases)) for setting in settings]
        ranked = [(setting, speedup) for setting, speedup in known if speedup is not None]
        return sorted(ranked, key=lambda pair: -pair[1])

    def drift(self, cases: Sequence[Case]) -> tuple[float, float] | None:
        """Returns the smallest and largest ratio of plain decoding's rate at the end to that at
        the beginning; None if unknown.
        """
        ratios = [ratio for case in cases if (ratio := self.speedup(PLAIN_AGAIN, case))]
        return (min(ratios), max(ratios)) if ratios else None


Measure = Callable[[str, Setting, Case], Figures]
OpenServer = Callable[[Setting], AbstractContextManager[str]]


def run(
    settings: Sequence[Setting],
    cases: Sequence[Case],
    results: Results,
    open_server: OpenServer,
    measure: Measure,
) -> Iterator[tuple[Setting, Case, Figures | None]]:
    """Measures missing figures and yields them; yields None for the cases of a setting that
    failed.

    If anything was measured, plain decoding is measured once more at the end.

    Args:
        open_server: Context manager that starts a server for a setting and returns its URL.
        measure: Function that measures a case at that URL.
    """
    results.errors = {}
    is_new = False
    for setting in settings:
        missing = [case for case in cases if results.get(setting, case) is None]
        if missing:
            for found in _run_setting(setting, missing, results, open_server, measure):
                is_new |= found[2] is not None
                yield found
    if is_new:
        results.found.pop(PLAIN_AGAIN.key, None)
    missing = [case for case in cases if results.get(PLAIN_AGAIN, case) is None]
    if missing:
        yield from _run_setting(PLAIN_AGAIN, missing, results, open_server, measure)


def _run_setting(
    setting: Setting,
    missing: Sequence[Case],
    results: Results,
    open_server: OpenServer,
    measure: Measure,
) -> Iterator[tuple[Setting, Case, Figures | None]]:
    num_done = 0
    try:
        with open_server(setting) as url:
            for case in missing:
                figures = measure(url, setting, case)
                results.found.setdefault(setting.key, {})[case.name] = figures
                results.write()
                num_done += 1
                yield setting, case, figures
    except ForedraftError as error:
        # Behind the first line are the last that a service logged, the reason at their end.
        first, *logged = str(error).splitlines()
        results.errors[setting.key] = ": ".join([first, *(line.strip() for line in logged[-1:])])
        results.write()
        for case in missing[num_done:]:
            yield setting, case, None


def equals(ranking: Sequence[tuple[Setting, float]]) -> list[Setting]:
    """Returns the settings behind the best that one run cannot tell from it."""
    if not ranking:
        return []
    best = ranking[0][1]
    return [setting for setting, speedup in ranking[1:] if speedup > best * (1 - NOISE)]


def num_requests(batch_size: int, least: int) -> int:
    """Returns a number of requests that fills whole batches, and is at least `least`."""
    return max(2, math.ceil(least / batch_size)) * batch_size
