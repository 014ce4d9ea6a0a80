"""The body of POST /v1/responses."""

from typing import Any, Literal

from pydantic import Field

from foredraft.errors import InvalidRequest
from gateway import remedies
from gateway.bodies import Body, Items, Objects, refuse
from gateway.openai.extensions import ExtendedBody, Loose
from gateway.openai.response_format import JsonSchema, ResponseFormat
from gateway.openai.schemas import ChatBody, Message
from gateway.openai.tools import (
    AllowedChoice,
    AllowedTools,
    Choice,
    Function,
    NamedChoice,
    NamedFunction,
    Tool,
)

LOGPROBS = "message.output_text.logprobs"
# Values of `include` that are always included, or for which there is nothing to include.
_INCLUDED = frozenset({LOGPROBS, "reasoning.encrypted_content"})
_REFUSED = {
    "background": "answers are not made in the background: wait for it, or stream it",
    "background_options": "answers are not made in the background",
    "conversation": (
        "conversations are not kept under names of their own: give previous_response_id"
    ),
    "prompt": "prompt templates are not kept: give input and instructions",
    "context_management": "nothing is compacted: send a shorter input",
    "moderation": "nothing is moderated",
    "max_tool_calls": "there are no built-in tools; parallel_tool_calls: false allows one call",
    "image": "only text can be honoured",
    "access_programs": "there are no such programs",
}
MAX_METADATA = 16


class ContentPart(Loose):
    """A part of a message, or of what a function gave."""

    type: str
    text: str | None = None
    refusal: str | None = None
    # Fields of an answer's parts beside their text.
    annotations: Items[Any] | None = None
    logprobs: Items[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class Item(Loose):
    """A message, a call, its result, or reasoning. Which fields count depends on `type`."""

    type: str | None = None
    role: str | None = None
    content: str | Objects[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Objects[ContentPart] | None = None
    summary: Objects[ContentPart] | None = None
    # An item that came in an answer has these; they change nothing.
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    encrypted_content: str | None = None


class FunctionTool(Loose):
    """A tool; functions are the only kind."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def converted(self, where: str) -> Tool:
        """Converts the object to chat completions' form."""
        if self.type != "function":
            raise InvalidRequest(
                f"{where}.type", f"only functions are taken, not {self.type[:40]!r}"
            )
        self.refuse_others(where)
        if self.name is None:
            raise InvalidRequest(f"{where}.name", "Field required")
        function = Function(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )
        return Tool(type="function", function=function)


class ToolReference(Loose):
    """A tool that may be called."""

    type: str
    name: str | None = None

    def converted(self, where: str) -> NamedChoice:
        """Converts the object to chat completions' form."""
        if self.type != "function":
            raise InvalidRequest(
                f"{where}.type", f"only functions can be named, not {self.type[:40]!r}"
            )
        if self.name is None:
            raise InvalidRequest(f"{where}.name", "Field required")
        return NamedChoice(type="function", function=NamedFunction(name=self.name))


class ToolChoice(ToolReference):
    """A function that has to be called, or those that may be."""

    mode: Literal["auto", "required"] | None = None
    tools: Objects[ToolReference] | None = None

    def converted_choice(self) -> Choice:
        """Converts the object to chat completions' form."""
        if self.type != "allowed_tools":
            return self.converted("tool_choice")
        tools = [
            tool.converted(f"tool_choice.tools.{i}") for i, tool in enumerate(self.tools or ())
        ]
        allowed = AllowedTools(mode=self.mode or "auto", tools=tools)
        return AllowedChoice(type="allowed_tools", allowed_tools=allowed)


class TextFormat(Body):
    """The form that the text must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def converted(self) -> ResponseFormat:
        """Converts the object to chat completions' form."""
        if self.type != "json_schema":
            if self.schema_ is not None:
                raise InvalidRequest("text.format.schema", "needs type: json_schema")
            return ResponseFormat(type=self.type)
        if self.schema_ is None:
            raise InvalidRequest("text.format.schema", "give a schema")
        schema = JsonSchema.model_validate({"name": self.name or "", "schema": self.schema_})
        return ResponseFormat(type="json_schema", json_schema=schema)


class TextConfig(Body):
    """Settings of the text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body):
    """Settings of the model's reasoning."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class StreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: bool | None = None


class CountBody(ExtendedBody):
    """POST /v1/responses/input_tokens."""

    remedies = remedies.RESPONSES

    model: str = ""
    input: str | Objects[Item]
    instructions: str | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Objects[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Refused where they ask for something.
    conversation: Any = None

    def check(self) -> None:
        """Raises InvalidRequest for a field that cannot be honoured."""
        refuse(vars(self), _REFUSED)
        if self.truncation == "auto":
            raise InvalidRequest("truncation", "nothing is left out: send a shorter input")

    def chat(self, messages: list[Message], **fields: Any) -> ChatBody:
        """Converts the body to one of chat completions."""
        choice = self.tool_choice
        text = self.text or TextConfig()
        return ChatBody(
            model=self.model,
            messages=messages,
            response_format=None if text.format is None else text.format.converted(),
            verbosity=text.verbosity,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            tools=[tool.converted(f"tools.{i}") for i, tool in enumerate(self.tools or ())],
            tool_choice=choice.converted_choice() if isinstance(choice, ToolChoice) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
            **fields,
            **self.extensions(),
        )

    @property
    def _has_format(self) -> bool:
        """Whether the text has to be JSON."""
        form = None if self.text is None else self.text.format
        return form is not None and form.type != "text"

    def field(self, name: str) -> str:
        """Returns this body's name of a chat completions field."""
        if name.startswith("tools."):
            return name.replace(".function.", ".")
        names = {
            "prompt": "input",
            "messages": "input",
            "max_new_tokens": "max_output_tokens",
            "max_completion_tokens": "max_output_tokens",
            "min_new_tokens": "min_tokens",
            "logprobs": "top_logprobs",
            "grammar": "text.format.schema" if self._has_format else "tools",
            "response_format": "text.format",
            "verbosity": "text.verbosity",
            "reasoning_effort": "reasoning.effort",
        }
        return names.get(name, name)


class ResponsesBody(CountBody):
    """POST /v1/responses."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    include: Items[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # These cannot change the text.
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    client_metadata: dict[str, Any] | None = None
    # Refused where they ask for something.
    background: bool | None = None
    background_options: dict[str, Any] | None = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    max_tool_calls: int | None = None
    image: Any = None
    access_programs: Any = None
    # Extensions.
    top_k: int | None = None
    stop: str | Items[str] | None = None

    def check(self) -> None:
        """Raises InvalidRequest for a field that cannot be honoured."""
        super().check()
        for name in self.include or ():
            if name not in _INCLUDED:
                raise InvalidRequest("include", f"{name[:60]!r} is nothing that answers here have")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "needs stream: true")
        metadata = self.metadata or {}
        if len(metadata) > MAX_METADATA or any(
            len(key) > 64 or len(value) > 512 for key, value in metadata.items()
        ):
            raise InvalidRequest(
                "metadata", f"has at most {MAX_METADATA} keys of 64 characters with values of 512"
            )

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the text are requested."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    def chat(self, messages: list[Message], **fields: Any) -> ChatBody:
        """Converts the body to one of chat completions."""
        return super().chat(
            messages,
            max_completion_tokens=self.max_output_tokens,
            stop=self.stop,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            **fields,
        )
