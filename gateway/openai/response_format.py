"""Converts response_format and vLLM's and SGLang's fields to grammars of the answer."""

import json
import re
from typing import Any, Literal

from pydantic import Field
from pydantic_core import from_json

from foredraft.errors import InvalidRequest
from foredraft.types import Grammar, GrammarKind
from gateway.bodies import Body, Items, Objects


class JsonSchema(Body):
    """A schema with its name.

    It is kept to whether `strict` is asked for or not; name and description change nothing.
    """

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Plain text, any JSON object, JSON of a schema, or SGLang's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Objects[dict[str, Any]] | None = None
    triggers: Items[str] | None = None

    def grammar(self) -> Grammar | None:
        """Returns the grammar that the text must follow.

        Raises:
            InvalidRequest: What the type needs is missing, or what another needs is given.
        """
        for name in ("json_schema", "structures", "triggers"):
            kind = "json_schema" if name == "json_schema" else "structural_tag"
            if getattr(self, name) is not None and self.type != kind:
                raise InvalidRequest(f"response_format.{name}", f"needs type: {kind}")
        if self.type == "structural_tag":
            if self.structures is None:
                raise InvalidRequest("response_format.structures", "give a list of structures")
            tags = {"structures": self.structures, "triggers": self.triggers}
            return _grammar("structural_tag", tags, "response_format")
        if self.type != "json_schema":
            return ANY_OBJECT if self.type == "json_object" else None
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise InvalidRequest("response_format.json_schema.schema", "give a schema")
        return schema_grammar(self.json_schema.schema_)


class StructuredOutputs(Body):
    """vLLM's field for what response_format does not say: exactly one of these."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None

    def compiled_from(self) -> Grammar:
        """Returns the grammar that the text must follow.

        Raises:
            InvalidRequest: Not exactly one field is given, or its value is empty; names the field.
        """
        given = [
            (name, value)
            for name, value in self.model_dump(by_alias=True).items()
            if value not in (None, False)
        ]
        if len(given) != 1:
            raise InvalidRequest("structured_outputs", f"give exactly one, not {len(given)}")
        ((kind, value),) = given
        return _grammar(kind, value, f"structured_outputs.{kind}")


# The name in structured_outputs of each flat field.
_FLAT = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
    "structural_tag": "structural_tag",
}


class GrammarFields(Body):
    """Fields of vLLM and SGLang that say what a text has to look like: one of them alone."""

    structured_outputs: StructuredOutputs | None = None
    # vLLM's older names of what is in structured_outputs.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    # SGLang's.
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    # vLLM's backends follow the same grammars, as the one here does: taken and ignored. Their
    # options are not.
    guided_decoding_backend: (
        Literal["auto", "guidance", "lm-format-enforcer", "outlines", "xgrammar"] | None
    ) = None
    # It would change the text: refused.
    guided_whitespace_pattern: str | None = None

    def grammar_fields(self) -> list[str]:
        """Returns the names of the given fields that ask for a grammar."""
        return [name for name in ("structured_outputs", *_FLAT) if getattr(self, name) is not None]

    def grammar(self) -> Grammar | None:
        """Returns the grammar that the text must follow, None without one.

        Raises:
            InvalidRequest: Several grammars are given, or one is wrong; names the field.
        """
        if self.guided_whitespace_pattern is not None:
            raise InvalidRequest(
                "guided_whitespace_pattern",
                'give the schema "x-guidance": {"whitespace_pattern": ...} instead',
            )
        given = self.grammar_fields()
        if len(given) > 1:
            raise InvalidRequest(given[1], f"does not go with {given[0]}: give one grammar")
        if self.structured_outputs is not None:
            return self.structured_outputs.compiled_from()
        return flat_grammar(given[0], getattr(self, given[0])) if given else None


def flat_grammar(field: str, value: Any) -> Grammar:
    """Returns the grammar that a field beside structured_outputs asks for.

    Raises:
        InvalidRequest: The value is wrong; names the field.
    """
    return _grammar(_FLAT[field], value, field)


def _grammar(kind: str, value: Any, field: str) -> Grammar:
    """Returns the grammar for a kind of structured_outputs and its value.

    Raises InvalidRequest, naming `field`.
    """
    if kind == "json":
        if isinstance(value, str):
            read_json(value, field)
            return Grammar(GrammarKind.JSON_SCHEMA, value)
        return schema_grammar(value)
    if kind == "choice":
        if not value:
            raise InvalidRequest(field, "give at least one choice")
        return Grammar(GrammarKind.REGEX, "|".join(map(re.escape, value)))
    if kind == "structural_tag":
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if not isinstance(read_json(text, field), dict):
            raise InvalidRequest(field, "must be the text of a JSON object")
        return Grammar(GrammarKind.STRUCTURAL_TAG, text)
    if kind == "json_object":
        return ANY_OBJECT
    return Grammar(GrammarKind.REGEX if kind == "regex" else GrammarKind.EBNF, value)


def read_json(text: str, field: str) -> Any:
    """Parses the JSON of a grammar.

    Raises:
        InvalidRequest: It is none, or has what JSON has not, such as half a character; names
            `field`.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(field, f"is not valid JSON: {error}") from None


def schema_grammar(schema: dict[str, Any] | bool) -> Grammar:
    """Returns the grammar of JSON that follows a schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


ANY_OBJECT = schema_grammar({"type": "object"})
