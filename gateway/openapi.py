"""Completes FastAPI's OpenAPI document with request bodies and errors.

FastAPI cannot see them, since the routes read bodies and write errors themselves.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway import envelopes

REF = "#/components/schemas/{model}"
_JSON = "application/json"

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "retryable"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": ["string", "null"]},
                "retryable": {
                    "type": "boolean",
                    "description": "The same request may succeed later.",
                },
            },
        }
    },
}

ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def reads(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the `openapi_extra` of a route whose body is `model`."""
    schema = {"$ref": REF.format(model=model.__name__)}
    extra: dict[str, Any] = {
        "requestBody": {"required": True, "content": {_JSON: {"schema": schema}}}
    }
    if "stream" in model.model_fields:
        stream = {"schema": {"type": "string"}}
        extra["responses"] = {"200": {"content": {"text/event-stream": stream}}}
    return extra


def install(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Makes /openapi.json the complete document; `bodies` are the models given to `reads`."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, bodies)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    found: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, definitions = models_json_schema(
        [(model, "validation") for model in bodies], ref_template=REF
    )
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    # Keys are asked for where the server has any.
    found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    found["security"] = [{"key": []}, {}]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas.update(definitions["$defs"], Error=ERROR, AnthropicError=ANTHROPIC_ERROR)
    for path, operations in found["paths"].items():
        name = "AnthropicError" if envelopes.is_anthropic(path) else "Error"
        error = {"$ref": REF.format(model=name)}
        for operation in operations.values():
            # A wrong field is 400 here, as all errors are said.
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {
                "description": "An error.",
                "content": {_JSON: {"schema": error}},
            }
    return found
