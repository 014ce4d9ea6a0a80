"""Exactness of a target: whether a row's bits depend on the rest of the step, and on which
versions.
"""

import ctypes
import hashlib
import importlib.metadata
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from foredraft.layers import conversions
from foredraft.models.decoder import DecoderModel
from foredraft.models.registry import cache_dir

logger = logging.getLogger(__name__)

STRICT, OFF, FLOAT32 = "strict", "off", "float32"
ARITHMETIC = 2  # raised when our own kernels add up in another order


@dataclass(frozen=True, slots=True)
class Exactness:
    """Guarantees for the texts of a served target.

    Attributes:
        level: `strict`: a row's bits depend only on its own tokens. `float32`: rows differ in their
            last bits, and texts differ only at a tie of that size. `off`: 16 bits, where texts may
            part wherever two tokens are near each other.
        depends_on: Names and versions that texts may change with, by kind.
    """

    level: str
    depends_on: dict[str, str]

    @property
    def fingerprint(self) -> str:
        """sha256 of `depends_on`, in hexadecimal: servers of equal ones give equal texts where the
        level is `strict`.
        """
        words = json.dumps({"level": self.level} | self.depends_on, sort_keys=True)
        return hashlib.sha256(words.encode()).hexdigest()


def make_exact(
    model: DecoderModel,
    asked: str,
    checksum: str = "",
    num_ranks: int = 1,
    kv_cache_dtype: str = "auto",
) -> Exactness:
    """Converts a loaded target to the requested exactness, before anything is computed.

    Args:
        asked: Value of `--exactness`.
        checksum: Checksum of the model's files.
        num_ranks: Number of ranks that share the model.
        kv_cache_dtype: Value of `--kv-cache-dtype`.
    """
    machine = _machine(model)
    depends_on = machine | {
        "model": checksum,
        "quantization": str(model.config.quantization or "none"),
        "kv_cache_dtype": machine["dtype"] if kv_cache_dtype == "auto" else kv_cache_dtype,
        "tensor_parallel_size": str(num_ranks),
    }
    if model.dtype == torch.float32 and kv_cache_dtype == "auto":
        return Exactness(FLOAT32, depends_on)
    if asked == OFF:
        return Exactness(OFF, depends_on)
    if model.dtype == torch.float32:  # what is rounded may differ in its last bits
        logger.warning(
            "--exactness strict does not go with float32 and --kv-cache-dtype %s: texts may part"
            " at near ties; auto keeps them together",
            kv_cache_dtype,
        )
        return Exactness(OFF, depends_on)
    if model.device.type == "cpu":
        logger.warning(
            "--exactness strict does not go with 16 bits on a CPU: texts may part at near ties; "
            "--dtype float32 keeps them together"
        )
        return Exactness(OFF, depends_on)
    inexact = conversions.make_exact(model, _proof_file(machine))
    if inexact:
        logger.warning(
            "--exactness strict: %d matrices are multiplied in another order with the number of"
            " rows, so texts may part at near ties: %s",
            len(inexact),
            ", ".join(inexact[:3]),
        )
        return Exactness(OFF, depends_on)
    return Exactness(STRICT, depends_on)


def _machine(model: DecoderModel) -> dict[str, str]:
    """Returns the properties besides the model that bits depend on."""
    found = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "arithmetic": str(ARITHMETIC),
    }
    if model.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(model.device)
        found |= {
            "card": f"{torch.cuda.get_device_name(model.device)} sm_{major}{minor}",
            "driver": _driver(),
            "cublas": _cublas(),
            "triton": importlib.metadata.version("triton"),
        }
    else:
        found["cpu"] = torch.backends.cpu.get_cpu_capability()
    return found


def _driver() -> str:
    file = Path("/sys/module/nvidia/version")
    return file.read_text().strip() if file.is_file() else "unknown"


def _cublas() -> str:
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return str(ctypes.CDLL(f"libcublasLt.so.{major}").cublasLtGetVersion())
    except OSError:
        return f"of CUDA {torch.version.cuda}"


def _proof_file(machine: dict[str, str]) -> Path:
    words = json.dumps({name: machine[name] for name in machine if name != "dtype"})
    return cache_dir() / f"products-{hashlib.sha256(words.encode()).hexdigest()[:16]}.json"
