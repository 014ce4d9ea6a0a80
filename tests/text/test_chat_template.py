"""Chat templates: what Hugging Face templates use, and that none runs away."""

import json
import pathlib

import pytest
from tokenizers.processors import TemplateProcessing

from foredraft.errors import CheckpointError, InvalidRequest
from foredraft.text.chat_template import ChatTemplate
from foredraft.text.tokenizer import Tokenizer, fingerprint_of, tokenizer_fingerprint
from testing import tiny_tokenizers

USER = [{"role": "user", "content": "Hi <b> & é"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(USER, **variables)


def test_what_templates_use() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<s>Hi <b> & é"
    assert render("{{ messages | tojson }}") == json.dumps(USER, ensure_ascii=False)
    assert render("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert render("{% generation %}a{{ messages[0]['role'] }}{% endgeneration %}") == "auser"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{{ 'yes' if thinking else 'no' }}", thinking=True) == "yes"
    assert render("{% if add_generation_prompt %}g{% endif %}", add_generation_prompt=False) == ""
    # trim_blocks and lstrip_blocks, as transformers sets them
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": 'Say "x" & <y>\n'},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "again"},
    ]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizers.byte_level(), bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = tiny_tokenizers.CHAT_TEMPLATE
    tokenizer = Tokenizer(
        tiny_tokenizers.byte_level(), {"bos_token": "<s>"}, tiny_tokenizers.CHAT_TEMPLATE
    )
    expected = fast.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render(messages) == expected


def test_a_template_may_ask_whether_there_are_tools() -> None:
    transformers = pytest.importorskip("transformers")
    source = "{% if tools is not none %}{{ tools | length }}{% endif %}{{ documents is defined }}"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.byte_level())
    fast.chat_template = source
    assert render(source) == fast.apply_chat_template(USER, tokenize=False) == "True"
    assert render(source, tools=[{}]) == "1True"


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    messages = [{"role": "developer", "content": "x"}]
    roles = "{% for m in messages %}{{ m.role }}{% endfor %}"
    assert ChatTemplate(roles, {}).render(messages) == "system"
    assert ChatTemplate(roles + "{# developer #}", {}).render(messages) == "developer"
    assert messages[0]["role"] == "developer"


def test_roles_are_those_of_openai_and_those_that_the_template_names() -> None:
    knows_more = ChatTemplate("{% if messages[0].role in ('ipython', \"model\") %}{% endif %}", {})
    knows_more.check_roles(["system", "developer", "user", "assistant", "tool", "ipython", "model"])
    for role in ("wizard", "User", "", "message", "role'"):
        with pytest.raises(
            InvalidRequest, match=r"^messages\.1\.role: must be 'system', .* or 'tool'"
        ):
            knows_more.check_roles(["user", role])


@pytest.mark.parametrize("content", ["", "a", "So <b> & ", " é\n\n", "a\ue000"])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_the_last_message_can_be_continued(content: str, trim: str) -> None:
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content"
        + trim
        + " }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
        {},
    )
    messages = [*USER, {"role": "assistant", "content": content}]
    expected = "<user>Hi <b> & é</><assistant>" + (content.lstrip() if trim else content)
    assert template.render(messages, continue_final_message=True) == expected


def test_what_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="not one of the assistant"):
        render("{{ messages }}", continue_final_message=True)
    with pytest.raises(InvalidRequest, match="leaves the last message out"):
        ChatTemplate("x", {}).render(
            [{"role": "assistant", "content": "a"}], continue_final_message=True
        )


def test_bos_is_not_doubled(tmp_path: pathlib.Path) -> None:
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    bos = tokenizer.encode("")[0]
    assert tokenizer.encode("Hi").count(bos) == 1
    assert tokenizer.encode_chat(USER).count(bos) == 1


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 9 ** 99999999 }}",
        (
            "{% for i in range(100000) %}{% for j in range(100000) %}{{ 'x' * 100 }}{% endfor %}{%"
            " endfor %}"
        ),
        "{{ undefined_function() }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 1 / 0 }}",
        "{{ 'abc' | truncate(2) }}",
        "{{ 1 + 'x' }}",
        "{{ messages[0].content | dictsort }}",  # as of parameters of a tool that are no object
    ],
)
def test_a_rendering_that_goes_wrong_is_the_requests_fault(source: str) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        render(source)


def test_a_broken_template_is_named() -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% for %}", {})


def test_no_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(tiny_tokenizers.byte_level()).encode_chat(USER)


def test_files_of_a_directory(tmp_path: pathlib.Path) -> None:
    backend = tiny_tokenizers.byte_level()
    backend.enable_truncation(2)
    tiny_tokenizers.save(backend, tmp_path, chat_template=None)
    (tmp_path / "chat_template.jinja").write_text("from file")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    size = backend.get_vocab_size()
    config["added_tokens_decoder"] = {str(size): {"content": "<extra>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.source == "from file"
    assert tokenizer.encode("x<extra>", False)[-1] == size
    assert tokenizer.decode([size]) == ""
    assert len(tokenizer.encode("a much longer text")) > 2
    assert Tokenizer.from_dir(tmp_path, "other").chat_template.source == "other"  # type: ignore[union-attr]

    config["added_tokens_decoder"] = {"5000": {"content": "<wrong>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="<wrong>"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("where", ["list", "files"])
def test_a_template_of_its_own_for_tools(tmp_path: pathlib.Path, where: str) -> None:
    templates = {"default": "plain", "tool_use": "x{{ tools | length }}", "rag": "{{ documents }}"}
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, chat_template=None)
    if where == "list":
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        (tmp_path / "chat_template.jinja").write_text(templates["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            file = tmp_path / "additional_chat_templates" / f"{name}.jinja"
            file.write_text(templates[name])
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(USER)) == "plain"
    assert tokenizer.decode(tokenizer.encode_chat(USER, tools=[])) == "plain"
    assert tokenizer.decode(tokenizer.encode_chat(USER, tools=[{}, {}])) == "x2"
    assert tokenizer.template_for(True).source == templates["tool_use"]  # type: ignore[union-attr]
    other = Tokenizer.from_dir(tmp_path, "other")
    assert other.decode(other.encode_chat(USER, tools=[{}])) == "other"


def test_missing_or_broken_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_fingerprint_depends_on_the_vocabulary_alone(tmp_path: pathlib.Path) -> None:
    assert fingerprint_of({"a": 0, "b": 1}) == fingerprint_of({"b": 1, "a": 0})
    assert fingerprint_of({"a": 0, "b": 1}) != fingerprint_of({"a": 1, "b": 0})
    backend = tiny_tokenizers.byte_level()
    one = Tokenizer(backend).fingerprint
    backend.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    assert Tokenizer(backend).fingerprint == one
    tiny_tokenizers.save(backend, tmp_path)
    assert tokenizer_fingerprint(tmp_path) == one
    assert tokenizer_fingerprint(tmp_path / "no tokenizer here") == ""
