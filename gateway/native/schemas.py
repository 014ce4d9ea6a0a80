"""Bodies of the native routes: SGLang's fields and defaults, and the fields that are refused."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from foredraft.errors import InvalidRequest
from foredraft.types import Grammar, GrammarKind, SamplingParams
from gateway import remedies
from gateway.bodies import Body, Items, Objects, Renamed
from gateway.openai.response_format import flat_grammar
from gateway.openai.schemas import ChatBody, Message, Speculation
from gateway.openai.tools import Tool
from gateway.sampling_fields import SamplingFields

REFUSED = {
    "input_embeds": "prompts are text or token ids",
    "image_data": "only text can be honoured",
    "video_data": "only text can be honoured",
    "audio_data": "only text can be honoured",
    "lora_path": "LoRA adapters are not served",
    "session_params": "sessions are not served; prefixes are cached by themselves",
    "custom_logit_processor": "code in requests is not run",
    "return_hidden_states": "hidden states do not leave the verifier",
    "token_ids_logprob": "log-probabilities of chosen ids are not computed",
}
REFUSED_SAMPLING = {
    "stop_regex": "stop expressions cannot be honoured; use stop",
    "custom_params": "there is no custom logit processor",
}


class NativeBody(Body):
    """A body in which null is the default, as with SGLang."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None or name not in cls.model_fields
        }


class NativeSampling(NativeBody, SamplingFields):
    """sampling_params of /generate, with SGLang's names and defaults."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop: str | Items[str] | None = None
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    n: int = 1
    sampling_seed: int | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    stop_regex: Any = None
    custom_params: Any = None

    def grammar(self) -> Grammar | None:
        """Returns the grammar that the text must follow, None without one.

        Raises:
            InvalidRequest: Several grammars are given, or one is wrong; names the field.
        """
        given = [kind.value for kind in GrammarKind if getattr(self, kind) is not None]
        if len(given) > 1:
            raise InvalidRequest(given[1], f"does not go with {given[0]}: give one grammar")
        return flat_grammar(given[0], getattr(self, given[0])) if given else None


class GenerateBody(Renamed, NativeBody):
    """POST /generate."""

    remedies: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(NativeSampling.model_fields, "put it into sampling_params"),
        **remedies.GENERATE,
    }

    text: str | Items[str] | None = None
    input_ids: Items[int] | Items[Items[int]] | None = None
    sampling_params: NativeSampling | Objects[NativeSampling] | None = None
    stream: bool = False
    rid: str | Items[str] | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    priority: int = 0
    # These change nothing: taken and ignored.
    log_metrics: bool = True
    no_logs: bool = True
    conversation_id: str = ""
    # These are refused.
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: bool = False
    token_ids_logprob: Any = None
    # Extensions.
    return_provenance: bool = False
    speculation: Speculation | None = None
    timeout: float | None = None

    def names(self) -> dict[str, str]:
        names = {
            name: f"sampling_params.{name}"
            for name in NativeSampling.model_fields
            if name in SamplingParams.__dataclass_fields__
            or name in REFUSED_SAMPLING
            or name in ("stop", "n")
            or name in set(GrammarKind)
        }
        samplings = self.sampling_params if isinstance(self.sampling_params, list) else []
        first = samplings[0] if samplings else self.sampling_params
        if isinstance(first, NativeSampling):
            kinds = [kind for kind in GrammarKind if getattr(first, kind) is not None]
            names["grammar"] = f"sampling_params.{kinds[0]}" if kinds else "sampling_params"
        return {
            **names,
            "seed": "sampling_params.sampling_seed",
            "prompt": "text" if self.input_ids is None else "input_ids",
            "logprobs": "top_logprobs_num",
            "prompt_logprobs": "top_logprobs_num",
            "prompt_logprobs_from": "logprob_start_len",
            "request_id": "rid",
        }


class TokenizeBody(Body):
    """POST /tokenize."""

    prompt: str | Items[str] | None = None
    add_special_tokens: bool = True
    model: str = ""
    # A conversation instead, as /v1/chat/completions renders it.
    messages: Objects[Message] | None = None
    tools: Objects[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> ChatBody | None:
        """Returns the conversation, None where there is a prompt.

        Raises:
            InvalidRequest: Neither or both are given, or a field of a conversation beside a prompt.
        """
        if self.messages is None:
            for name in ("tools", "add_generation_prompt", "continue_final_message"):
                if getattr(self, name) is not None:
                    raise InvalidRequest(name, "needs messages")
            if self.prompt is None:
                raise InvalidRequest("prompt", "give it or messages")
            return None
        if self.prompt is not None:
            raise InvalidRequest("prompt", "give it or messages, not both")
        return ChatBody(
            model=self.model,
            messages=self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Items[int] | Items[Items[int]]
    skip_special_tokens: bool = True
    model: str = ""


class AbortBody(Body):
    """POST /abort_request."""

    rid: str = ""
    abort_all: bool = False
