"""Draft algorithms by name. A drafter's dependencies are imported only when it is chosen."""

from collections.abc import Callable

from draft_service.drafters.base import Drafter
from foredraft.config.services import DraftConfig
from foredraft.errors import ConfigError


def _ngram(config: DraftConfig) -> Drafter:
    from draft_service.drafters.ngram import NgramDrafter

    return NgramDrafter(config)


def _standalone(config: DraftConfig) -> Drafter:
    from draft_service.drafters.standalone import StandaloneDrafter

    return StandaloneDrafter.load(config)


def _head(config: DraftConfig) -> Drafter:
    from draft_service.drafters.heads import HeadDrafter

    return HeadDrafter.load(config)


_DRAFTERS: dict[str, Callable[[DraftConfig], Drafter]] = {
    "NGRAM": _ngram,
    "STANDALONE": _standalone,
    "EAGLE": _head,
    "EAGLE3": _head,
    "MTP": _head,
    "DFLASH": _head,
    "DSPARK": _head,
    "PEAGLE": _head,
}


def create_drafter(config: DraftConfig) -> Drafter:
    """Creates the configured drafter and loads its weights.

    Raises:
        ConfigError: The algorithm needs no draft service.
        CheckpointError: The draft model's files cannot be used.
    """
    if len(config.algorithms) > 1:
        raise ConfigError(
            f"--speculative-algorithm {config.speculative_algorithm}: a draft service drafts in one"
            " way; start one for each"
        )
    make = _DRAFTERS.get(config.speculative_algorithm)
    if make is None:
        raise ConfigError(
            f"--speculative-algorithm {config.speculative_algorithm} needs no draft service; "
            f"it serves {', '.join(_DRAFTERS)}"
        )
    return make(config)
