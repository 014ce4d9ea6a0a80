"""Fields that the newer APIs lack and every request may send beside theirs, as chat completions take them."""

from typing import Any

from gateway.http import Body, Items
from gateway.openai.schemas import Speculation


class ExtendedBody(Body):
    """A body with the extensions."""

    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    timeout: float | None = None
    speculation: Speculation | None = None
    request_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def extensions(self) -> dict[str, Any]:
        """The extensions that were given, by name."""
        found = {name: getattr(self, name) for name in ExtendedBody.model_fields}
        return {name: value for name, value in found.items() if value is not None}
