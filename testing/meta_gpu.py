"""The code of a GPU without one: tensors on torch's meta device, which have sizes and no memory,
and kernels that do nothing. Counts the bytes of the tensors that are there at a time.
"""

import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foredraft import device_limits
from foredraft.kernel_launch import VARIANTS
from foredraft.layers import exact_gemm, exact_linear, skinny_gemm
from verify_service.executor.captured import two_phase_tables

META = torch.device("meta")
UNITS = 132  # of an H200
KERNELS = {
    "foredraft.attention": (
        "exact_kernels",
        "exact_fold_kernels",
        "triton_kernels",
        "split_kv_kernels",
    ),
    "foredraft.layers": (
        "triton_kernels",
        "skinny_gemm_kernels",
        "exact_gemm_kernels",
        "fp8_kernels",
        "words_kernels",
    ),
    "foredraft.sampling": ("sampling_kernels", "filter_kernels"),
    "verify_service.executor.kernels": ("step_kernels", "tree_kernels", "adjust_kernels"),
}


class Peak(TorchDispatchMode):
    """Counts the bytes of a device's tensors that operations make inside the `with` block.

    Attributes:
        live: Bytes that are there now.
        most: The most that were there at a time.
    """

    def __init__(self, device: torch.device = META) -> None:
        super().__init__()
        self._device = device
        self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {self._key(one) for one in tree_leaves((args, kwargs)) if _is_tensor(one)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            is_new = _is_tensor(one) and self._key(one) not in given | self._known
            if is_new and one.device == self._device:
                self._count(one.untyped_storage())
        return result

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += size
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


class _OnGpu(TorchFunctionMode):
    """Says of every tensor that it is on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        return func(*args, **(kwargs or {}))


class _Kernel:
    """Launches nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: None


class _Kernels(types.ModuleType):
    """A module of such kernels."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel()


class _Descriptor:
    """In place of Triton's: a type, since Triton keeps it where it is imported meanwhile."""

    @staticmethod
    def from_tensor(*args: object) -> None:
        """Describes nothing."""


@contextmanager
def meta_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs the code for an H200 on meta tensors."""
    for package, names in KERNELS.items():
        for name in names:
            module = _Kernels(name)
            monkeypatch.setitem(sys.modules, f"{package}.{name}", module)
            monkeypatch.setattr(sys.modules[package], name, module, raising=False)
    descriptors: Any = types.ModuleType("triton.tools.tensor_descriptor")
    descriptors.TensorDescriptor = _Descriptor
    monkeypatch.setitem(sys.modules, descriptors.__name__, descriptors)
    monkeypatch.setattr(device_limits, "INTERPRETED_UNITS", UNITS)
    monkeypatch.setattr(exact_gemm, "is_hopper", lambda device: True)
    monkeypatch.setattr(skinny_gemm, "supports", _supports)
    monkeypatch.setattr(exact_linear, "_library_parts", _library_parts)
    monkeypatch.setattr(torch, "_scaled_mm", _scaled_mm)
    monkeypatch.setattr(two_phase_tables, "pinned", torch.zeros)
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    with _OnGpu():
        yield


def _supports(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return not VARIANTS.are_few and 0 < x.shape[0] <= skinny_gemm.MOST_ROWS


def _library_parts(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    return x.new_empty((parts, x.shape[0], weight.shape[0]), dtype=torch.float32)


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype, **options: Any
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@contextmanager
def _nothing(*args: object) -> Iterator[None]:
    yield


def trial_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the comparison with cuBLAS run on meta tensors; all bits are equal."""
    graph = types.SimpleNamespace(
        capture_begin=lambda **options: None, capture_end=lambda: None, replay=lambda: None
    )
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    generator = types.SimpleNamespace(manual_seed=lambda seed: None)
    monkeypatch.setattr(torch, "Generator", lambda device: generator)
    monkeypatch.setattr(torch, "equal", lambda a, b: (a == b) is not None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "stream", _nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(exact_linear, "_side_stream", lambda device: stream)
