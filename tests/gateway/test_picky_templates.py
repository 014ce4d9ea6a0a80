"""A chat template that takes no system message, as Gemma 2's: whose fault a refusal is."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foredraft.cli.stack import LocalStack
from testing import stack as stacks

TEMPLATE = """\
{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}model:{% endif %}"""
TOOLS: Any = [{"type": "function", "function": {"name": "f"}}]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def picky(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Returns the URL of a gateway with the template."""
    template = tmp_path_factory.mktemp("picky") / "picky.jinja"
    template.write_text(TEMPLATE)
    verifier = next(service.health for service in stack.services if service.name == "verify")
    with stacks.running_gateway(verifier, chat_template=template) as (url, _):
        stacks.eventually(lambda: httpx.get(f"{url}/health").status_code == 200)
        yield url


@pytest.mark.parametrize(
    ("first", "fields", "field", "why"),
    [
        ([], {}, None, ""),
        ([], {"tools": TOOLS, "tool_choice": "none"}, None, ""),
        ([SYSTEM], {}, "messages", "messages: the chat template refuses: System"),
        ([], {"tools": TOOLS}, "tools", "tools: with the system message that tells functions, the"),
    ],
)
def test_who_brought_the_system_message(
    picky: str, first: list[Any], fields: dict[str, Any], field: str | None, why: str
) -> None:
    messages = [*first, {"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 2, **fields}
    answer = httpx.post(f"{picky}/v1/chat/completions", json=body, timeout=60)
    if field is None:
        assert answer.status_code == 200, answer.text
        return
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert answer.json()["error"]["message"].startswith(why)
