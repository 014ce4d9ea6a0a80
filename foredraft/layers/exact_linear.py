"""Linear layers whose result for a row does not depend on the other rows of a step."""

import functools
import json
import logging
import math
import os
from collections.abc import Hashable
from pathlib import Path

import torch
import torch.nn.functional as F

from foredraft.kernel_launch import VARIANTS, no_collection, times_on_gpu
from foredraft.layers import exact_gemm
from foredraft.layers.heads import Heads
from foredraft.layers.linear import Linear, LinearMethod, ProductBytes
from foredraft.layers.normed import RoundedRows
from foredraft.layers.padded_rows import TIMED_ROWS, proven_size, with_more

logger = logging.getLogger(__name__)

_FLOAT_BYTES = 4  # bytes of a number in float32
_ROWS_AT_ONCE = 512  # number of rows that random numbers are made for at a time
_OUTLIERS = 0.002  # part of the numbers of a proof that are a hundred times as large as the others
_LIBRARY_SIZES = 3  # numbers of rows that are tried for cuBLAS
_WORTH = 0.92  # of cuBLAS's time for about as many rows: less is noise
_REPLAYS = 5
_COPIED_BYTES = 4e6  # bytes that rows that are added, or parts, move in a microsecond
_OWN = 0  # in place of a number of rows: our own kernels


