"""Chat templates of Hugging Face tokenizers: Jinja in a sandbox, bounded in output, repetition and
time.
"""

import datetime
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.exceptions import SecurityError

from foredraft.errors import CheckpointError, ConfigError, InvalidRequest

MAX_SECONDS = 2.0
MAX_CHARACTERS = 16 * 2**20

# Variables that transformers always passes, so templates may test whether they are none.
_ABSENT: Mapping[str, Any] = {"tools": None, "documents": None}
# Roles of OpenAI's API; templates may know further ones.
ROLES = ("system", "developer", "user", "assistant", "tool")
# Stands at the end of a message that is to be continued, to find it in the text.
_CUT = "\ue000\ue0cd\ue000"


def read_template(path: str) -> str | None:
    """Returns the Jinja source of --chat-template; None without the flag.

    Raises:
        ConfigError: It cannot be read, or is no template.
    """
    if not path:
        return None
    try:
        source = Path(path).read_text(encoding="utf-8")
        ChatTemplate(source, {})
    except OSError as error:
        raise ConfigError(f"--chat-template {path}: {error.strerror}") from None
    except (ValueError, CheckpointError) as error:
        raise ConfigError(f"--chat-template {path}: {error}") from None
    return source


class ChatTemplate:
    """Renders conversations by a compiled template.

    Args:
        source: Jinja text.
        variables: Values that every rendering sees, such as bos_token.

    Raises:
        CheckpointError: The template does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self._variables = dict(variables)
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error

    def check_roles(self, roles: Iterable[str], field: str = "messages") -> None:
        """Raises InvalidRequest for the first role that is none of `ROLES` and not named here.

        A template that is not made for a role leaves the message out, or has the model read what it
        has never seen.
        """
        for i, role in enumerate(roles):
            if role in ROLES or f"'{role}'" in self.source or f'"{role}"' in self.source:
                continue
            known = ", ".join(map(repr, ROLES[:-1]))
            raise InvalidRequest(
                f"{field}.{i}.role",
                f"must be {known} or {ROLES[-1]!r}; the model's chat template does not know"
                f" {role[:40]!r}",
            )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Renders a conversation in the format that the model was trained on.

        A developer's messages are the system's to a template that does not know that role: many
        leave out what they do not know.

        Args:
            messages: Oldest first, with `role` and `content`.
            add_generation_prompt: Open the answer.
            continue_final_message: Leave the last message open instead, which is the beginning of
                the answer.
            **variables: Further ones of the template.

        Raises:
            InvalidRequest: The template refuses the messages, or runs over its bounds.
        """
        if "developer" not in self.source:
            messages = [
                {**message, "role": "system"} if message.get("role") == "developer" else message
                for message in messages
            ]
        if not continue_final_message:
            return self._render(messages, add_generation_prompt, variables)
        *earlier, last = messages
        if last.get("role") != "assistant":
            raise InvalidRequest(
                "continue_final_message", "the last message is not one of the assistant"
            )
        opened = {**last, "content": f"{last.get('content') or ''}{_CUT}"}
        text, found, _ = self._render([*earlier, opened], False, variables).rpartition(_CUT)
        if not found:
            raise InvalidRequest(
                "continue_final_message", "the chat template leaves the last message out"
            )
        return text

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        context = {**_ABSENT, **self._variables, **variables}
        deadline = time.monotonic() + MAX_SECONDS
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=add_generation_prompt, **context
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARACTERS or time.monotonic() > deadline:
                    raise InvalidRequest("messages", "rendering the chat template takes too much")
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,  # raised by Jinja's filters for unexpected arguments
            AssertionError,  # likewise
        ) as error:
            raise InvalidRequest("messages", f"the chat template refuses: {error}") from error
        except RecursionError as error:
            raise InvalidRequest("messages", "the chat template nests too deep") from error
        return "".join(pieces)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a limit on repetition of sequences."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed")
        for sequence, count in ((left, right), (right, left)):
            if (
                isinstance(sequence, str | list | tuple)
                and isinstance(count, int)
                and len(sequence) * count > MAX_CHARACTERS
            ):
                raise SecurityError("the repetition is too long")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """Implements `{% generation %}`, which marks an assistant's text, by printing its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Converts to JSON; Jinja's own filter escapes for HTML, which models have not seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
