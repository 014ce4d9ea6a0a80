"""SGLang's native routes against the running stack."""

import itertools
import json
import threading
import time
from typing import Any

import httpx
import pytest

from foredraft import __version__
from foredraft.text.tokenizer import Tokenizer
from gateway.native.answers import Pace
from testing import tiny_tokenizers
from testing.stack import CONTEXT_LENGTH, VOCAB_SIZE, eventually, metric

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())
TEXT = "The quick brown fox"
FIXED = {"temperature": 0.8, "sampling_seed": 7, "max_new_tokens": 30}
GREEDY = {"temperature": 0, "max_new_tokens": 30}


def generate(http: httpx.Client, **body: Any) -> Any:
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    with http.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_text_ids_and_account(http: httpx.Client) -> None:
    http.post("/flush_cache")
    one = generate(http, text=TEXT, sampling_params={**FIXED, "ignore_eos": True})
    meta = one["meta_info"]
    assert one["text"] == TOKENIZER.decode(one["output_ids"])
    assert meta["completion_tokens"] == len(one["output_ids"]) == 30
    assert meta["prompt_tokens"] == len(TOKENIZER.encode(TEXT))
    assert meta["cached_tokens"] == 0
    assert meta["finish_reason"] == {"type": "length", "length": 30}
    assert meta["seed"] == 7
    assert meta["e2e_latency"] > 0
    assert meta["spec_num_correct_drafts"] == meta["accepted"] <= meta["drafted"]
    assert meta["spec_accept_length"] == meta["accept_length"] == 30 / meta["spec_verify_ct"]
    assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]
    ids = generate(http, input_ids=TOKENIZER.encode(TEXT), sampling_params=FIXED)
    assert ids["text"] == one["text"]


def test_a_known_prefix_is_cached(http: httpx.Client) -> None:
    prompt = [7] * 100
    generate(http, input_ids=prompt, sampling_params=GREEDY)
    again = generate(http, input_ids=prompt, sampling_params=GREEDY)
    assert again["meta_info"]["cached_tokens"] >= 64
    assert http.get("/flush_cache").json()["pages"] > 0
    flushed = generate(http, input_ids=prompt, sampling_params=GREEDY)
    assert flushed["meta_info"]["cached_tokens"] == 0


def test_streams_are_cumulative(http: httpx.Client) -> None:
    whole = generate(http, text=TEXT, sampling_params=FIXED)
    chunks = streamed(http, text=TEXT, sampling_params=FIXED)
    for earlier, later in itertools.pairwise(chunks):
        assert later["text"].startswith(earlier["text"])
        assert earlier["meta_info"]["finish_reason"] is None
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    # On a busy machine all of it may be there before the first event is sent.
    eventually(lambda: len(streamed(http, text=TEXT, sampling_params=FIXED)) > 1)


def test_long_answers_are_sent_less_often() -> None:
    now = 0.0
    work = iter([1.0, 1.001, 2.0, 2.1])  # a millisecond for the first event, 100 for the second
    pace = Pace(clock=lambda: now, spent=lambda: next(work))
    due = []
    for step in range(1000):
        now = step * 0.01
        if pace.is_due:
            due.append(step)
            assert pace.encode({"text": "é"}) == 'data: {"text":"é"}\n\n'.encode()
        if len(due) == 2:
            break
    assert due == [0, 5]
    now = 0.05 + 4.99
    assert not pace.is_due
    now += 0.02
    assert pace.is_due


def test_batches(http: httpx.Client) -> None:
    texts = [TEXT, "def add(a, b):"]
    single = [generate(http, text=text, sampling_params=FIXED) for text in texts]
    batch = generate(http, text=texts, sampling_params=FIXED)
    assert [answer["text"] for answer in batch] == [answer["text"] for answer in single]
    each = generate(http, text=texts, sampling_params=[FIXED, GREEDY], rid=["batch-a", "batch-b"])
    assert each[0]["text"] == single[0]["text"]
    assert [answer["meta_info"]["id"] for answer in each] == ["batch-a", "batch-b"]
    ends = {}
    for chunk in streamed(http, text=texts, sampling_params=FIXED):
        ends[chunk["index"]] = chunk["text"]
    assert [ends[0], ends[1]] == [answer["text"] for answer in single]


def test_choices(http: httpx.Client) -> None:
    answers = generate(http, text=TEXT, sampling_params={**FIXED, "n": 2})
    assert len(answers) == 2
    assert answers[0]["text"] != answers[1]["text"]


