"""Bodies of the OpenAI routes: OpenAI's fields, and extensions of vLLM and SGLang."""

from typing import Any

from pydantic import ConfigDict

from foredraft.errors import InvalidRequest
from foredraft.types import Grammar, SamplingParams, SpeculationParams
from gateway import remedies
from gateway.bodies import Body, Items, Objects, Renamed, refuse
from gateway.jobs import JobOptions
from gateway.openai.response_format import GrammarFields, ResponseFormat
from gateway.openai.tools import Choice, Tool, ToolUse, tool_use
from gateway.sampling_fields import SamplingFields, given_sampling
from gateway.serving import seed_or_random


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculation(Body):
    """Speculation settings of a request (an extension)."""

    enabled: bool | None = None
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None

    def params(self) -> SpeculationParams:
        """Converts the fields to the verifier's form."""
        return SpeculationParams(self.enabled, self.num_steps, self.topk, self.num_draft_tokens)


class GenerationBody(Renamed, GrammarFields, SamplingFields):
    """Fields that completions and chat completions have in common."""

    remedies = remedies.OPENAI

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | Items[str] | None = None
    seed: int | None = None
    # These cannot change the text: taken and ignored, as other servers of OpenAI's API do.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    spaces_between_special_tokens: bool | None = None
    # Extensions.
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    timeout: float | None = None
    return_provenance: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    speculation: Speculation | None = None
    request_id: str | None = None

    def options(self, name: str, call: str) -> JobOptions:
        """Returns the options of the job of one prompt; see `JobOptions` for the arguments."""
        return JobOptions(
            name=name,
            call=call,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            num_choices=1 if self.n is None else self.n,
            skip_special_tokens=self.skip_special_tokens is not False,
            keep_stop=bool(self.include_stop_str_in_output),
            return_provenance=bool(self.return_provenance),
            speculation=(self.speculation or Speculation()).params(),
            priority=self.priority or 0,
            timeout=self.timeout,
        )

    def names(self) -> dict[str, str]:
        return {
            "max_new_tokens": "max_tokens",
            "min_new_tokens": "min_tokens",
            "grammar": next(iter(self.grammar_fields()), "structured_outputs"),
        }

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives for each prompt token; None where no log-probabilities are
        requested.
        """
        return self.prompt_logprobs

    def truncated(self, tokens: list[int]) -> list[int]:
        """Returns the prompt's last tokens, as many as truncate_prompt_tokens says."""
        most = self.truncate_prompt_tokens
        if most is None:
            return tokens
        if most < 1:
            raise InvalidRequest("truncate_prompt_tokens", f"must be at least 1, not {most}")
        return tokens[-most:]

    def sampling(
        self,
        max_new_tokens: int,
        logprobs: int | None,
        grammar: Grammar | None,
        bad_words: tuple[tuple[int, ...], ...],
    ) -> SamplingParams:
        """Returns the sampling parameters, with OpenAI's defaults for absent fields."""
        values = given_sampling(self)
        # OpenAI's top_p may be 0, which leaves only the likeliest token.
        if values.get("top_p") == 0:
            values |= {"top_p": 1.0, "top_k": 1}
        if values.get("top_k") == 0:
            del values["top_k"]
        return SamplingParams(
            **values,
            seed=seed_or_random(self.seed),
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens or 0,
            logprobs=logprobs,
            grammar=grammar,
            bad_words=bad_words,
            prompt_logprobs=self.num_prompt_logprobs,
        )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        """Raises InvalidRequest for a field that cannot be honoured."""
        refuse(
            {"suffix": self.suffix or None},
            {"suffix": "models here complete text; they do not insert"},
        )
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest(
                "best_of", "is not supported beyond n: ask for n choices and pick one"
            )

    def names(self) -> dict[str, str]:
        names = super().names()
        return (
            names if self.prompt_logprobs is not None else {**names, "prompt_logprobs": "logprobs"}
        )

    @property
    def num_prompt_logprobs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        asked = [count for count in (echoed, self.prompt_logprobs) if count is not None]
        return max(asked, default=None)

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, each as text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        texts = [part for part in prompt if isinstance(part, str | list)]
        return texts or [[part for part in prompt if isinstance(part, int)]]


