"""Linear layers whose result for a row does not depend on the other rows of a step."""

import functools
import json
import logging
import os
from collections.abc import Hashable
from pathlib import Path

import torch
import torch.nn.functional as F

from foredraft.kernel_launch import no_collection
from foredraft.layers import exact_gemm
from foredraft.layers.linear import Linear, LinearMethod, ProductBytes

logger = logging.getLogger(__name__)

_FLOAT_BYTES = 4  # bytes of a number in float32
_LEAST_STEP = 8  # minimum distance between numbers of rows that cuBLAS computes
_ROWS_AT_ONCE = 512  # number of rows that random numbers are made for at a time
_OUTLIERS = 0.002  # part of the numbers of a proof that are a hundred times as large as the others


class Proofs:
    """Records for which shapes cuBLAS gives the bits of our own kernels.

    cuBLAS selects its kernel by the shape alone, so one product of random numbers in a captured
    graph and one outside of graphs decide. A file keeps the results for the next start.

    Args:
        path: File for one card, driver and set of libraries; None to keep nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._found: dict[str, bool] = {}
        self._known: dict[Hashable, bool] = {}
        if path is not None and path.is_file():
            try:
                found = json.loads(path.read_text())
                self._found = {str(key): found[key] is True for key in found}
            except (OSError, ValueError, TypeError) as error:
                logger.warning("%s is not read, cuBLAS is compared anew: %s", path, error)

    def holds(
        self, weight: torch.Tensor, bias: torch.Tensor | None, parts: int, num_rows: int
    ) -> bool:
        """Returns whether cuBLAS may compute this number of rows; while a graph is captured,
        whether that is known.

        Args:
            parts: See `exact_gemm.num_parts`; each is a product for cuBLAS.
        """
        shape = weight.dtype, weight.shape, bias is None, parts, num_rows
        if shape not in self._known:
            outputs, inputs = weight.shape
            dtype = str(weight.dtype).removeprefix("torch.")
            kind = " bias" if bias is not None else f" in {parts}" if parts > 1 else ""
            key = f"{dtype} {outputs}x{inputs}{kind} {num_rows}"
            if key not in self._found:
                if torch.cuda.is_current_stream_capturing():
                    return False
                self._found[key] = _is_equal(weight, bias, parts, num_rows)
                self._save()
            self._known[shape] = self._found[key]
        return self._known[shape]

    def _save(self) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self._path.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(self._found, indent=0, sort_keys=True))
            scratch.replace(self._path)
        except OSError as error:
            logger.warning("%s is not written: %s", self._path, error)
            self._path = None


class ExactMethod(LinearMethod):
    """Plain weights on a GPU: our own kernels, and cuBLAS where it gives the same bits."""

    is_exact = True

    def __init__(self, proofs: Proofs) -> None:
        self._proofs = proofs

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        return self.multiply(x, linear.weight, linear.bias)

    def apply_deferred(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        return self._in_parts(x, linear.weight, linear.bias)

    def apply_gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor | None:
        """See LinearMethod."""
        weight, bias = linear.weight, linear.bias
        if x.shape[0] > exact_gemm.SKINNY_ROWS or exact_gemm.num_parts(weight, bias) > 1:
            return None
        return exact_gemm.multiply(x, weight, bias, gated=True)

    def product_bytes(self, linear: Linear, num_rows: int, itemsize: int) -> ProductBytes:
        """See LinearMethod."""
        (outputs, inputs), size = linear.weight.shape, proven_size(num_rows)
        parts = exact_gemm.num_parts(linear.weight, linear.bias)
        result = size * outputs * (parts * _FLOAT_BYTES if parts > 1 else itemsize)
        padded = size * inputs * itemsize if size > num_rows else 0
        # Parts that are not left to a norm are added up in float32, and rounded.
        added = size * outputs * (_FLOAT_BYTES + itemsize) if parts > 1 else 0
        # cuBLAS is compared on random rows: their two results, and a byte for each 16 bits.
        trial = (size * itemsize + _ROWS_AT_ONCE) * inputs + result + result // 2
        return ProductBytes(result, max(padded, added), trial)

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes x W^T + b."""
        out = self._in_parts(x, weight, bias)
        # The norm that adds up parts rounds in the same way.
        return out if out.dim() == 2 else (out[0] + out[1]).to(x.dtype)

    def _in_parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes [num_rows, outputs], or float32 [2, num_rows, outputs] still to be added up."""
        parts, num_rows = exact_gemm.num_parts(weight, bias), x.shape[0]
        if parts > 1 and exact_gemm.sums_parts(weight, num_rows):
            return exact_gemm.multiply_parts(x, weight, None, parts)
        most = exact_gemm.SKINNY_ROWS if parts == 1 else exact_gemm.PART_ROWS
        if num_rows > most:
            size = proven_size(num_rows)
            if self._proofs.holds(weight, bias, parts, size):
                if size > num_rows:
                    x = F.pad(x, (0, 0, 0, size - num_rows))
                if parts == 1:
                    return F.linear(x, weight, bias)[:num_rows]
                return _library_parts(x, weight, parts)[:, :num_rows]
        if parts == 1:
            return exact_gemm.multiply(x, weight, bias)
        return exact_gemm.multiply_in_parts(x, weight, parts)


def _library_parts(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """Computes `exact_gemm.multiply_in_parts` by cuBLAS."""
    out = x.new_empty((parts, x.shape[0], weight.shape[0]), dtype=torch.float32)
    columns = zip(out, x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)
    for part, left, right in columns:
        torch.mm(left, right.t(), out_dtype=torch.float32, out=part)
    return out


def proven_size(num_rows: int) -> int:
    """Rounds a number of rows up to a multiple of a sixteenth of the next power of two, and of
    at least 8.
    """
    step = max(_LEAST_STEP, (1 << (num_rows - 1).bit_length()) // 16)
    return -(-num_rows // step) * step


@torch.no_grad()
def _is_equal(weight: torch.Tensor, bias: torch.Tensor | None, parts: int, num_rows: int) -> bool:
    """Compares all bits of a product of random numbers, some of them very large."""
    device = weight.device
    generator = torch.Generator(device=device).manual_seed(num_rows)
    x = weight.new_empty(num_rows, weight.shape[1])
    for part in x.split(_ROWS_AT_ONCE):
        part.normal_(generator=generator)
        large = torch.rand(part.shape, device=device, generator=generator) < _OUTLIERS
        part.mul_(torch.where(large, 100.0, 1.0))

    def by_library() -> torch.Tensor:
        if parts == 1:
            return F.linear(x, weight, bias)
        return _library_parts(x, weight, parts)

    if parts == 1:
        own = exact_gemm.multiply(x, weight, bias)
    else:
        own = exact_gemm.multiply_in_parts(x, weight, parts)
    if not torch.equal(own.view(torch.int16), by_library().view(torch.int16)):
        return False
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        captured = by_library()
        graph.capture_end()
        graph.replay()
    torch.cuda.current_stream(device).wait_stream(side)
    return torch.equal(own.view(torch.int16), captured.view(torch.int16))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all: cuBLAS keeps a workspace for every stream that it has ever worked on.
    return torch.cuda.Stream(device)