def test_stops(http: httpx.Client) -> None:
    whole = generate(http, text=TEXT, sampling_params=GREEDY)
    spans = (whole["text"][i : i + 3] for i in range(5, len(whole["text"]) - 3))
    stop = next(span for span in spans if "�" not in span)
    before = whole["text"][: whole["text"].index(stop)]
    cut = generate(http, text=TEXT, sampling_params={**GREEDY, "stop": stop})
    assert cut["text"] == before
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = generate(
        http, text=TEXT, sampling_params={**GREEDY, "stop": [stop], "no_stop_trim": True}
    )
    assert kept["text"] == before + stop
    token = whole["output_ids"][5]
    ended = generate(http, text=TEXT, sampling_params={**GREEDY, "stop_token_ids": [token]})
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert ended["output_ids"] == whole["output_ids"][: whole["output_ids"].index(token) + 1]


def test_log_probabilities(http: httpx.Client) -> None:
    answer = generate(
        http,
        text=TEXT,
        sampling_params=GREEDY,
        return_logprob=True,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    own, top = (answer["meta_info"][f"output_{kind}_logprobs"] for kind in ("token", "top"))
    assert [entry[1] for entry in own] == answer["output_ids"]
    assert [entries[0] for entries in top] == own
    assert all(len(entries) == 2 for entries in top)
    assert own[0][2] == TOKENIZER.token_bytes(own[0][1]).decode("utf-8", "replace")


def test_abort_by_name(http: httpx.Client) -> None:
    answers: list[Any] = []

    def run() -> None:
        sampling = {"max_new_tokens": 490, "ignore_eos": True, "n": 8}
        with httpx.Client(base_url=http.base_url, timeout=60) as own:
            answers.extend(generate(own, text=TEXT, rid="mine", sampling_params=sampling))

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: http.post("/abort_request", json={"rid": "mine"}).json()["aborted"] == 1)
    thread.join()
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} <= {
        "abort",
        "length",
    }
    assert any(answer["meta_info"]["finish_reason"]["type"] == "abort" for answer in answers)
    assert http.post("/abort_request", json={"rid": "mine"}).json()["aborted"] == 0
    assert http.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 0}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_the_name_of_a_batch_aborts_all_of_it(http: httpx.Client, path: str) -> None:
    bodies: dict[str, Any] = {
        "/generate": {
            "text": [TEXT] * 3,
            "rid": "many",
            "sampling_params": {"max_new_tokens": 490, "ignore_eos": True},
        },
        "/v1/completions": {
            "prompt": [TEXT] * 3,
            "request_id": "many",
            "max_tokens": 490,
            "ignore_eos": True,
        },
    }
    with http.stream("POST", path, json={**bodies[path], "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert http.post("/abort_request", json={"rid": "many"}).json() == {"aborted": 3}
        assert sum("abort" in line for line in lines) == 3


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    one = http.post("/tokenize", json={"prompt": TEXT}).json()
    assert one == {
        "tokens": TOKENIZER.encode(TEXT),
        "count": len(TOKENIZER.encode(TEXT)),
        "max_model_len": CONTEXT_LENGTH,
    }
    bare = http.post("/tokenize", json={"prompt": [TEXT], "add_special_tokens": False}).json()
    assert bare["tokens"] == [TOKENIZER.encode(TEXT, False)]
    assert http.post("/detokenize", json={"tokens": one["tokens"]}).json() == {"text": TEXT}
    special = {"tokens": [one["tokens"]], "skip_special_tokens": False}
    assert http.post("/detokenize", json=special).json() == {"text": ["<s>" + TEXT]}


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
def test_model_info(http: httpx.Client, path: str) -> None:
    info = http.get(path).json()
    assert info["is_generation"] is True
    assert info["vocab_size"] == VOCAB_SIZE
    assert info["context_length"] == CONTEXT_LENGTH
    assert info["has_chat_template"] is True


@pytest.mark.parametrize("path", ["/get_server_info", "/server_info"])
def test_server_info(http: httpx.Client, path: str) -> None:
    info = http.get(path).json()
    assert info["speculative_algorithm"] == "NGRAM"
    assert info["max_total_num_tokens"] == 8192
    [verifier] = info["verifiers"].values()
    assert verifier["draft_available"] is True
    assert 0 < time.time() - verifier["drafting_since"] < 3600


def test_health(http: httpx.Client) -> None:
    assert http.get("/health").json() == {
        "status": "ok",
        "draft_available": True,
        "verifiers": {"usable": 1, "known": 1},
    }
    assert http.get("/health_generate").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/", "/nothing"])
def test_head_is_get_without_a_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert head.status_code == get.status_code
    assert head.headers["content-type"] == get.headers["content-type"]
    assert head.content == b""
    assert http.head("/generate").status_code == 405
    assert http.get("/health").json()["status"] == "ok"  # the connection is in order


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/generate"), ("GET", "/flush_cache"), ("POST", "/abort_request")],
)
def test_pages_of_other_sites_cannot_use_it(http: httpx.Client, method: str, path: str) -> None:
    for site, status in (("cross-site", 403), ("same-origin", 200), ("none", 200)):
        body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
        if path != "/generate":
            body = {"abort_all": True}
        answer = http.request(method, path, json=body, headers={"sec-fetch-site": site})
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["code"] == "cross_site"
    assert http.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_metrics(http: httpx.Client) -> None:
    def value(line: str) -> float:
        return metric(http.get("/metrics").text, line)

    names = {
        'foredraft_gateway_requests_total{outcome="length"}': 1,
        "foredraft_gateway_output_tokens_total": 12,
        "foredraft_gateway_prompt_tokens_total": 3,
        "foredraft_gateway_time_to_first_token_seconds_count": 1,
        "foredraft_gateway_inter_token_latency_seconds_count": 11,
        "foredraft_gateway_end_to_end_seconds_count": 1,
    }
    before = {name: value(name) for name in names}
    sampling = {"max_new_tokens": 12, "ignore_eos": True}
    generate(http, input_ids=[5, 6, 7], sampling_params=sampling)
    assert {name: value(name) - before[name] for name in names} == names
    for gauge in ("running", "queued"):
        assert value(f"foredraft_gateway_{gauge}_requests") == 0
    assert value("foredraft_gateway_verifiers") == 1
    assert value("process_open_fds") > 0


def test_answers_are_counted_by_status(http: httpx.Client) -> None:
    def counts() -> dict[int, float]:
        lines = http.get("/metrics").text
        name = "foredraft_gateway_http_answers_total"
        return {
            status: metric(lines, f'{name}{{status="{status}"}}') for status in (200, 400, 404, 405)
        }

    before = counts()
    generate(http, text="x", sampling_params={"max_new_tokens": 1})
    with http.stream("POST", "/generate", json={"text": "x", "stream": True}) as events:
        events.read()
    for path, body in (("/generate", {}), ("/v1/completions", {"prompt": "x", "n": 0})):
        assert http.post(path, json=body).status_code == 400
    assert http.post("/v1/nothing", json={}).status_code == 404
    assert http.post("/health", json={}).status_code == 405
    after = counts()
    found = {status: after[status] - before[status] for status in after}
    assert found == {200: 3, 400: 2, 404: 1, 405: 1}  # one of them is that of /metrics itself


def test_tokenize_a_conversation(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for fields in ({}, {"add_generation_prompt": False}, {"tools": [tool]}):
        found = http.post("/tokenize", json={"messages": messages, **fields}).json()
        asked = {"messages": messages, "max_tokens": 1, "temperature": 0, **fields}
        usage = http.post("/v1/chat/completions", json=asked).json()["usage"]
        assert found["count"] == len(found["tokens"]) == usage["prompt_tokens"], fields
    longer = http.post("/tokenize", json={"messages": messages}).json()["count"]
    shorter = {"messages": messages, "add_generation_prompt": False}
    assert http.post("/tokenize", json=shorter).json()["count"] < longer


def test_ping_and_version(http: httpx.Client) -> None:
    assert http.get("/ping").json() == http.post("/ping").json() == http.get("/health").json()
    assert http.get("/version").json() == {"version": __version__}


def test_no_tokens_at_all(http: httpx.Client) -> None:
    asked = {"prompt": TEXT, "max_tokens": 0, "n": 2, "echo": True}
    found = http.post("/v1/completions", json=asked).json()
    assert [choice["text"] for choice in found["choices"]] == [TEXT, TEXT]
    assert [choice["finish_reason"] for choice in found["choices"]] == ["length", "length"]
    count = http.post("/tokenize", json={"prompt": TEXT}).json()["count"]
    assert found["usage"]["prompt_tokens"] == count
    assert found["usage"]["completion_tokens"] == 0
    streamed = http.post("/v1/completions", json={**asked, "stream": True}).text
    assert streamed.endswith("data: [DONE]\n\n")
    assert streamed.count('"finish_reason":"length"') == 2
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 0}
    found = http.post("/v1/chat/completions", json=chat).json()
    assert found["choices"][0]["message"]["content"] == ""
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 0
    native = {"text": TEXT, "sampling_params": {"max_new_tokens": 0}}
    answer = http.post("/generate", json=native).json()
    assert answer["text"] == ""
    assert answer["meta_info"]["prompt_tokens"] == count
