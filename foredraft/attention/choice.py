"""Which attention backend a device gets."""

import torch

from foredraft.attention.base import AttentionBackend
from foredraft.attention.paged_triton import TritonAttention
from foredraft.attention.sdpa import SdpaAttention


def attention_for(device: torch.device) -> AttentionBackend:
    """The fastest backend on a device."""
    return TritonAttention() if device.type == "cuda" else SdpaAttention()
