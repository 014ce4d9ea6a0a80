"""From a conversation to its job: what every API that takes conversations runs."""

from dataclasses import dataclass

from foredraft.errors import InvalidRequest
from foredraft.types import Grammar, SamplingParams
from gateway.generation import Job
from gateway.openai.answer_parser import AnswerParser
from gateway.openai.schemas import ChatBody, GenerationBody
from gateway.openai.tools import Convention, ToolUse, convention_of, told
from gateway.serving import Serving


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as the model reads it, and what its answer has to look like.

    Attributes:
        ids: Token ids.
        use: The tools that may be called, None without.
        convention: How calls are written, None where the template's way is not known.
        grammar: What the verifier holds the answer to.
    """

    ids: list[int]
    use: ToolUse | None
    convention: Convention | None
    grammar: Grammar | None


@dataclass(frozen=True, slots=True)
class Chat:
    """A checked conversation.

    Attributes:
        job: What is generated.
        use: The tools that may be called, None without.
        convention: How calls are written.
    """

    job: Job
    use: ToolUse | None
    convention: Convention | None

    def parser(self) -> AnswerParser:
        """Reads one continuation of the job."""
        return AnswerParser(None if self.use is None else self.convention)


async def render(serving: Serving, body: ChatBody) -> Prompt:
    """The prompt of a conversation.

    Raises:
        InvalidRequest: A field is wrong; names it.
    """
    serving.check_model(body.model)
    body.check()
    use = body.tool_use()
    template = serving.tokenizer.template_for(use is not None)
    convention = None if template is None else convention_of(template.source)
    messages, variables = told(
        [message.rendered(f"messages.{i}") for i, message in enumerate(body.messages)],
        use,
        convention,
    )
    grammar = body.grammar()
    if use is not None and convention is not None:
        if grammar is not None:
            field = "structured_outputs" if body.structured_outputs else "response_format"
            raise InvalidRequest(field, "does not go with tools that may be called")
        grammar = use.grammar(convention)
    variables |= body.chat_template_kwargs or {}
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        variables["continue_final_message"] = True
    if body.documents is not None:
        variables["documents"] = body.documents
    ids = body.truncated(await serving.encode_chat(messages, **variables))
    return Prompt(ids, use, convention, grammar)


async def prepare(serving: Serving, body: ChatBody, name: str) -> Chat:
    """The job of a conversation, under a name by which it can be aborted.

    Raises:
        InvalidRequest: A field is wrong; names it.
    """
    prompt = await render(serving, body)
    given = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    room = max(1, serving.info.context_length - len(prompt.ids))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = body.sampling(room if given is None else given, logprobs, prompt.grammar)
    job = make_job(serving, body, prompt.ids, sampling, name, name, given is not None, "messages")
    return Chat(job, prompt.use, prompt.convention)


def make_job(
    serving: Serving,
    body: GenerationBody,
    ids: list[int],
    sampling: SamplingParams,
    name: str,
    call: str,
    max_given: bool,
    field: str = "prompt",
) -> Job:
    """The job of one prompt of a request."""
    return serving.job(
        ids,
        sampling,
        prompt_field=field,
        max_new_tokens_given=max_given,
        name=name,
        call=call,
        stop=body.stops,
        num_choices=1 if body.n is None else body.n,
        skip_special_tokens=body.skip_special_tokens is not False,
        keep_stop=bool(body.include_stop_str_in_output),
        return_provenance=bool(body.return_provenance),
        speculation=None if body.speculation is None else body.speculation.params(),
        priority=body.priority or 0,
        timeout=body.timeout,
    )
