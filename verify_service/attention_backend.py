"""Selects the attention backend that a target's flags ask for."""

import logging

import torch

from foredraft.attention.base import AttentionBackend
from foredraft.attention.choice import exact_attention_for, target_attention_for
from foredraft.attention.exact_triton import ExactAttention
from foredraft.attention.paged_triton import TritonAttention
from foredraft.attention.sdpa import SdpaAttention
from foredraft.config.services import VerifyConfig
from foredraft.errors import ConfigError
from foredraft.models.decoder import DecoderModel
from verify_service.exactness import OFF, STRICT
from verify_service.flashinfer_prompts import FlashInferAttention, why_not

logger = logging.getLogger(__name__)

AUTO, FLASHINFER, SDPA, TRITON = "auto", "flashinfer", "sdpa", "triton"
_OF_DEVICE = {"cpu": (AUTO, SDPA), "cuda": (AUTO, TRITON, FLASHINFER)}


def check_attention_flags(config: VerifyConfig, device: torch.device) -> None:
    """Raises ConfigError for flags that are known to be wrong before a model is loaded."""
    asked, possible = config.attention_backend, _OF_DEVICE[device.type]
    if asked not in possible:
        raise ConfigError(
            f"--attention-backend {asked}: on a {device.type} device give {' or '.join(possible)}"
        )
    if asked == FLASHINFER and config.exactness != OFF:
        raise ConfigError(
            "--attention-backend flashinfer: with --exactness strict prompts and decode steps"
            " have one arithmetic, which is not flashinfer's; give --exactness off too"
        )


def choose_attention(
    config: VerifyConfig, model: DecoderModel, kv_dtype: torch.dtype, level: str
) -> AttentionBackend:
    """Returns the attention backend of a target; it stays the same while the target is served.

    Args:
        kv_dtype: Type of stored keys and values.
        level: Level of the target's exactness.

    Raises:
        ConfigError: flashinfer was asked for and cannot compute this target's prompts.
    """
    asked = config.attention_backend
    if asked == SDPA:
        return SdpaAttention()
    if asked == TRITON:
        return ExactAttention() if level == STRICT else TritonAttention()
    if asked == FLASHINFER or (asked == AUTO and level == OFF and model.device.type == "cuda"):
        is_windowed = any(window is not None for window in model.config.windows)
        why = why_not(model.dtype, kv_dtype, model.config.head_dim, is_windowed)
        if not why:
            logger.info("attention: prompts by flashinfer, everything else by triton")
            return FlashInferAttention()
        if asked == FLASHINFER:
            raise ConfigError(f"--attention-backend flashinfer: {why}")
        logger.info("attention: prompts not by flashinfer: %s", why)
    return (exact_attention_for if level == STRICT else target_attention_for)(model.device)
