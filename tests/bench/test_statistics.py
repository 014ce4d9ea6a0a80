"""Figures against sums made another way."""

import itertools
import json
import random
import statistics

import numpy as np
import pytest

from foredraft.bench.load import Stage, StageResult
from foredraft.bench.records import Objective, Record, Speculation, apportion
from foredraft.bench.report import comparison
from foredraft.bench.statistics import PERCENTILES, Distribution, summarize
from foredraft.bench.stream import AnswerReader, StreamError
from foredraft.errors import ConfigError


def record(index: int, due: float, arrivals: list[tuple[float, int]], **fields: object) -> Record:
    tokens = sum(count for _, count in arrivals)
    return Record(
        index, due, due, arrivals[-1][0], arrivals, True, 10, 0, tokens, "length", **fields
    )


def made_up(count: int = 200) -> list[Record]:
    choose = random.Random(5)
    records = []
    for index in range(count):
        moment = due = choose.uniform(0, 10)
        arrivals = []
        for _ in range(choose.randint(1, 30)):
            moment += choose.expovariate(20)
            arrivals.append((moment, choose.randint(1, 6)))
        records.append(record(index, due, arrivals))
    return records


def test_percentiles_are_numpys_over_every_request_and_token() -> None:
    records = made_up()
    summary = summarize(StageResult(Stage(len(records)), records, 20.0))
    ttft = [one.arrivals[0][0] - one.due for one in records]
    gaps, per_request = [], []
    for one in records:
        own = []
        for (before, _), (now, count) in zip(one.arrivals, one.arrivals[1:], strict=False):
            own += [(now - before) / count] * count
        gaps += own
        if own:
            per_request.append(statistics.fmean(own))
    latencies = [one.end - one.due for one in records]
    for found, values in (
        (summary.ttft, ttft),
        (summary.itl, gaps),
        (summary.tpot, per_request),
        (summary.e2el, latencies),
    ):
        assert found.count == len(values)
        assert found.mean == pytest.approx(statistics.fmean(values))
        assert found.std == pytest.approx(statistics.pstdev(values))
        assert found.max == max(values)
        for point in PERCENTILES:
            assert found.percentiles[point] == pytest.approx(np.percentile(values, point))
    assert summary.output_tokens == sum(count for one in records for _, count in one.arrivals)
    assert summary.output_rate == pytest.approx(summary.output_tokens / 20)
    assert json.loads(json.dumps(summary.to_json()))["p99_itl_ms"] == pytest.approx(
        1e3 * np.percentile(gaps, 99)
    )


def test_answers_of_one_token_have_no_time_between_tokens() -> None:
    records = [record(index, 0.0, [(0.2 + index, 1)]) for index in range(3)]
    summary = summarize(StageResult(Stage(3), records, 4.0))
    told = summary.to_json()
    names = [f"{key}_{name}_ms" for key in ("mean", "median", "max") for name in ("tpot", "itl")]
    assert [told[name] for name in names] == [None] * 6
    assert told["median_ttft_ms"] == pytest.approx(1200)
    row = [next(column.cells) for column in comparison([summary]).columns]
    assert row[4:8] == ["1200", "2180", "", ""]


def test_nothing_answered_gives_zeros() -> None:
    failed = Record(0, 0.0, 0.0, 1.0, error="timeout")
    summary = summarize(StageResult(Stage(1), [failed], 1.0), Objective(ttft=1))
    assert summary.num_ok == 0
    assert summary.errors == {"timeout": 1}
    assert summary.goodput == 0
    assert summary.ttft.mean == summary.request_rate == summary.output_rate == 0
    assert summary.accept_length is None


def test_goodput_counts_what_meets_every_limit() -> None:
    fast = record(0, 0.0, [(0.1, 1), (0.2, 2), (0.3, 2)])  # 100 ms, 50 ms a token, 300 ms
    late = record(1, 0.0, [(0.6, 1), (0.7, 4)])
    slow = record(2, 0.0, [(0.1, 1), (1.0, 2)])
    single = record(3, 0.0, [(0.1, 1)])
    broken = record(4, 0.0, [(0.1, 1), (0.2, 1)], error="timeout")
    result = StageResult(Stage(5), [fast, late, slow, single, broken], 2.0)
    assert summarize(result).goodput is None
    for limits, good in (
        (["ttft:500"], 3),
        (["ttft:500", "tpot:51"], 2),
        (["tpot:49"], 2),
        (["e2el:290"], 1),
    ):
        objective = Objective.parse(limits)
        assert summarize(result, objective).good_requests == good, limits
        assert summarize(result, objective).goodput == good / 2


