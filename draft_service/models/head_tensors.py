"""Reads the tensors of a draft head's files, from safetensors or .bin."""

import pickle
from pathlib import Path
from types import TracebackType

import torch

from foredraft.errors import CheckpointError
from foredraft.layers.parameters import Target
from foredraft.models.weight_files import checkpoint_files, weight_files
from foredraft.models.weights import SafetensorsFile, TensorEntry, first_line


class CheckpointTensors:
    """Reads all tensors of a directory's weight files, one by one.

    Reads safetensors, else .bin without running code in it.

    Attributes:
        entries: Tensors by their name in the file; `begin` and `end` are meaningless for .bin
            files.

    Raises:
        CheckpointError: There are no weights, or they are broken or hold more than tensors.
    """

    def __init__(self, directory: Path) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self._files: list[SafetensorsFile] = []
        self._where: dict[str, SafetensorsFile | torch.Tensor] = {}
        bins = weight_files(directory, "pytorch_model.bin")
        has_safetensors = any(directory.glob("*.safetensors"))
        if bins and not has_safetensors:
            for path in bins:
                for name, tensor in _load_bin(path).items():
                    entry = TensorEntry(name, tensor.dtype, tuple(tensor.shape), 0, 0)
                    self._add(path, name, entry, tensor)
            return
        try:
            for path in checkpoint_files(directory):
                file = SafetensorsFile(path)
                self._files.append(file)
                for name, entry in file.entries.items():
                    self._add(path, name, entry, file)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "CheckpointTensors":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def copy_to(self, name: str, target: Target) -> None:
        """Copies a tensor to memory that it fits into, converting its type."""
        source = self._where[name]
        if isinstance(source, torch.Tensor):
            target.memory.copy_(source.reshape(target.memory.shape))
        else:
            source.copy_to(self.entries[name], target)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.__exit__(None, None, None)

    def _add(
        self, path: Path, name: str, entry: TensorEntry, source: SafetensorsFile | torch.Tensor
    ) -> None:
        if name in self.entries:
            raise CheckpointError(f"{path}: tensor {name} is there twice")
        self.entries[name], self._where[name] = entry, source


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format of torch before 1.6 cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, which could be code; it is not loaded"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {first_line(error)}") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in loaded.items()
    ):
        raise CheckpointError(f"{path}: not a dictionary of tensors")
    return loaded
