"""response_format, and vLLM's structured_outputs: what the text of an answer has to look like."""

import json
import re
from typing import Any, Literal

from pydantic import Field

from foredraft.errors import InvalidRequest
from foredraft.types import Grammar, GrammarKind
from gateway.http import Body, Items


class JsonSchema(Body):
    """A schema with its name. It is kept to whether `strict` is asked for or not; name and description change nothing."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Plain text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        """What the verifier holds the text to.

        Raises:
            InvalidRequest: There is no schema, or one where none belongs.
        """
        if self.type != "json_schema":
            if self.json_schema is not None:
                raise InvalidRequest("response_format.json_schema", "needs type: json_schema")
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
        """What the verifier holds the text to.

        Raises:
            InvalidRequest: Not exactly one is given, or no choice.
        """
        if self.choice == []:
            raise InvalidRequest("structured_outputs.choice", "has no choices")
        given = {
            name: value
            for name, value in self.model_dump(by_alias=True).items()
            if value not in (None, False)
        }
        if len(given) != 1:
            raise InvalidRequest("structured_outputs", f"give exactly one, not {len(given)}")
        if self.json_ is not None:
            text = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return Grammar(GrammarKind.JSON_SCHEMA, text)
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, self.regex)
        if self.choice is not None:
            return Grammar(GrammarKind.REGEX, "|".join(map(re.escape, self.choice)))
        if self.grammar is not None:
            return Grammar(GrammarKind.EBNF, self.grammar)
        if self.structural_tag is not None:
            return Grammar(GrammarKind.STRUCTURAL_TAG, self.structural_tag)
        return ANY_OBJECT


def schema_grammar(schema: dict[str, Any] | bool) -> Grammar:
    """The grammar of JSON of a schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


ANY_OBJECT = schema_grammar({"type": "object"})
