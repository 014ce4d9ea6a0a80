"""Loads the target model as configured: whole, or the share of one of several ranks."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from foredraft.attention.base import AttentionBackend
from foredraft.attention.choice import device_for
from foredraft.config.services import VerifyConfig
from foredraft.cpu.threads import num_cores, use_threads
from foredraft.layers.linear import Linear
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import load_model
from foredraft.models.provenance import model_checksum
from foredraft.models.registry import resolve_model_path
from foredraft.parallel.group import SINGLE, Group
from verify_service.attention_backend import check_attention_flags, choose_attention
from verify_service.exactness import Exactness, make_exact
from verify_service.executor.ranks.workers import Ranks
from verify_service.kv_type import check_kv_flags, kv_type
from verify_service.sizes import chunk_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded target model, or a rank's share of it, and the name it is served under.

    Attributes:
        attention: Attention backend of the model's forwards.
        ranks: The other ranks, for rank 0 of several.
    """

    model: DecoderModel
    path: Path
    name: str
    device: torch.device
    weight_bytes: int
    checksum: str
    exactness: Exactness
    attention: AttentionBackend
    ranks: Ranks | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.model.dtype


def load_share(config: VerifyConfig, group: Group = SINGLE) -> Target:
    """Loads the target model as configured, or a rank's part of it.

    Args:
        group: Ranks that share the model; each loads its own part.

    Raises:
        CheckpointError: The path or the files are wrong.
        ConfigError: A flag asks for what this machine does not have.
    """
    device = device_for(config.device)
    check_kv_flags(config, device)
    check_attention_flags(config, device)
    config.check_quantization(device.type == "cpu")
    if device.type == "cpu":
        use_threads(config.num_threads or max(1, num_cores() // group.size))
    path = resolve_model_path(config.model_path, config.revision)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    if dtype is None and device.type == "cpu":
        # bf16 is slow on most CPUs and gains nothing from verifying several rows.
        dtype = torch.float32
    started = time.monotonic()
    model = load_model(
        path,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        group=group,
        quantization=config.quantization,
        quantization_group_size=config.group_size,
    )
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    name = config.served_model_name or Path(config.model_path).name.removesuffix(".gguf")
    logger.info(
        "loaded %s: %.1f M parameters, %.0f MiB, in %.1f s",
        name,
        _num_parameters(model) / 1e6,
        weight_bytes / 2**20,
        time.monotonic() - started,
    )
    if model.config.quantization is not None:
        vocabulary = "embedding, LM head"
        logger.info(
            "weights of %s: %s; %snorms and what the checkpoint leaves out: %s",
            f"layers, {vocabulary}" if model.embedding.table is not None else "the layers",
            model.config.quantization,
            "" if model.embedding.table is not None else f"{vocabulary}, ",
            str(model.dtype).removeprefix("torch."),
        )
    # Beside a chunk of a prompt the step has rows of running sequences.
    model.reserve(chunk_size(config, device) * 9 // 8)
    own_sum = model_checksum(path)
    exactness = make_exact(model, config.exactness, own_sum, group.size, config.kv_cache_dtype)
    logger.info("exactness: %s, fingerprint %s", exactness.level, exactness.fingerprint)
    attention = choose_attention(config, model, kv_type(config, model.dtype), exactness.level)
    return Target(model, path, name, device, weight_bytes, own_sum, exactness, attention)


def _num_parameters(model: DecoderModel) -> int:
    """Returns the number of weights, however many bits each takes."""
    total = 0
    for module in model.modules():
        if isinstance(module, Linear) and not any(module.children()):
            total += module.num_outputs * module.num_inputs
            total += 0 if module.bias is None else module.bias.numel()
        else:
            total += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return total