# Fields that ask for something that is always done: prefixes are cached anyway.
IGNORED = ("cache_control",)


class ContentPart(Body):
    """A part of a message: text, or a refusal that an earlier answer was."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    type: str
    text: str | None = None
    refusal: str | None = None

    def words(self, where: str) -> str:
        """Returns the part's text.

        Raises InvalidRequest, naming the field below `where`, for a part that is something else.
        """
        if self.type not in ("text", "refusal"):
            raise InvalidRequest(f"{where}.type", f"only text is taken, not {self.type[:40]!r}")
        for name in self.model_extra or {}:
            if name in IGNORED:
                continue
            raise InvalidRequest(f"{where}.{name[:40]}", "is not a field of a part of text")
        words = self.text if self.type == "text" else self.refusal
        if words is None:
            raise InvalidRequest(f"{where}.{self.type}", "Field required")
        return words


class Message(Body):
    """A message of a conversation; other fields go to the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: str
    content: str | Objects[ContentPart] | None = None

    def rendered(self, where: str) -> dict[str, Any]:
        """Converts the message to the form that chat templates expect.

        Raises:
            InvalidRequest: Text is missing, or a part is none; names the field below `where`.
        """
        content = self.content
        if content is None and self.role in ("system", "developer", "user"):
            raise InvalidRequest(f"{where}.content", "Field required")
        if isinstance(content, list):
            parts = (part.words(f"{where}.content.{i}") for i, part in enumerate(content))
            content = "".join(parts)
        # A message that came in an answer has fields that are null; templates ask whether they are
        # there.
        extra = {k: v for k, v in (self.model_extra or {}).items() if v is not None}
        if not extra.get("tool_calls", True):
            del extra["tool_calls"]
        return {**extra, "role": self.role, "content": content or ""}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Objects[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Objects[Tool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: Items[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Objects[dict[str, Any]] | None = None

    def names(self) -> dict[str, str]:
        names = {"prompt": "messages", "logprobs": "top_logprobs", **super().names()}
        if self.max_tokens is None:
            names["max_new_tokens"] = "max_completion_tokens"
        if not self.grammar_fields():
            form = "text" if self.response_format is None else self.response_format.type
            if form == "structural_tag":
                names["grammar"] = "response_format"
            elif form != "text":
                names["grammar"] = "response_format.json_schema.schema"
            elif self.tools:
                names["grammar"] = "tools"
        return names

    def grammar(self) -> Grammar | None:
        form = None if self.response_format is None else self.response_format.grammar()
        other = super().grammar()
        if form is not None and other is not None:
            field = self.grammar_fields()[0]
            raise InvalidRequest(field, "does not go with response_format: give one grammar")
        return form or other

    def tool_use(self) -> ToolUse | None:
        """Returns the requested use of tools, None where none may be called."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def check(self) -> None:
        """Raises InvalidRequest for a field that cannot be honoured."""
        if not self.messages:
            raise InvalidRequest("messages", "it has no messages")
        if self.modalities not in (None, ["text"]):
            raise InvalidRequest("modalities", "only text can be honoured")
        refuse(
            vars(self),
            {
                "functions": "give tools instead",
                "function_call": "give tool_choice instead",
                "audio": "only text can be honoured",
                "prediction": (
                    "predicted output cannot be honoured; n-gram drafting finds repetition by"
                    " itself"
                ),
                "verbosity": "the model has no such setting",
                "web_search_options": "there is no web search",
            },
        )
        for name in ("messages", "self"):
            if name in (self.chat_template_kwargs or {}):
                raise InvalidRequest("chat_template_kwargs", f"{name} is not for requests to set")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message", "does not go with add_generation_prompt: true"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise InvalidRequest("max_tokens", "give it or max_completion_tokens, not both")
