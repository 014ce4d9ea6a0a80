"""Extension fields that requests of the newer APIs may have, named as in chat completions."""

from typing import Any

from gateway.openai.schemas import Speculation
from gateway.sampling_fields import NEWER_HAVE, MoreSamplingFields


class ExtendedBody(MoreSamplingFields):
    """A body with the extensions."""

    seed: int | None = None
    min_tokens: int | None = None
    priority: int | None = None
    timeout: float | None = None
    speculation: Speculation | None = None
    request_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def extensions(self) -> dict[str, Any]:
        """Returns the given extensions and sampling parameters by name."""
        known = [*ExtendedBody.model_fields, *(NEWER_HAVE & type(self).model_fields.keys())]
        found = {name: getattr(self, name) for name in known}
        return {name: value for name, value in found.items() if value is not None}
