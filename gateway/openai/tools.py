"""Tools of a request: their checks, their form in prompts, and the grammar of calls."""

import enum
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

from foredraft.errors import InvalidRequest
from foredraft.types import Grammar, GrammarKind
from gateway.bodies import Body, Items
from gateway.openai.relaxed_schemas import relaxed

MAX_TOOLS = 128
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

_SYSTEM = """\
You can call the functions below. To call one, write a line <tool_call>, then a line with a JSON object that has its \
name and arguments, then a line </tool_call>:
<tool_call>
{"name": "function", "arguments": {"key": "value"}}
</tool_call>
The functions:
"""  # noqa: E501


class Function(Body):
    """A function that the model may call.

    With `strict`, parameters that no grammar can keep to are refused; without, what it cannot say
    of them is left open.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def schema_of_calls(self) -> dict[str, Any]:
        """Returns the JSON schema that the arguments of calls are held to."""
        if not self.parameters:
            return {"type": "object", "additionalProperties": False}
        return self.parameters if self.strict else relaxed(self.parameters)


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The function of a named choice."""

    name: str


class NamedChoice(Body):
    """The function that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """The tools that may be called, among those described to the model."""

    mode: Literal["auto", "required"]
    tools: Items[NamedChoice]


class AllowedChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = str | NamedChoice | AllowedChoice


class Convention(enum.Enum):
    """The notation of calls in a model's text.

    HERMES: `<tool_call>`, a line of JSON with name and arguments, `</tool_call>` (Qwen, Hermes).
    LLAMA: JSON with name and parameters and nothing around it (Llama 3.1 and later). OWN: like
    HERMES, but described in the system message, for templates that know nothing of tools.
    MISTRAL: a list of JSON, or name and arguments, after `[TOOL_CALLS]`. QWEN3_CODER:
    `<function=name>` with a `<parameter=key>` for each argument. HARMONY: a message of its own,
    addressed to the function (gpt-oss).
    """

    HERMES = enum.auto()
    LLAMA = enum.auto()
    OWN = enum.auto()
    MISTRAL = enum.auto()
    QWEN3_CODER = enum.auto()
    HARMONY = enum.auto()


# Conventions by the names of --tool-call-parser.
CONVENTIONS = {
    "hermes": Convention.HERMES,
    "qwen25": Convention.HERMES,
    "llama3": Convention.LLAMA,
    "mistral": Convention.MISTRAL,
    "qwen3_coder": Convention.QWEN3_CODER,
    "gpt-oss": Convention.HARMONY,
}


def convention_of(template: str) -> Convention | None:
    """Returns the convention of a chat template, None where it is unknown."""
    if "tools" not in template and "tool_call" not in template:
        return Convention.OWN
    if "<|channel|>" in template and "<|call|>" in template:
        return Convention.HARMONY
    if "<function=" in template:
        return Convention.QWEN3_CODER if "<parameter=" in template else None
    if "<tool_call>" in template:
        return Convention.HERMES
    if "[TOOL_CALLS]" in template:
        return Convention.MISTRAL
    if '"parameters"' in template and "<|python_tag|>" in template:
        return Convention.LLAMA
    return None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A request's checked use of tools.

    Attributes:
        tools: Tools that the prompt describes.
        callable: Functions that may be called: all, or those that were named.
        is_required: Whether the answer has at least one call, and nothing but calls.
        is_single: Whether the answer has at most one call.
        is_named: Whether a function was named; the answer then ends with `stop`, like OpenAI's.
    """

    tools: Sequence[Tool]
    callable: Sequence[Function]
    is_required: bool
    is_single: bool
    is_named: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions that may be called."""
        return tuple(function.name for function in self.callable)

    def grammar(self, convention: Convention, answer: dict[str, Any] | None = None) -> Grammar:
        """Returns the grammar of text and calls, in the form of the convention.

        Arguments follow their schema.

        Args:
            answer: JSON schema that an answer without calls follows; None leaves its text open.
        """
        is_llama = convention is Convention.LLAMA
        key = "parameters" if is_llama else "arguments"
        before, after = ("", "}") if is_llama else ("<tool_call>\n", "}\n</tool_call>")
        structures = [
            {
                "begin": f'{before}{{"name": "{function.name}", "{key}": ',
                "schema": function.schema_of_calls(),
                "end": after,
            }
            for function in self.callable
        ]
        tags: dict[str, Any] = {
            "structures": structures,
            "triggers": ['{"name": "' if is_llama else "<tool_call>"],
            "at_least_one": self.is_required,
            "stop_after_first": self.is_single,
        }
        if answer is not None:
            tags |= {"at_least_one": True, "answer": answer}
        return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tags, ensure_ascii=False))


def tool_use(
    tools: Sequence[Tool] | None,
    choice: Choice | None,
    parallel: bool | None,
) -> ToolUse | None:
    """Returns the use of tools that a request's fields ask for; None where none may be called.

    Raises:
        InvalidRequest: A field is wrong; the error names it.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "needs tools")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"at most {MAX_TOOLS} tools, not {len(tools)}")
    names = [tool.function.name for tool in tools]
    for i, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"tools.{i}.function.name",
                "must be 1 to 64 letters, digits, underscores and dashes",
            )
        if name in names[:i]:
            raise InvalidRequest(f"tools.{i}.function.name", f"{name!r} is there twice")
        parameters = tools[i].function.parameters
        if parameters and parameters.get("type", "object") != "object":
            raise InvalidRequest(
                f"tools.{i}.function.parameters",
                'must be the schema of an object: {"type": "object", ...}',
            )
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedChoice):
        named = _named(functions, [choice])
        return ToolUse(tools, named, is_required=True, is_single=True, is_named=True)
    if isinstance(choice, AllowedChoice):
        functions = _named(functions, choice.allowed_tools.tools)
        choice = choice.allowed_tools.mode
    if choice == "none":
        return None
    if choice not in (None, "auto", "required"):
        raise InvalidRequest("tool_choice", "must be none, auto or required, or name a function")
    return ToolUse(tools, functions, choice == "required", parallel is False, is_named=False)


