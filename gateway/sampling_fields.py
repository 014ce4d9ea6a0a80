"""Makes fields of JSON bodies from the sampling parameters declared in `foredraft.types`."""

from collections.abc import Collection
from dataclasses import Field as Declaration
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model

from foredraft.errors import InvalidRequest
from foredraft.types import SamplingParams
from gateway.bodies import Body, Items

# Each API has names of its own for these, or gives them in another form.
NAMED_BY_APIS = frozenset(
    {
        "seed", "max_new_tokens", "min_new_tokens", "logprobs", "prompt_logprobs",
        "prompt_logprobs_from", "grammar",
    }
)  # fmt: skip
# Parameters that OpenAI's and Anthropic's newer APIs have among their own fields.
NEWER_HAVE = frozenset({"temperature", "top_p", "top_k"})
NAMES = tuple(each.name for each in fields(SamplingParams) if each.name not in NAMED_BY_APIS)
_JSON: dict[Any, Any] = {
    float: float,
    int: int,
    bool: bool,
    tuple[int, ...]: Items[int],
    tuple[tuple[int, ...], ...]: Items[str],  # texts, which the tokenizer encodes
    SamplingParams.__dataclass_fields__["logit_bias"].type: dict[str, float],
}


def _fields(without: Collection[str] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in fields(SamplingParams):
        if each.name in NAMES and each.name not in without:
            found[each.name] = (_JSON[each.type] | None, Field(None, description=_about(each)))
    return found


def _about(declared: "Declaration[Any]") -> str:
    allowed = declared.metadata["range"]
    about: str = declared.metadata["about"]
    if allowed is None:
        return about
    return f"{about} It must be {allowed}; {declared.default} when absent."


if TYPE_CHECKING:

    class SamplingFields(Body):
        """Every sampling parameter that APIs name alike; None where it is not given."""

        bad_words: list[str] | None = None
        stop_token_ids: list[int] | None = None

    class MoreSamplingFields(Body):
        """The sampling parameters that OpenAI's and Anthropic's newer APIs lack."""

else:
    SamplingFields = create_model("SamplingFields", __base__=Body, **_fields())
    MoreSamplingFields = create_model("MoreSamplingFields", __base__=Body, **_fields(NEWER_HAVE))


def given_sampling(body: Body) -> dict[str, Any]:
    """Returns the given parameters in the form of `SamplingParams`, without `bad_words`.

    Raises:
        InvalidRequest: A key of logit_bias is not a token id, or an empty list allows no token.
    """
    found = {name: getattr(body, name) for name in NAMES if getattr(body, name) is not None}
    found.pop("bad_words", None)
    if found.get("allowed_token_ids") == []:
        raise InvalidRequest("allowed_token_ids", "give at least one, or leave it out to allow all")
    if "logit_bias" in found:
        found["logit_bias"] = _by_token(found["logit_bias"])
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}


def _by_token(given: dict[str, float]) -> dict[int, float]:
    """Converts JSON's string keys to token ids."""
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 9:
            raise InvalidRequest("logit_bias", f"{key!r} is not a token id")
        biases[int(key)] = bias
    return biases