@pytest.mark.parametrize("part", ["ttft", "ttft:x", "ttfb:5", "tpot:-1", "tpot:nan", "e2el:0"])
def test_an_objective_that_is_none(part: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        Objective.parse([part])


def test_accept_length_is_of_totals() -> None:
    first = record(0, 0.0, [(0.1, 4)], speculation=Speculation(2, 4, 10, 2))
    second = record(1, 0.0, [(0.1, 12)], speculation=Speculation(3, 12, 10, 9))
    result = StageResult(Stage(2), [first, second], 1.0)
    assert summarize(result).accept_length == pytest.approx(16 / 5)
    assert summarize(result).accept_rate == pytest.approx(11 / 20)
    # A server whose answers do not tell, but whose counters do.
    silent = StageResult(Stage(1), [record(0, 0.0, [(0.1, 4)])], 1.0)
    counters = (Speculation(10, 20, 40, 10), Speculation(20, 45, 80, 25))
    assert summarize(silent, None, counters).accept_length == pytest.approx(2.5)


def test_apportioning_keeps_the_sum_and_the_order_of_sizes() -> None:
    choose = random.Random(1)
    for _ in range(300):
        weights = [choose.randint(0, 40) for _ in range(choose.randint(1, 12))]
        total = choose.randint(0, 60)
        parts = apportion(total, weights)
        assert sum(parts) == total
        if total >= len(weights):
            assert min(parts) >= 1
        heavy = sorted(range(len(weights)), key=weights.__getitem__)
        assert all(parts[a] <= parts[b] + 1 for a, b in itertools.pairwise(heavy))


def read(chunks: list[bytes]) -> Record:
    answer = Record(0, 0.0, 0.0)
    reader = AnswerReader(answer)
    for number, chunk in enumerate(chunks):
        reader.feed(number + 1.0, chunk)
    reader.finish()
    return answer


def event(told: object) -> bytes:
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def test_what_comes_in_one_read_is_one_arrival_and_reads_may_cut_anywhere() -> None:
    one = event({"choices": [{"text": "ab", "token_ids": [1, 2]}]})
    two = event({"choices": [{"text": "c", "num_tokens": 1}]})
    end = event({"choices": [{"text": "", "token_ids": [], "finish_reason": "stop"}]})
    answer = read([one[:9], one[9:] + two, end + b"data: [DONE]\n\n"])
    assert answer.arrivals == [(2.0, 3)]
    assert answer.exact
    assert (answer.text, answer.output_tokens, answer.finish_reason) == ("abc", 3, "stop")


def test_tokens_are_apportioned_by_text_where_only_their_number_is_told() -> None:
    words = [event({"choices": [{"delta": {"content": text}}]}) for text in ("aa", "bbbb", "cc")]
    usage = {"usage": {"prompt_tokens": 7, "completion_tokens": 8}, "choices": []}
    answer = read([*words, event(usage) + b"data: [DONE]\n\n"])
    assert [count for _, count in answer.arrivals] == [2, 4, 2]
    assert not answer.exact
    assert answer.is_counted
    assert (answer.prompt_tokens, answer.output_tokens) == (7, 8)


def test_without_any_count_each_event_with_text_is_a_token() -> None:
    one, two, three = (event({"choices": [{"text": text}]}) for text in ("aa", "bb", "cc"))
    end = event({"choices": [{"text": "", "finish_reason": "stop"}]})
    answer = read([one + two, three + end + b"data: [DONE]\n\n"])
    assert [count for _, count in answer.arrivals] == [2, 1]
    assert answer.output_tokens == 3
    assert not answer.is_counted


def test_usage_that_grows_tells_when_tokens_came() -> None:
    events = [
        event(
            {"choices": [{"text": "x" * n}], "usage": {"prompt_tokens": 1, "completion_tokens": n}}
        )
        for n in (1, 4, 6)
    ]
    answer = read([*events, b"data: [DONE]\n\n"])
    assert [count for _, count in answer.arrivals] == [1, 3, 2]
    assert answer.exact


def test_a_usage_beside_the_finish_reason_is_no_arrival() -> None:
    """`transformers serve` closes its streams in this way."""
    words = [event({"choices": [{"text": text}]}) for text in ("aa", "bb")]
    usage = {"prompt_tokens": 4, "completion_tokens": 2}
    end = {"choices": [{"text": "", "finish_reason": "length"}], "usage": usage}
    answer = read([*words, event(end)])
    assert [count for _, count in answer.arrivals] == [1, 1]
    assert (answer.output_tokens, answer.exact) == (2, False)


def test_natives_answers_repeat_their_beginning() -> None:
    meta = {"prompt_tokens": 3, "finish_reason": None}
    end = {"completion_tokens": 5, "finish_reason": {"type": "length"}, "spec_verify_ct": 2}
    answer = read(
        [
            event({"text": "a", "meta_info": {**meta, "completion_tokens": 1}}),
            event({"text": "abc", "meta_info": {**meta, **end}}) + b"data: [DONE]\n\n",
        ]
    )
    assert answer.arrivals == [(1.0, 1), (2.0, 4)]
    assert answer.text == "abc"
    assert answer.speculation is not None
    assert answer.speculation.emitted_tokens / answer.speculation.verify_steps == 2.5


@pytest.mark.parametrize(
    ("chunks", "kind"),
    [
        ([event({"error": {"message": "no"}})], "error event"),
        ([b"data: {\n\n"], "malformed stream"),
        ([event({"choices": [{"text": "a"}]})], "broken stream"),
        ([], "broken stream"),
    ],
)
def test_a_bad_stream_is_a_failure(chunks: list[bytes], kind: str) -> None:
    with pytest.raises(StreamError) as caught:
        read(chunks)
    assert caught.value.kind == kind


def test_a_distribution_of_nothing() -> None:
    assert Distribution.of([]).count == 0
