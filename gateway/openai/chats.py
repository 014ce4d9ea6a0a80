"""Makes jobs from conversations, for every API that takes conversations."""

import json
from dataclasses import dataclass, replace

from foredraft.errors import InvalidRequest, PromptTooLong
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import Grammar, GrammarKind
from gateway.jobs import Job
from gateway.openai.answer_parser import AnswerFormat, AnswerParser
from gateway.openai.call_grammars import (
    START,
    after_reasoning,
    call_grammar,
    in_final_channel,
)
from gateway.openai.reasoning import (
    BEGIN,
    END,
    ReasoningStyle,
    begun,
    effort_variables,
    opening,
)
from gateway.openai.schemas import ChatBody
from gateway.openai.tools import (
    CONVENTIONS,
    Convention,
    ToolUse,
    convention_of,
    told,
)
from gateway.serving import Serving


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as token ids, with the form that its answer must have.

    Attributes:
        ids: Token ids.
        use: Tools that may be called, None without.
        form: Settings for parsing its answers.
        grammar: Grammar that the verifier makes the answer follow, or None.
    """

    ids: list[int]
    use: ToolUse | None
    form: AnswerFormat
    grammar: Grammar | None


@dataclass(frozen=True, slots=True)
class Chat:
    """A checked conversation, ready to run.

    Attributes:
        job: Job that generates the answers.
        use: Tools that may be called, None without.
        form: Settings for parsing its answers.
    """

    job: Job
    use: ToolUse | None
    form: AnswerFormat

    def parser(self) -> AnswerParser:
        """Creates a parser of one continuation of the job."""
        return AnswerParser(self.form)


async def render(serving: Serving, body: ChatBody) -> Prompt:
    """Renders the prompt of a conversation.

    Raises:
        InvalidRequest: A field is wrong; the error names it.
    """
    serving.check_model(body.model)
    body.check()
    use = body.tool_use()
    template = serving.tokenizer.template_for(use is not None)
    if template is not None:
        template.check_roles(message.role for message in body.messages)
    convention = convention_for(serving, use)
    messages, variables = told(
        [message.rendered(f"messages.{i}") for i, message in enumerate(body.messages)],
        use,
        convention,
    )
    answer = grammar = body.grammar()
    if use is not None and convention is not None:
        grammar = call_grammar(use, convention, serving.tokenizer, answer)
    if body.reasoning_effort is not None:
        source = "" if template is None else template.source
        variables |= effort_variables(source, body.reasoning_effort)
    variables |= body.chat_template_kwargs or {}
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        variables["continue_final_message"] = True
    if body.documents is not None:
        variables["documents"] = body.documents
    try:
        ids = body.truncated(await serving.encode_chat(messages, **variables))
    except PromptTooLong:
        raise
    except InvalidRequest as error:
        if use is None or convention is not Convention.OWN or error.field != "messages":
            raise
        # The client did not ask for that message, which the template may not take.
        why = f"with the system message that tells functions, {error.message}"
        raise InvalidRequest("tools", why) from None
    form = _form(serving, body, ids, convention, use)
    if answer is not None and use is not None:
        form = replace(form, is_calls_or_text=not use.is_required)
    return Prompt(ids, use, form, _after_reasoning(grammar, form, serving.tokenizer))


def _form(
    serving: Serving,
    body: ChatBody,
    ids: list[int],
    convention: Convention | None,
    use: ToolUse | None,
) -> AnswerFormat:
    """Returns the settings for parsing the answers to a conversation."""
    functions = () if use is None else tuple(use.callable)
    # Answers in channels must be parsed, whatever the request asks for.
    name = serving.config.reasoning_parser or (
        ReasoningStyle.GPT_OSS if convention is Convention.HARMONY else ""
    )
    if use is None:
        convention = None
    if not name or body.separate_reasoning is False:
        return AnswerFormat(convention, functions=functions)
    style = ReasoningStyle(name)
    is_open = opening(style, serving.tokenizer, ids)
    if body.continue_final_message:
        last = body.messages[-1].rendered("messages")
        is_open = begun(last["content"])
    return AnswerFormat(convention, style, is_open, functions)


def convention_for(serving: Serving, use: ToolUse | None) -> Convention | None:
    """Returns the model's convention of calls, from --tool-call-parser or the chat template."""
    name = serving.config.tool_call_parser
    template = serving.tokenizer.template_for(use is not None)
    if template is None:
        return None
    if name:
        return CONVENTIONS[name]
    if serving.config.reasoning_parser == ReasoningStyle.GPT_OSS:
        return Convention.HARMONY
    return convention_of(template.source)


def _after_reasoning(
    grammar: Grammar | None, form: AnswerFormat, tokenizer: Tokenizer
) -> Grammar | None:
    """Returns a grammar that allows reasoning before the answer.

    Raises:
        InvalidRequest: The grammar cannot be combined with reasoning.
    """
    if grammar is None or form.style is None or form.is_open is False:
        return grammar
    if form.style is ReasoningStyle.GPT_OSS:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            return in_final_channel(json.loads(grammar.text), tokenizer)
        if grammar.text.startswith(START):
            return grammar
        raise InvalidRequest(
            "grammar", "does not go with a model that answers in channels; a JSON schema does"
        )
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        tags = {"structures": [], "at_least_one": True, "answer": json.loads(grammar.text)}
    elif grammar.kind is GrammarKind.STRUCTURAL_TAG:
        tags = json.loads(grammar.text)
        if not (form.is_open or tags.get("at_least_one")):
            return grammar  # text may come first, and reasoning is that here
    elif grammar.text.startswith(START):
        text = after_reasoning(grammar.text, BEGIN, END, form.is_open is True)
        return Grammar(grammar.kind, text)
    elif form.is_open:
        raise InvalidRequest(
            "grammar", "does not go with reasoning; a JSON schema does, or switch reasoning off"
        )
    else:
        return grammar
    tags["reasoning"] = {"begin": BEGIN, "end": END, "is_open": form.is_open is True}
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tags, ensure_ascii=False))


async def prepare(
    serving: Serving,
    body: ChatBody,
    name: str,
    is_cut_to_context: bool = False,
    may_be_empty: bool = False,
) -> Chat:
    """Makes the job of a conversation.

    Args:
        is_cut_to_context: Whether a request for more tokens than the context leaves is cut to
            these, instead of refused.
        may_be_empty: Whether a request for zero tokens is allowed.

    Raises:
        InvalidRequest: A field is wrong; the error names it.
    """
    prompt = await render(serving, body)
    given = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    room = max(1, serving.info.context_length - len(prompt.ids))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    words = serving.bad_words(body.bad_words)
    sampling = body.sampling(room if given is None else given, logprobs, prompt.grammar, words)
    options = body.options(name, name)
    if prompt.form.keeps_special_tokens:
        options = replace(options, skip_special_tokens=False)
    if prompt.use is not None:
        options = replace(options, functions=prompt.use.names)
    job = serving.job(
        prompt.ids,
        sampling,
        options,
        prompt_field="messages",
        must_fit=given is not None and not is_cut_to_context,
        may_be_empty=may_be_empty,
    )
    return Chat(job, prompt.use, prompt.form)
