"""One running stack for all tests of the gateway."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from foredraft.cli.stack import LocalStack
from tests.support import stack as stacks


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stacks.make_model(tmp_path_factory.mktemp("gateway") / "model")


@pytest.fixture(scope="session")
def stack(model: Path) -> Iterator[LocalStack]:
    with stacks.running_stack(model, max_body_bytes=200_000, max_queued_requests=256) as running:
        yield running


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