class Proofs:
    """Records for which shapes cuBLAS gives the bits of our own kernels, and which is faster.

    cuBLAS selects its kernel by the shape alone, so one product of random numbers in a captured
    graph and one outside of graphs decide. For some numbers of rows it selects badly: 448 rows of a
    matrix took 1.7 times as long as 512. So our own kernel and somewhat more rows are timed too. A
    file keeps the results for the next start.

    Args:
        path: File for one card, driver and set of libraries; None to keep nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        # Microseconds of products; None where cuBLAS gives other bits.
        self._found: dict[str, float | None] = {}
        self._sizes: dict[Hashable, int] = {}
        if path is not None and path.is_file():
            try:
                found = json.loads(path.read_text())
                self._found = {
                    str(key): None if found[key] is None else float(found[key]) for key in found
                }
            except (OSError, ValueError, TypeError) as error:
                logger.warning("%s is not read, cuBLAS is compared anew: %s", path, error)

    def size(
        self, weight: torch.Tensor, bias: torch.Tensor | None, parts: int, num_rows: int
    ) -> int:
        """Returns the number of rows at which cuBLAS computes a product; 0 where our own kernels
        do, or where a graph is captured and nothing is known.

        Args:
            parts: See `exact_gemm.num_parts`; each is a product for cuBLAS.
        """
        if _is_ours(weight, parts, num_rows):
            return _OWN
        shape = weight.dtype, weight.shape, bias is None, parts, num_rows
        if shape not in self._sizes:
            sizes = library_sizes(num_rows)
            first = sizes[0]
            times = {size: self._time(weight, bias, parts, size, num_rows) for size in sizes}
            if num_rows <= TIMED_ROWS:
                # Our kernels take about as long for all numbers of rows that cuBLAS pads alike.
                times[_OWN] = self._time(weight, bias, parts, _OWN, first)
            known = {size: time for size, time in times.items() if time is not None}
            if len(known) < len(times):
                return _OWN
            best = min(known, key=lambda size: known[size])
            if known[best] > _WORTH * known[first]:
                best = first
            self._sizes[shape] = best if known[best] < math.inf else _OWN
        return self._sizes[shape]

    def _time(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        parts: int,
        size: int,
        num_rows: int,
    ) -> float | None:
        """Returns microseconds of a product of `num_rows` rows that cuBLAS computes as `size`
        ones; infinity where it gives other bits, None where a graph is captured and nothing known.
        """
        outputs, inputs = weight.shape
        dtype = str(weight.dtype).removeprefix("torch.")
        kind = " bias" if bias is not None else f" in {parts}" if parts > 1 else ""
        key = f"{dtype} {outputs}x{inputs}{kind} {size or f'{num_rows} own'}"
        if key not in self._found:
            if torch.cuda.is_current_stream_capturing():
                return None
            self._found[key] = _measured(weight, bias, parts, size, size or num_rows)
            self._save()
        found = self._found[key]
        if found is None:
            return math.inf
        # Rows may be copied where some are added.
        copied = 2 * size * inputs * weight.itemsize if size > num_rows else 0
        return found + copied / _COPIED_BYTES

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
    has_heads = True

    def __init__(self, proofs: Proofs, early_rows: int = 0) -> None:
        self._proofs = proofs
        self.early_rows = early_rows

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

    def apply_heads(
        self, linear: Linear, x: torch.Tensor, rounded: RoundedRows | None, heads: Heads
    ) -> torch.Tensor | None:
        """See LinearMethod."""
        weight, bias = linear.weight, linear.bias
        fits = x.shape[0] <= exact_gemm.SKINNY_ROWS and not VARIANTS.are_few
        fits = fits and heads.keys.shape[2] % exact_gemm.HEAD_MULTIPLE == 0
        if not fits or exact_gemm.num_parts(weight, bias) > 1:
            return None
        return exact_gemm.multiply_to_heads(x, weight, bias, heads)

    def product_bytes(self, linear: Linear, num_rows: int, itemsize: int) -> ProductBytes:
        """See LinearMethod."""
        (outputs, inputs), size = linear.weight.shape, library_sizes(num_rows)[-1]
        parts = exact_gemm.num_parts(linear.weight, linear.bias)
        if _is_ours(linear.weight, parts, num_rows):
            return ProductBytes(num_rows * outputs * itemsize)
        result = size * outputs * (parts * _FLOAT_BYTES if parts > 1 else itemsize)
        # More rows have room behind them.
        padded = size * inputs * itemsize if num_rows < size and num_rows <= TIMED_ROWS else 0
        # Parts that are not left to a norm are added up in place, and rounded.
        added = size * outputs * itemsize if parts > 1 else 0
        # cuBLAS is compared on random rows: their two results, and a byte for each 16 bits.
        trial = (size * itemsize + _ROWS_AT_ONCE) * inputs + result + result // 2
        return ProductBytes(result, max(padded, added), trial)

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes x W^T + b."""
        out = self._in_parts(x, weight, bias)
        # The norm that adds up parts rounds in the same way.
        return out if out.dim() == 2 else out[0].add_(out[1]).to(x.dtype)

    def _in_parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes [num_rows, outputs], or float32 [2, num_rows, outputs] still to be added up."""
        parts, num_rows = exact_gemm.num_parts(weight, bias), x.shape[0]
        if num_rows > (exact_gemm.SKINNY_ROWS if parts == 1 else exact_gemm.PART_ROWS):
            size = self._proofs.size(weight, bias, parts, num_rows)
            if size:
                return _by_library(x, weight, bias, parts, size)[..., :num_rows, :]
        return _by_own(x, weight, bias, parts)


def _is_ours(weight: torch.Tensor, parts: int, num_rows: int) -> bool:
    """Returns whether our own kernels compute so many rows, without a trial."""
    return num_rows > TIMED_ROWS and parts > 1 and exact_gemm.sums_parts(weight, num_rows)


def _by_own(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int
) -> torch.Tensor:
    """Computes `ExactMethod._in_parts` by our own kernels."""
    if parts == 1:
        return exact_gemm.multiply(x, weight, bias)
    if exact_gemm.sums_parts(weight, x.shape[0]):
        return exact_gemm.multiply_parts(x, weight, None, parts)
    return exact_gemm.multiply_in_parts(x, weight, parts)


def _by_library(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int, num_rows: int
) -> torch.Tensor:
    """Computes `ExactMethod._in_parts` by cuBLAS, and any numbers for rows beyond those of `x`."""
    if num_rows > x.shape[0]:
        x = with_more(x, num_rows)
    return F.linear(x, weight, bias) if parts == 1 else _library_parts(x, weight, parts)


def _library_parts(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """Computes `exact_gemm.multiply_in_parts` by cuBLAS."""
    out = x.new_empty((parts, x.shape[0], weight.shape[0]), dtype=torch.float32)
    columns = zip(out, x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)
    for part, left, right in columns:
        torch.mm(left, right.t(), out_dtype=torch.float32, out=part)
    return out


def library_sizes(num_rows: int) -> list[int]:
    """Returns the numbers of rows at which cuBLAS may compute this many, in ascending order."""
    sizes = [proven_size(num_rows)]
    while num_rows <= TIMED_ROWS and len(sizes) < _LIBRARY_SIZES:
        sizes.append(proven_size(sizes[-1] + 1))
    return sizes


@torch.no_grad()
def _measured(
    weight: torch.Tensor, bias: torch.Tensor | None, parts: int, size: int, num_rows: int
) -> float | None:
    """Times a product of random numbers, some of them very large, in a captured graph.

    Args:
        size: `num_rows` for cuBLAS, or `_OWN`.

    Returns:
        Microseconds, those for adding up parts included, or 0 for so many rows that no time decides
        anything; None where cuBLAS gives other bits than our own kernels, in a graph or outside.
    """
    device = weight.device
    generator = torch.Generator(device=device).manual_seed(num_rows)
    x = weight.new_empty(num_rows, weight.shape[1])
    for part in x.split(_ROWS_AT_ONCE):
        part.normal_(generator=generator)
        large = torch.rand(part.shape, device=device, generator=generator) < _OUTLIERS
        part.mul_(torch.where(large, 100.0, 1.0))

    def product() -> torch.Tensor:
        if size == _OWN:
            return _by_own(x, weight, bias, parts)
        return _by_library(x, weight, bias, parts, size)

    if size == _OWN:
        wanted = product()
    elif parts == 1:
        wanted = exact_gemm.multiply(x, weight, bias)
    else:
        wanted = exact_gemm.multiply_in_parts(x, weight, parts)
    if size != _OWN and not _same_bits(product(), wanted):
        return None
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        captured = product()
        graph.capture_end()
        graph.replay()
        decides = num_rows <= library_sizes(TIMED_ROWS)[-1]
        microseconds = min(times_on_gpu(graph.replay, _REPLAYS)) * 1e3 if decides else 0.0
    torch.cuda.current_stream(device).wait_stream(side)
    if not _same_bits(captured, wanted):
        return None
    added = captured.numel() * captured.itemsize if captured.dim() == 3 else 0
    return microseconds + added / _COPIED_BYTES


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.view(torch.int16), y.view(torch.int16))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all: cuBLAS keeps a workspace for every stream that it has ever worked on.
    return torch.cuda.Stream(device)