def _named(functions: Sequence[Function], choices: Sequence[NamedChoice]) -> list[Function]:
    by_name = {function.name: function for function in functions}
    wanted = list(dict.fromkeys(choice.function.name for choice in choices))
    if not wanted:
        raise InvalidRequest("tool_choice", "allows no tool; none is the choice for that")
    for name in wanted:
        if name not in by_name:
            raise InvalidRequest("tool_choice", f"there is no function {name!r} in tools")
    return [by_name[name] for name in wanted]


def told(
    messages: Sequence[dict[str, Any]], use: ToolUse | None, convention: Convention | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns messages in the form that the template expects, and variables for the template.

    Calls and their results are converted, too.

    Raises:
        InvalidRequest: A call in a message has another form than OpenAI's, or the template's
            convention is unknown.
    """
    if use is not None and convention is None:
        raise InvalidRequest(
            "tools",
            "the chat template writes calls in a way that is not known; where it is one of"
            " --tool-call-parser's, the server has to be started with that",
        )
    parsed = [
        {**message, **_calls(message, f"messages.{i}.tool_calls")}
        for i, message in enumerate(messages)
    ]
    if convention is Convention.MISTRAL:
        parsed = [_with_short_ids(message) for message in parsed]
    listed = [] if use is None else [tool.model_dump(exclude_none=True) for tool in use.tools]
    if convention is Convention.HARMONY:
        parsed = [_with_thinking(message) for message in parsed]
    if convention is not Convention.OWN:
        return parsed, {"tools": listed} if listed else {}
    plain = [_plain(message) for message in parsed]
    if listed:
        text = _SYSTEM + "\n".join(json.dumps(tool["function"]) for tool in listed)
        if plain and plain[0]["role"] in ("system", "developer"):
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain, {}


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Renames a message's reasoning for gpt-oss's template, which takes it only with calls."""
    reasoning = message.get("reasoning_content")
    if reasoning and message.get("tool_calls") and not message["content"]:
        return {**message, "thinking": reasoning}
    return message


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Replaces call ids by nine letters and digits, the only form Mistral's templates take."""

    def short(given: Any) -> str:
        text = str(given)
        if _SHORT_ID.fullmatch(text):
            return text
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    found = dict(message)
    if found.get("tool_call_id") is not None:
        found["tool_call_id"] = short(found["tool_call_id"])
    if found.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "id": short(call.get("id", ""))} for call in found["tool_calls"]
        ]
    return found


def _calls(message: dict[str, Any], field: str) -> dict[str, Any]:
    """Returns a message's calls, with arguments in the form that templates expect."""
    calls = message.get("tool_calls")
    if not calls:
        return {}
    try:
        return {
            "tool_calls": [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "name": str(call["function"]["name"]),
                        "arguments": _arguments(call["function"].get("arguments")),
                    },
                }
                for call in calls
            ]
        }
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
        raise InvalidRequest(
            field, "must be a list of calls, each with its function's name and arguments"
        ) from None


def _arguments(given: Any) -> dict[str, Any] | str:
    """Returns a call's arguments as an object, which templates expect.

    Text that is no JSON object, was cut short, or has half a character is returned unchanged.
    """
    if given is None or isinstance(given, dict):
        return given or {}
    if not isinstance(given, str):
        raise TypeError("not an object")
    try:
        value = from_json(given or "{}")
    except ValueError:
        return given
    return value if isinstance(value, dict) else given


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Converts a message for a template without tools: calls and results become text."""
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        written = json.dumps({"name": function["name"], "arguments": function["arguments"]})
        content += ("\n" if content else "") + f"<tool_call>\n{written}\n</tool_call>"
    return {**message, "content": content}
