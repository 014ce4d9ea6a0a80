"""Selects the device that models run on, and its attention backend."""

import logging

import torch

from foredraft.attention.base import AttentionBackend
from foredraft.attention.cpu import CpuAttention
from foredraft.attention.exact_triton import ExactAttention
from foredraft.attention.hopper_prompts import HopperAttention, has_kernel
from foredraft.attention.hopper_segments import HopperSegments
from foredraft.attention.paged_triton import TritonAttention
from foredraft.errors import ConfigError

OLDEST_GPU = (8, 0)  # lowest compute capability that Triton compiles for

logger = logging.getLogger(__name__)


def attention_for(device: torch.device) -> AttentionBackend:
    """Returns the attention backend of drafts on a device."""
    return TritonAttention() if device.type == "cuda" else CpuAttention()


def target_attention_for(device: torch.device) -> AttentionBackend:
    """Returns the fastest attention backend of a target on a device."""
    attention = attention_for(device)
    return HopperAttention(attention) if has_kernel(device) else attention


def exact_attention_for(device: torch.device) -> AttentionBackend:
    """Returns the backend whose result for a row depends on no other row.

    The CPU has only one backend, which serves both purposes.
    """
    if has_kernel(device):
        return HopperAttention(ExactAttention(HopperSegments()))
    return ExactAttention() if device.type == "cuda" else CpuAttention()


def device_for(asked: str) -> torch.device:
    """Returns the device that models run on.

    Args:
        asked: `cuda`, `cpu`, or `auto` for a GPU if this process sees one that will do.

    Raises:
        ConfigError: A GPU was asked for and there is none that will do.
    """
    why_not = "" if asked == "cpu" else _why_no_gpu()
    if why_not and asked == "cuda":
        raise ConfigError(f"--device cuda: {why_not}")
    if why_not and torch.cuda.is_available():
        logger.warning("%s: running on the CPU", why_not)
    return torch.device("cpu" if asked == "cpu" or why_not else "cuda")


def _why_no_gpu() -> str:
    if not torch.cuda.is_available():
        return "this process sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability >= OLDEST_GPU:
        return ""
    name = torch.cuda.get_device_name()
    return f"{name} is sm_{capability[0]}{capability[1]}, and the kernels need sm_80 or newer"
