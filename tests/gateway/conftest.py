"""Starts one running stack for all tests of the gateway, and gateways before scripted verifiers."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from foredraft.cli.stack import LocalStack
from testing import stack as stacks
from testing import tiny_tokenizers
from testing.scripted_verifier import ScriptedVerifier, serving
from tests.gateway.scripted import TOKENIZER, Rig

# As Qwen's, with the names of functions alone.
TOOL_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}{% for"
    " message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% for call in"
    " message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor"
    " %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stacks.make_model(tmp_path_factory.mktemp("gateway") / "model")


@pytest.fixture(scope="session")
def stack(model: Path) -> Iterator[LocalStack]:
    with stacks.running_stack(model, max_body_bytes=200_000, max_queued_requests=256) as running:
        yield running


@pytest.fixture(scope="session")
def tool_gateway(
    stack: LocalStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """Starts a second gateway to the same verifier, whose chat template describes tools briefly.

    Yields its URL and the address of its gRPC.
    """
    template = tmp_path_factory.mktemp("tools") / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    verifier = next(service.health for service in stack.services if service.name == "verify")
    with (
        stacks.running_gateway(verifier, chat_template=template) as (url, address),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        stacks.eventually(lambda: client.get("/health").status_code == 200)
        yield url, address


@pytest.fixture(scope="session")
def tool_url(tool_gateway: tuple[str, str]) -> str:
    return tool_gateway[0]


@pytest.fixture(scope="session")
def http(stack: LocalStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.urls["http"], timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def client(stack: LocalStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=stack.urls["http"] + "/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="session")
def caller(tool_url: str) -> Iterator[openai.OpenAI]:
    """Returns a client of a model whose template knows tools."""
    with openai.OpenAI(base_url=tool_url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with the tokenizer of `scripted`."""
    directory = tmp_path_factory.mktemp("scripted") / "model"
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), directory)
    return directory


@pytest.fixture(scope="module")
def scripted_gateway(
    scripted_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    """Yields a gateway in front of a scripted verifier."""
    verifier = ScriptedVerifier(scripted_model, TOKENIZER.vocab_size)
    address = f"unix:{tmp_path_factory.mktemp('socket')}/v.sock"
    with serving(verifier, address), stacks.running_gateway(address) as addresses:
        rig = Rig(verifier, *addresses)
        stacks.eventually(rig.is_ready)
        yield rig
        rig.http.close()
        rig.channel.close()


@pytest.fixture
def rig(scripted_gateway: Rig) -> Rig:
    """Returns that gateway with a verifier that has forgotten earlier tests."""
    scripted_gateway.verifier.forget()
    stacks.eventually(scripted_gateway.is_ready)
    return scripted_gateway
