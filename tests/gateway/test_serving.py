"""What a gateway loads before a verifier has answered."""

import asyncio

from foredraft.config.services import GatewayConfig
from foredraft.models.registry import resolve_model_path
from gateway.serving import Serving
from gateway.verifier_pool import VerifierPool


def test_a_tokenizer_that_a_flag_names_is_loaded_before_a_verifier_answers() -> None:
    path = str(resolve_model_path("foredraft-demo"))

    async def check() -> None:
        pool = VerifierPool(())
        assert not Serving(GatewayConfig(), pool).can_open
        serving = Serving(GatewayConfig(tokenizer_path=path), pool)
        assert serving.can_open
        await serving.open()
        assert serving.tokenizer.encode("def")
        assert not serving.is_ready
        await serving.close()

    asyncio.run(check())
