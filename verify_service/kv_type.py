"""Type of the target's keys and values in the cache, and scales of 8-bit ones."""

import logging
from collections.abc import Sequence

import torch

from foredraft.config.services import VerifyConfig
from foredraft.errors import ConfigError
from foredraft.kvcache.paged_kv import Scales
from foredraft.models.decoder import DecoderModel
from foredraft.models.kv_scales import read_scales

logger = logging.getLogger(__name__)

_EIGHT_BIT = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_E4M3_CAPABILITY = (8, 9)  # lowest capability of cards that convert it (Ada)


def check_kv_flags(config: VerifyConfig, device: torch.device) -> None:
    """Raises ConfigError for flags that are known to be wrong before a model is loaded."""
    name = config.kv_cache_dtype
    if config.quantization_param_path and name not in _EIGHT_BIT:
        raise ConfigError(
            f"--quantization-param-path has no use with --kv-cache-dtype {name}: it holds scales"
            " for fp8_e4m3 and fp8_e5m2"
        )
    if name == "fp8_e4m3" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _E4M3_CAPABILITY:
            raise ConfigError(
                f"--kv-cache-dtype fp8_e4m3: {torch.cuda.get_device_name(device)} is"
                f" sm_{capability[0]}{capability[1]}, and it needs sm_89 or newer; fp8_e5m2 works"
                " there"
            )


def kv_type(config: VerifyConfig, weights: torch.dtype) -> torch.dtype:
    """Returns the type that `--kv-cache-dtype` selects for weights of a type.

    Raises:
        ConfigError: It does not go with them.
    """
    name = config.kv_cache_dtype
    if name == "auto":
        return weights
    if name == "bfloat16":
        if weights == torch.float16:
            raise ConfigError(
                "--kv-cache-dtype bfloat16 does not go with float16 weights: it would round what"
                " fits as it is; leave it at auto"
            )
        return torch.bfloat16
    return _EIGHT_BIT[name]


def kv_scales(
    config: VerifyConfig, model: DecoderModel, dtype: torch.dtype
) -> Sequence[Scales] | None:
    """Returns scales of each layer's keys and values for a cache of a type; None where it needs
    none.

    Raises:
        CheckpointError: The file of `--quantization-param-path` is not one of this model's scales.
    """
    scales = model.kv_scales
    if dtype.itemsize > 1:
        if bool((scales != 1).any()):
            logger.info(
                "the checkpoint has scales for an 8-bit KV cache: --kv-cache-dtype fp8_e4m3 uses"
                " them"
            )
        return None
    if config.quantization_param_path:
        scales = read_scales(config.quantization_param_path, model.config.num_layers)
    elif not bool((scales != 1).any()):
        logger.info("no scales for the KV cache: its numbers are rounded as they are")
    return [(keys, values) for keys, values in scales.tolist()]
