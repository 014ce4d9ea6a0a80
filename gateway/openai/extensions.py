"""What the bodies of the newer APIs share: extension fields, named as in chat completions, and
objects whose kind decides about their fields.
"""

from typing import Any

from pydantic import ConfigDict

from foredraft.errors import InvalidRequest
from gateway.bodies import Body
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


class Loose(Body):
    """An object whose kind decides about its fields."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def refuse_others(self, where: str) -> None:
        """Raises InvalidRequest, naming the field below `where`, where a field is not known."""
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                raise InvalidRequest(f"{where}.{name[:40]}", "is not a field that can be honoured")
