"""Reasoning in answers: set apart in every API, streamed and not, whatever the model's way to write
it.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from foredraft.api.verify.v1 import verify_pb2
from foredraft.errors import InvalidRequest
from foredraft.text.tokenizer import Tokenizer
from gateway.openai.answer_parser import AnswerFormat, AnswerParser
from gateway.openai.pieces import Piece
from gateway.openai.reasoning import ReasoningStyle, begun, effort_variables
from gateway.openai.tools import Convention
from testing import stack as stacks
from testing import tiny_tokenizers
from testing.scripted_verifier import Conversation, ScriptedVerifier, Submit, serving

QWEN3, R1, GPT_OSS = ReasoningStyle.QWEN3, ReasoningStyle.DEEPSEEK_R1, ReasoningStyle.GPT_OSS
HERMES = Convention.HERMES
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = [("f", '{"a": 1}')]
HARMONY = "<|channel|>analysis<|message|>Let me\nsee.<|end|><|start|>assistant<|channel|>{rest}"
HARMONY_CALL = 'commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
# Style, whether the prompt opens reasoning, convention, text, reasoning, content, calls.
CASES: list[tuple[Any, Any, Any, str, str, str, list[tuple[str, str]]]] = [
    (QWEN3, None, None, "<think>\nLet me\nsee.\n</think>\n\nIt is 4.\n", "Let me\nsee.", "It is 4.\n", []),  # noqa: E501
    (QWEN3, None, None, "It is <think>4</think>.", "", "It is <think>4</think>.", []),
    (QWEN3, None, None, "\n<think></think>\n4", "", "4", []),
    (QWEN3, None, None, "<think>only thoughts </thin", "only thoughts </thin", "", []),
    (QWEN3, None, None, "<thi", "", "<thi", []),
    (QWEN3, None, None, "", "", "", []),
    (QWEN3, True, None, "Let me see.\n</think>\n\n4", "Let me see.", "4", []),
    (QWEN3, False, None, "\n<think>4", "", "\n<think>4", []),
    (QWEN3, None, HERMES, f"<think>\nf <tool_call>?\n</think>\n\n{CALL}", "f <tool_call>?", "", F),
    (QWEN3, None, HERMES, f"<think>a</think>So: {CALL}", "a", "So: ", F),
    (R1, True, None, "Let me see.\n</think>\n\n4", "Let me see.", "4", []),
    (R1, True, None, "<think>\nLet me see.</think>4", "Let me see.", "4", []),
    (R1, True, None, "never ends", "never ends", "", []),
    (GPT_OSS, None, None, HARMONY.format(rest="final<|message|>It is 4."), "Let me\nsee.", "It is 4.", []),  # noqa: E501
    (GPT_OSS, None, None, "<|channel|>final<|message|>4 < 5<|", "", "4 < 5<|", []),
    (GPT_OSS, None, None, "no channels <|x|>", "", "no channels <|x|>", []),
    (GPT_OSS, None, None, "<|channel|>analysis<|message|>cut", "cut", "", []),
    (GPT_OSS, None, None, "<|channel|>ana", "", "", []),
    (GPT_OSS, None, HERMES, HARMONY.format(rest=HARMONY_CALL), "Let me\nsee.", "", F),
    (GPT_OSS, None, HERMES, HARMONY.format(rest="commentary<|message|>I call.<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{\"a\": 1}"), "Let me\nsee.", "I call.", F),  # noqa: E501
    (GPT_OSS, None, None, HARMONY.format(rest=HARMONY_CALL), "Let me\nsee.", '{"a": 1}', []),
]  # fmt: skip


def joined(pieces: list[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append((piece.name, ""))
        elif piece.arguments:
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    reasoning = "".join(piece.reasoning for piece in pieces)
    return reasoning, "".join(piece.text for piece in pieces), calls


@pytest.mark.parametrize(("style", "is_open", "convention", "text", *"rcf"), CASES)
def test_any_cutting_gives_the_same(
    style: Any, is_open: Any, convention: Any, text: str, r: str, c: str, f: Any
) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        parser = AnswerParser(AnswerFormat(convention, style, is_open))
        pieces, rest = [], text
        while rest:
            size = rng.randint(1, 1 if seed == 0 else 12)
            pieces += parser.feed(rest[:size])
            rest = rest[size:]
        assert joined(pieces + parser.flush()) == (r, c, f)


def test_nothing_certain_is_held_back() -> None:
    parser = AnswerParser(AnswerFormat(None, QWEN3, None))
    said = [
        joined(parser.feed(text))[:2]
        for text in ("<think>", "\na", "b\n", "c</thi", "nk>", "\n", "d")
    ]
    assert said == [("", ""), ("a", ""), ("b", ""), ("\nc", ""), ("", ""), ("", ""), ("", "d")]


def test_effort_goes_where_the_template_takes_it() -> None:
    assert effort_variables("{{ reasoning_effort }}", "high") == {"reasoning_effort": "high"}
    assert effort_variables("{% if enable_thinking %}", "none") == {"enable_thinking": False}
    assert effort_variables("{% if enable_thinking %}", "low") == {"enable_thinking": True}
    assert effort_variables("{% if thinking %}", "none") == {"thinking": False}
    with pytest.raises(InvalidRequest, match="no such setting"):
        effort_variables("{{ messages }} anything_thinking", "low")


def test_where_a_begun_answer_is() -> None:
    assert begun("<think>so")
    assert not begun("<think>so</think>it")
    assert not begun("it")


SPECIAL = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"]
THINKING = (
    "{% for message in messages %}{{ message.role }}: {{ message.reasoning_content or '' }}{{"
    " message.content }}\n{% endfor %}{{ '<tool_call>' if tools else '' }}assistant: {% if"
    " enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
TEXTS = {
    QWEN3: "<think>\nLet me see.\n</think>\n\nIt is 4.",
    R1: "Let me see.\n</think>\n\nIt is 4.",
    GPT_OSS: (
        "<|channel|>analysis<|message|>Let me"
        " see.<|end|><|start|>assistant<|channel|>final<|message|>It is 4."
    ),
}
SAID = ("Let me see.", "It is 4.")
USER: Any = [{"role": "user", "content": "2+2?"}]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@dataclass(frozen=True, slots=True)
class Rig:
    """A gateway whose verifier answers with a given text."""

    verifier: ScriptedVerifier
    tokenizer: Tokenizer
    style: ReasoningStyle
    url: str

    def say(self, text: str) -> int:
        """Sets the text that answers every request; returns the number of its tokens."""
        tokens = self.tokenizer.encode(text, False)

        async def script(talk: Conversation, submit: Submit) -> None:
            for token in tokens:
                await talk.say(submit.id, [token])
            stop = verify_pb2.FINISH_REASON_STOP
            await talk.say(submit.id, reason=stop, prompt_tokens=2, completion_tokens=len(tokens))

        self.verifier.script = script
        return len(tokens)

    @property
    def prompt(self) -> str:
        """Returns the prompt of the last request."""
        return self.tokenizer.decode(self.verifier.submitted[-1].prompt, False)


@pytest.fixture(scope="module", params=list(ReasoningStyle), ids=str)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("reasoning") / "model"
    backend = tiny_tokenizers.byte_level()
    backend.add_special_tokens(SPECIAL)
    tiny_tokenizers.save(backend, directory, THINKING)
    tokenizer = Tokenizer.from_dir(directory)
    verifier = ScriptedVerifier(directory, tokenizer.vocab_size)
    address = f"unix:{tmp_path_factory.mktemp('socket')}/v.sock"
    style: ReasoningStyle = request.param
    with (
        serving(verifier, address),
        stacks.running_gateway(address, reasoning_parser=style.value) as (url, _),
    ):
        with httpx.Client(base_url=url, timeout=60) as web:
            stacks.eventually(lambda: web.get("/health").status_code == 200)
        yield Rig(verifier, tokenizer, style, url)


@pytest.fixture
def client(rig: Rig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=rig.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(rig: Rig) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=rig.url, api_key="none", max_retries=0) as client:
        yield client


def test_chat_completions(rig: Rig, client: openai.OpenAI) -> None:
    number = rig.say(TEXTS[rig.style])
    answer = client.chat.completions.create(model="scripted", messages=USER)
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.content) == SAID
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    reasoned = answer.usage.completion_tokens_details.reasoning_tokens
    assert reasoned is not None
    assert 0 < reasoned < number

    def num_pieces_of_reasoning() -> int:
        stream = client.chat.completions.create(
            model="scripted", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        reasoning, content = [], []
        for chunk in stream:
            for choice in chunk.choices:
                delta: Any = choice.delta
                # The text begins after the reasoning's end.
                reasoning.append(getattr(delta, "reasoning_content", None) or "")
                assert not ("".join(content) and reasoning[-1])
                content.append(delta.content or "")
        assert ("".join(reasoning), "".join(content)) == SAID
        assert chunk.usage is not None
        assert chunk.usage == answer.usage
        return sum(map(bool, reasoning))

    # A busy gateway joins what comes together.
    stacks.eventually(lambda: num_pieces_of_reasoning() > 2)


def test_reasoning_may_stay_in_the_text(rig: Rig, client: openai.OpenAI) -> None:
    rig.say(TEXTS[rig.style])
    answer = client.chat.completions.create(
        model="scripted", messages=USER, extra_body={"separate_reasoning": False}
    )
    message = answer.choices[0].message
    assert not hasattr(message, "reasoning_content")
    assert message.content == rig.tokenizer.decode(rig.tokenizer.encode(TEXTS[rig.style], False))


def test_responses(rig: Rig, client: openai.OpenAI) -> None:
    number = rig.say(TEXTS[rig.style])
    answer = client.responses.create(model="scripted", input="2+2?")
    reasoning, message = answer.output
    assert reasoning.type == "reasoning"
    assert message.type == "message"
    assert reasoning.content is not None
    assert (reasoning.content[0].text, answer.output_text) == SAID
    assert answer.usage is not None
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < number
    events = [
        EVENT.validate_python(event.to_dict())
        for event in client.responses.create(model="scripted", input="2+2?", stream=True)
    ]
    for kind, text in zip(("reasoning", "output"), SAID, strict=True):
        deltas = [e.delta for e in events if e.type == f"response.{kind}_text.delta"]
        assert "".join(deltas) == text
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    # It goes back to the template, by hand and by id.
    said: Any = [{"role": "user", "content": "2+2?"}, *answer.output, *USER]
    client.responses.create(model="scripted", input=said)
    by_hand = rig.prompt
    client.responses.create(model="scripted", input=USER, previous_response_id=answer.id)
    assert rig.prompt == by_hand
    assert "assistant: Let me see.It is 4." in by_hand


def test_messages(rig: Rig, claude: anthropic.Anthropic) -> None:
    rig.say(TEXTS[rig.style])
    asked: Any = {"model": "scripted", "max_tokens": 100, "messages": USER}
    answer = claude.messages.create(**asked)
    thinking, text = answer.content
    assert thinking.type == "thinking"
    assert text.type == "text"
    assert (thinking.thinking, text.text) == SAID
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [
        block.to_dict() for block in answer.content
    ]
    said = [*USER, {"role": "assistant", "content": answer.content}, *USER]
    claude.messages.create(**{**asked, "messages": said})
    assert "assistant: Let me see.It is 4." in rig.prompt


def test_reasoning_can_be_switched_off(
    rig: Rig, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    """The template closes reasoning in the prompt; what the model says then is its answer."""
    if rig.style is GPT_OSS:
        pytest.skip("its templates have no switch")
    rig.say("It is 4.")
    off: Any
    for off in (
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        message: Any = (
            client.chat.completions.create(model="scripted", messages=USER, **off)
            .choices[0]
            .message
        )
        assert "</think>" in rig.prompt
        assert message.content == "It is 4."
        assert not hasattr(message, "reasoning_content")
    response = client.responses.create(model="scripted", input="2+2?", reasoning={"effort": "none"})
    assert [item.type for item in response.output] == ["message"]
    asked: Any = {"model": "scripted", "max_tokens": 100, "messages": USER}
    answer = claude.messages.create(**asked, thinking={"type": "disabled"})
    assert [block.type for block in answer.content] == ["text"]
    claude.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
    assert "</think>" not in rig.prompt


def test_calls_after_reasoning(rig: Rig, client: openai.OpenAI) -> None:
    text = TEXTS[rig.style].replace("It is 4.", CALL)
    if rig.style is GPT_OSS:
        text = HARMONY.replace("\n", " ").format(rest=HARMONY_CALL)
    rig.say(text)
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    message: Any = (
        client.chat.completions.create(model="scripted", messages=USER, tools=tools)
        .choices[0]
        .message
    )
    assert message.reasoning_content == "Let me see."
    assert message.tool_calls[0].function.arguments == '{"a": 1}'
    grammar = rig.verifier.submitted[-1].sampling.grammar
    forced: Any = {"messages": USER, "tools": tools, "tool_choice": "required"}
    if rig.style is GPT_OSS:
        # Its calls are held to a grammar where one has to come.
        assert not grammar.ByteSize()
        answer = client.chat.completions.create(model="scripted", **forced)
        assert answer.choices[0].finish_reason == "tool_calls"
        assert "to=functions.f" in rig.verifier.submitted[-1].sampling.grammar.ebnf
        return
    # Free text may be reasoning, too, unless its end is still to come.
    assert ('"reasoning"' in grammar.structural_tag) == (rig.style is R1)
    client.chat.completions.create(model="scripted", **forced)
    assert '"reasoning"' in rig.verifier.submitted[-1].sampling.grammar.structural_tag


def test_calls_or_a_schema_after_reasoning(rig: Rig, client: openai.OpenAI) -> None:
    text = '{"a": "<tool_call>"}'
    rig.say(TEXTS[rig.style].replace("It is 4.", text))
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    asked: Any = {"model": "scripted", "messages": USER, "tools": tools, "response_format": form}
    message: Any = client.chat.completions.create(**asked).choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", text)
    assert message.tool_calls is None
    grammar = rig.verifier.submitted[-1].sampling.grammar
    if rig.style is GPT_OSS:
        assert '"final"' in grammar.ebnf
        assert "to=functions.f" in grammar.ebnf
        return
    tags = json.loads(grammar.structural_tag)
    assert tags["answer"] == {"type": "object"}
    assert tags["reasoning"]["is_open"] == (rig.style is R1)
    rig.say(TEXTS[rig.style].replace("It is 4.", CALL))
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.reasoning_content == "Let me see."
    assert message.tool_calls[0].function.arguments == '{"a": 1}'


@pytest.mark.parametrize("kind", ["json", "structural_tag"])
def test_a_schema_that_is_no_json_is_told(rig: Rig, client: openai.OpenAI, kind: str) -> None:
    broken = {"structured_outputs": {kind: "{"}}
    with pytest.raises(openai.BadRequestError, match=rf"structured_outputs\.{kind}: is not valid"):
        client.chat.completions.create(model="scripted", messages=USER, extra_body=broken)


def test_structured_output_comes_after_reasoning(rig: Rig, client: openai.OpenAI) -> None:
    rig.say(TEXTS[rig.style].replace("It is 4.", "4"))
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    asked: Any = {"model": "scripted", "messages": USER}
    answer = client.chat.completions.create(**asked, response_format=form)
    assert answer.choices[0].message.content == "4"
    if rig.style is GPT_OSS:
        assert '"final"' in rig.verifier.submitted[-1].sampling.grammar.ebnf
        regex = {"structured_outputs": {"regex": "4"}}
        with pytest.raises(openai.BadRequestError, match="answers in channels; a JSON") as told:
            client.chat.completions.create(**asked, extra_body=regex)
        assert told.value.param == "structured_outputs"
        return
    tags = json.loads(rig.verifier.submitted[-1].sampling.grammar.structural_tag)
    assert tags["reasoning"] == {
        "begin": "<think>",
        "end": "</think>",
        "is_open": rig.style is R1,
    }
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    client.chat.completions.create(**asked, response_format=form, extra_body=off)
    assert rig.verifier.submitted[-1].sampling.grammar.json_schema
    if rig.style is R1:
        for pattern in ({"structured_outputs": {"regex": "4"}}, {"guided_regex": "4"}):
            with pytest.raises(openai.BadRequestError, match="does not go with reasoning") as told:
                client.chat.completions.create(**asked, extra_body=pattern)
            assert told.value.param == next(iter(pattern))
