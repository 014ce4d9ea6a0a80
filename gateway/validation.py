"""Describes a wrong body in one sentence, with the client's field name and what to send instead."""

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from foredraft.errors import InvalidRequest

UNKNOWN = "is not a field of this request, or not one that can be honoured"
_WANTS = "Input should be "
# Errors whose last name is the client's, or should be; others may end in a union branch's name.
_OF_NAMES = ("extra_forbidden", "missing")
# Fields of other servers that are not known here, with the value that asks for nothing.
_IDLE: dict[str, Any] = {
    # vLLM's.
    "use_beam_search": False,
    "early_stopping": False,
    "length_penalty": 1,
    "detokenize": True,
    "return_tokens_as_token_ids": False,
    "add_special_tokens": False,
    "include_reasoning": True,
    "echo": False,
    "best_of": 1,
    "logits_processors": [],
    "cache_salt": "",
    "vllm_xargs": {},
    "kv_transfer_params": {},
    "mm_processor_kwargs": {},
    "extra_body": {},
    # SGLang's.
    "no_stop_trim": False,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "return_indexer_topk": False,
    "return_cached_tokens_details": False,
    "return_meta_info": False,
    "return_bytes": False,
    "return_entropy": False,
    "stream_reasoning": True,
    "lora_path": "",
    "custom_logit_processor": "",
}
_MAX_ERRORS = 256
_MAX_DEPTH = 8
MAX_NAME_CHARACTERS = 64


def invalid_request(
    error: ValidationError, body: bytes, model: type[BaseModel], remedies: Mapping[str, str]
) -> InvalidRequest:
    """Converts pydantic's error to an InvalidRequest.

    Args:
        error: Pydantic's error.
        body: Bytes of the request's body.
        model: Model that the body was validated as.
        remedies: Advice for unknown fields, by field name.
    """
    found = error.errors(include_url=False, include_input=False)[:_MAX_ERRORS]
    first = found[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(
            "body", f"is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
        )
    value = from_json(body)
    same = [each for each in found if each["loc"][:1] == first["loc"][:1]]
    paths = {each["loc"]: _path(each["loc"], each["type"], value) for each in same}
    named = [each for each in same if each["type"] in _OF_NAMES]
    unknown = [each for each in named if each["type"] == "extra_forbidden"]
    with_remedy = [each for each in unknown if _without_numbers(paths[each["loc"]]) in remedies]
    if with_remedy:
        first = with_remedy[0]
    elif kinds := _kinds_of_others(same):
        first = kinds[0]
    elif first["type"] not in _OF_NAMES:
        # The branch of a union that the value resembles most goes deepest, to a field. Of lists
        # whose items are wrong it resembles none more than another.
        of_fields = [each for each in same if not "".join(paths[each["loc"]][-1:]).isdigit()]
        candidates = named or of_fields or [first]
        first = max(candidates, key=lambda each: len(paths[each["loc"]]))
    path = paths[first["loc"]]
    field = ".".join(path[:_MAX_DEPTH]) or "body"
    if first["type"] == "extra_forbidden":
        return InvalidRequest(field, f"{UNKNOWN}{_remedy(path, model, remedies)}")
    # A union has an error for each of its branches.
    wants = [each["msg"] for each in same if paths[each["loc"]][: len(path)] == path]
    if first["type"] == "missing":
        wants = [first["msg"]]
    tails = [text.removeprefix(_WANTS) for text in wants if text.startswith(_WANTS)]
    message = _WANTS + " or ".join(dict.fromkeys(tails)) if tails else first["msg"]
    return InvalidRequest(field, message)


def _kinds_of_others(errors: Sequence[Any]) -> list[Any]:
    """Returns the errors of unknown types, if fields are wrong in objects of such types alone."""
    kinds = [
        each for each in errors if each["type"] == "literal_error" and each["loc"][-1] == "type"
    ]
    objects = [each["loc"][:-1] for each in kinds]
    names = [each["loc"] for each in errors if each["type"] in _OF_NAMES]
    covered = all(any(name[: len(where)] == where for where in objects) for name in names)
    return kinds if covered else []


def without_idle_fields(error: ValidationError, body: bytes) -> bytes | None:
    """Leaves unknown fields out that ask for nothing.

    Such a field is null, or has the value with which other servers do what is done here.

    Args:
        error: Pydantic's error.
        body: Bytes of the request's body.

    Returns:
        The body without them, as JSON; None where it has none.
    """
    found = error.errors(include_url=False, include_input=False)[:_MAX_ERRORS]
    unknown = [each["loc"] for each in found if each["type"] == "extra_forbidden"]
    if not unknown:
        return None
    value = from_json(body)
    left_out = 0
    for *way, name in unknown:
        holder = value
        for part in way:
            holder = _inside(holder, part)
        if isinstance(holder, dict) and name in holder and _is_idle(str(name), holder[name]):
            del holder[name]
            left_out += 1
    return to_json(value, inf_nan_mode="constants") if left_out else None


def _inside(holder: Any, part: int | str) -> Any:
    """Returns a member of an object or list; `holder` where `part` names a union's branch."""
    if isinstance(holder, dict):
        return holder.get(part, holder)
    if isinstance(holder, list) and isinstance(part, int) and part < len(holder):
        return holder[part]
    return holder


def _is_idle(name: str, value: Any) -> bool:
    return value is None or (name in _IDLE and value == _IDLE[name])


def _path(location: Sequence[int | str], kind: str, value: Any) -> list[str]:
    """Returns the names in pydantic's location that are in the client's body, without union
    branches.
    """
    path = []
    for i, part in enumerate(location):
        if isinstance(part, int):
            path.append(str(part))
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif isinstance(value, dict) and part in value:
            path.append(part[:MAX_NAME_CHARACTERS])
            value = value[part]
        elif i == len(location) - 1 and kind in _OF_NAMES:
            path.append(part)
    return path


def _remedy(path: Sequence[str], model: type[BaseModel], remedies: Mapping[str, str]) -> str:
    """Returns what to send instead, as the end of a sentence; empty where unknown."""
    if found := remedies.get(_without_numbers(path)):
        return f"; {found}"
    names = [part for part in path if not part.isdigit()]
    known = _names(model)[len(names) > 1]
    name = names[-1] if names else ""
    meant = known.get(_bare(name))
    if meant is None:
        near = difflib.get_close_matches(name.lower(), known.values(), n=1, cutoff=0.8)
        meant = near[0] if near else None
    return "" if meant in (None, name) else f"; did you mean {meant}?"


def _without_numbers(path: Sequence[str]) -> str:
    """Returns a field's dotted name without the indices of lists."""
    return ".".join(part for part in path if not part.isdigit())


@functools.cache
def _names(model: type[BaseModel]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the names of a model's own fields and of its inner objects' fields.

    Keys are names in lower case with only letters and digits.
    """
    schema = model.model_json_schema()
    inner = [
        name for each in schema.get("$defs", {}).values() for name in each.get("properties", ())
    ]
    return tuple({_bare(name): name for name in names} for names in (schema["properties"], inner))  # type: ignore[return-value]


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
