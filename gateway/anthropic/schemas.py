"""Bodies of POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any, Literal

from pydantic import Field

from foredraft.errors import InvalidRequest
from gateway import remedies
from gateway.bodies import Body, Items, Objects, refuse
from gateway.errors import UnsupportedThread
from gateway.openai.extensions import ExtendedBody, Loose
from gateway.openai.reasoning import switch_variables
from gateway.openai.response_format import JsonSchema, ResponseFormat
from gateway.openai.schemas import ChatBody, Message
from gateway.openai.tools import Choice, Function, NamedChoice, NamedFunction, Tool

_REFUSED = {
    "container": "there are no containers",
    "mcp_servers": "servers of tools are not asked from here: give their tools",
    "diagnostics": "there are no diagnostics",
    "inference_geo": "the server is where it is",
}
_TOOLS_REFUSED = {
    "defer_loading": "all tools are told at once",
    "input_examples": "put examples into the description",
    "allowed_callers": "only the model calls tools: leave it out",
}


class InnerBlock(Loose):
    """A block of a tool's result or of the system's text."""

    type: str
    text: str | None = None
    # These change nothing: prefixes are found by their tokens.
    cache_control: dict[str, Any] | None = None
    citations: Items[Any] | None = None


class Block(InnerBlock):
    """A block of a message; which fields count depends on `type`."""

    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    caller: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Objects[InnerBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None


class InputMessage(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Objects[Block]


class ToolParam(Loose):
    """A tool; the client's own are the only kind."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    # Arguments come as they grow in any case.
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: dict[str, Any] | None = None

    def converted(self, where: str) -> Tool:
        """Converts the object to chat completions' form."""
        if self.type not in (None, "custom"):
            raise InvalidRequest(
                f"{where}.type", f"only the client's own tools are taken, not {self.type[:40]!r}"
            )
        for name, reason in _TOOLS_REFUSED.items():
            if (self.model_extra or {}).pop(name, None) not in (None, False, [], ["direct"]):
                raise InvalidRequest(f"{where}.{name}", reason)
        self.refuse_others(where)
        if self.name is None:
            raise InvalidRequest(f"{where}.name", "Field required")
        if self.input_schema is None:
            raise InvalidRequest(f"{where}.input_schema", "Field required")
        function = Function(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )
        return Tool(type="function", function=function)


class ToolChoice(Body):
    """The choice of tools that may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def converted(self) -> Choice:
        """Converts the object to chat completions' form."""
        if self.type != "tool":
            if self.name is not None:
                raise InvalidRequest("tool_choice.name", "needs type: tool")
            return "required" if self.type == "any" else self.type
        if self.name is None:
            raise InvalidRequest("tool_choice.name", "Field required")
        return NamedChoice(type="function", function=NamedFunction(name=self.name))


class OutputFormat(Body):
    """The form that the text must have."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    def converted(self) -> ResponseFormat:
        """Converts the object to chat completions' form."""
        schema = JsonSchema.model_validate({"name": "output", "schema": self.schema_})
        return ResponseFormat(type="json_schema", json_schema=schema)


class OutputConfig(Body):
    """Settings of the answer."""

    format: OutputFormat | None = None
    effort: str | None = None


class Thinking(Body):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class ContextEdit(Loose):
    """A change to the conversation before it is read; only one that clears nothing is taken."""

    type: str
    keep: str | dict[str, Any] | None = None


class ContextManagement(Body):
    """Changes to the conversation before it is read."""

    edits: Objects[ContextEdit] | None = None

    def check(self) -> None:
        """Raises InvalidRequest for a change that would clear something."""
        for i, edit in enumerate(self.edits or ()):
            where = f"context_management.edits.{i}"
            keeps_all = edit.keep in ("all", {"type": "all"})
            if edit.type != "clear_thinking_20251015" or not keeps_all:
                raise InvalidRequest(
                    where, "nothing is cleared or compacted: send a shorter conversation"
                )
            edit.refuse_others(where)


class Metadata(Body):
    """About the request; changes nothing."""

    user_id: str | None = None


class CountBody(ExtendedBody):
    """POST /v1/messages/count_tokens."""

    remedies = remedies.MESSAGES

    model: str = ""
    messages: Objects[InputMessage]
    system: str | Objects[InnerBlock] | None = None
    tools: Objects[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # These change nothing.
    cache_control: dict[str, Any] | None = None
    speed: Literal["standard"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # Refused where it would clear something.
    context_management: ContextManagement | None = None
    # Refused where they ask for something.
    container: Any = None
    mcp_servers: Any = None
    diagnostics: Any = None
    inference_geo: str | None = None

    def check(self, can_think: bool) -> None:
        """Raises InvalidRequest for a field that cannot be honoured.

        Args:
            can_think: Whether the server separates reasoning.
        """
        refuse(vars(self), _REFUSED)
        if self.context_management is not None:
            self.context_management.check()
        if self.thinking is not None and self.thinking.type == "enabled" and not can_think:
            raise InvalidRequest(
                "thinking.type", "needs a server with --reasoning-parser; leave thinking out"
            )

    def chat(self, messages: list[Message], **fields: Any) -> ChatBody:
        """Converts the body to one of chat completions."""
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        extensions = self.extensions()
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            variables = switch_variables(self.thinking.type == "enabled")
            given = extensions.get("chat_template_kwargs", {})
            extensions["chat_template_kwargs"] = variables | given
        is_single = choice is not None and choice.disable_parallel_tool_use
        return ChatBody(
            model=self.model,
            messages=messages,
            # An assistant's message at the end is the beginning of the answer.
            continue_final_message=messages[-1:] != [] and messages[-1].role == "assistant",
            response_format=None if config.format is None else config.format.converted(),
            reasoning_effort=config.effort,
            tools=[tool.converted(f"tools.{i}") for i, tool in enumerate(self.tools or ())],
            tool_choice=None if choice is None else choice.converted(),
            parallel_tool_calls=False if is_single else None,
            **fields,
            **extensions,
        )

    def field(self, name: str) -> str:
        """Returns this body's name of a chat completions field."""
        if name.startswith("tools."):
            return name.replace(".function.parameters", ".input_schema").replace(".function.", ".")
        config = self.output_config
        has_format = config is not None and config.format is not None
        names = {
            "prompt": "messages",
            "max_new_tokens": "max_tokens",
            "max_completion_tokens": "max_tokens",
            "min_new_tokens": "min_tokens",
            "stop": "stop_sequences",
            "grammar": "output_config.format.schema" if has_format else "tools",
            "response_format": "output_config.format",
            "reasoning_effort": "output_config.effort",
        }
        return names.get(name, name)


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    thread: dict[str, Any] | None = None

    def check(self, can_think: bool) -> None:
        """Raises InvalidRequest for a field that cannot be honoured."""
        super().check(can_think)
        if self.thread is not None:
            raise UnsupportedThread("thread", "conversations are not kept: send all messages")
