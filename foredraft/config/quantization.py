"""Flags that quantise a plain checkpoint's weights during loading."""

from dataclasses import dataclass
from pathlib import Path

from foredraft.config.options import option
from foredraft.errors import ConfigError

_GPU_FILES = ("nvidiactl", "dxg")  # under /dev; every CUDA driver on Linux has one of them


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Quantisation of the target's layers in a verifier."""

    quantization: str = option(
        "unquant",
        "Weights of the target's layers in memory, quantized while a plain checkpoint is loaded:"
        " fp8 and int8 with a scale for each output, int4 with zero points in groups. Embedding, LM"
        " head and norms stay as they are. A quantized checkpoint needs no flag.",
        choices=("unquant", "fp8", "int8", "int4"),
        otherwise="a quantized checkpoint says itself how it is: leave it out",
    )
    quantization_group_size: str | None = option(
        None,
        "Inputs that share a scale with --quantization int4, 128 when absent; a matrix whose inputs"
        " it does not divide takes 64 or 32.",
        choices=("32", "64", "128"),
    )

    @property
    def group_size(self) -> int | None:
        """The group size as a number; None where none is given."""
        return int(self.quantization_group_size) if self.quantization_group_size else None

    def check_quantization(self, is_cpu: bool) -> None:
        """Raises ConfigError for flags that do not go together, or not with the device."""
        if self.quantization_group_size and self.quantization != "int4":
            raise ConfigError(
                f"--quantization-group-size {self.quantization_group_size} has no use with"
                f" --quantization {self.quantization}: give --quantization int4 beside it, or leave"
                " it out"
            )
        if self.quantization == "fp8" and is_cpu:
            raise ConfigError(
                "--quantization fp8 does not go with a CPU, which has no products of 8-bit floats;"
                " int8 and int4 do"
            )


def has_gpu() -> bool:
    """Returns whether a driver of NVIDIA's is installed, without torch."""
    return any((Path("/dev") / name).exists() for name in _GPU_FILES)


def count_gpus() -> int:
    """Returns the number of NVIDIA's GPUs that have files of their own, without torch; 0 where they
    have none.
    """
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
