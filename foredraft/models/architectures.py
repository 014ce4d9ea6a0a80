"""Maps architectures to the classes that compute them.

A class's module is imported when a checkpoint of its kind is loaded.

Each architecture is a row of `families.FAMILIES`, which says how its config.json is read. One that
only differs from Llama in what a row can say needs no more. Another kind of layer (a mixture of
experts, a recurrent one) or other tensors are a class of its own, in a file of its own, and a line
here.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from foredraft.models.families import FAMILIES

if TYPE_CHECKING:
    from foredraft.models.decoder import DecoderModel


def _decoder() -> "type[DecoderModel]":
    from foredraft.models.decoder import DecoderModel

    return DecoderModel


_CLASSES: dict[str, Callable[[], "type[DecoderModel]"]] = dict.fromkeys(FAMILIES, _decoder)


def model_class(architecture: str) -> "type[DecoderModel]":
    """Returns the class of an architecture that `ModelConfig` has accepted."""
    return _CLASSES[architecture]()
