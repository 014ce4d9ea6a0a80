"""Sizes that the device determines where no flag gives them: prompt tokens of a step, memory
for hidden states.
"""

import math

import torch

from foredraft.config.services import VerifyConfig

CPU_CHUNK = 512  # prompt tokens of a step
# GiB of a GPU from which on a step takes so many: prompts are read at the card's full speed from
# about 2,048 rows on, and each chunk more reads all weights and the context again.
GPU_CHUNKS = ((60, 8192), (35, 4096), (0, 2048))
LEAST_ARENA = 64 << 20


def chunk_size(config: VerifyConfig, device: torch.device) -> int:
    """Returns the maximum number of prompt tokens of a step: as configured, else suited to the
    device's memory.
    """
    if config.chunked_prefill_size is not None:
        return config.chunked_prefill_size
    if device.type != "cuda":
        return CPU_CHUNK
    total = torch.cuda.get_device_properties(device).total_memory
    return next(tokens for least, tokens in GPU_CHUNKS if total >= least << 30)


def max_decode_delay(config: VerifyConfig) -> float:
    """Returns the maximum seconds that prompts may add to a step beside running streams;
    infinite for 0.
    """
    return config.max_decode_delay_ms / 1000 if config.max_decode_delay_ms else math.inf


def arena_bytes(config: VerifyConfig, device: torch.device) -> int:
    """Returns the maximum bytes of hidden states on their way to a draft: as configured, else
    enough for a chunk's prompts.
    """
    if config.arena_mb is not None:
        return config.arena_mb << 20
    if device.type != "cuda":
        return LEAST_ARENA
    return LEAST_ARENA * max(1, chunk_size(config, device) // 1024)
