"""Layout of quantised matrices in checkpoints: their tensors, and the numbers packed in their
bits.

| layout | numbers | scales | zero points | | --- | --- | --- | --- | | fp8, int8 | `weight`
[outputs, inputs] | by tensor, output or block | none | | awq | `qweight` int32 [inputs, outputs /
8], outputs in the order 0 2 4 6 1 3 5 7 from the lowest bits | `scales` [groups, outputs] |
`qzeros` int32 [groups, outputs / 8], in the same order | | gptq | `qweight` int32 [inputs / 8,
outputs], inputs from the lowest bits | `scales` [groups, outputs] | `qzeros` int32 [groups, outputs
/ 8] | | packed | `weight_packed` int32 [outputs, inputs / 8], inputs from the lowest bits |
`weight_scale` [outputs, groups] | `weight_zero_point` int32 [outputs / 8, groups] | | gguf |
`weight_blocks` uint8 [outputs, blocks, bytes], see `gguf_blocks` | in the blocks | in the blocks |

With 8 bits four numbers are in an int32 instead of eight.
"""

from dataclasses import dataclass

import torch

from foredraft.layers import gguf_blocks
from foredraft.layers.parameters import Target
from foredraft.layers.quantized_matrix import Matrix
from foredraft.layers.weight_scheme import BLOCK, GGUF_BLOCKS, WeightScheme

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # positions of outputs 0 to 7 in an int32
_FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Describes a tensor of a stored matrix.

    Attributes:
        dims: For each dimension, what runs along it ("outputs", "inputs", "both" for their two
            numbers, or nothing), and how many of it one element holds or serves; of nothing, the
            size.
        is_optional: Whether a checkpoint may lack the tensor.
    """

    dtype: torch.dtype
    dims: tuple[tuple[str, int], ...]
    is_optional: bool = False

    def shape(self, num_outputs: int, num_inputs: int) -> tuple[int, ...]:
        """Returns the shape of the tensor for a matrix of this size."""
        sizes = {"outputs": num_outputs, "inputs": num_inputs, "both": 2}
        return tuple(-(-sizes[what] // each) if what else each for what, each in self.dims)

    def dim_of(self, split: str) -> tuple[int, int] | None:
        """Returns the dimension along which outputs or inputs run, and how many an element
        stands for; None where none does.
        """
        for dim, (what, each) in enumerate(self.dims):
            if what == split:
                return dim, each
        return None


def stored_tensors(scheme: WeightScheme, num_inputs: int) -> dict[str, StoredTensor]:
    """Returns the tensors of a matrix with this number of inputs, by the last part of their
    names.
    """
    group = scheme.group_size or num_inputs
    each = 32 // scheme.bits
    if scheme.layout == "gguf":
        size, num_bytes = GGUF_BLOCKS[scheme.gguf_type]
        blocks = (("outputs", 1), ("inputs", size), ("", num_bytes))
        return {"weight_blocks": StoredTensor(torch.uint8, blocks)}
    if scheme.layout in ("fp8", "int8"):
        kind = _FLOAT8 if scheme.layout == "fp8" else torch.int8
        dims: dict[str, tuple[tuple[str, int], ...]] = {
            "tensor": (("", 1),),
            "channel": (("outputs", 1), ("", 1)),
            "block": (("outputs", BLOCK), ("inputs", BLOCK)),
        }
        return {
            "weight": StoredTensor(kind, (("outputs", 1), ("inputs", 1))),
            scheme.scale_name: StoredTensor(torch.float32, dims[scheme.granularity]),
            # Scales and zero points of activations: rows are rounded by their own largest value
            # instead, or not at all.
            "input_scale": StoredTensor(torch.float32, (("", 1),), is_optional=True),
            "input_scale_ub": StoredTensor(torch.float32, (("", 1),), is_optional=True),
            "input_zero_point": StoredTensor(torch.int8, (("", 1),), is_optional=True),
        }
    ints = torch.int32
    if scheme.layout == "packed":
        found = {
            "weight_packed": StoredTensor(ints, (("outputs", 1), ("inputs", each))),
            "weight_scale": StoredTensor(torch.float32, (("outputs", 1), ("inputs", group))),
            "weight_shape": StoredTensor(torch.int64, (("both", 1),), is_optional=True),
        }
        if scheme.has_zeros:
            found["weight_zero_point"] = StoredTensor(ints, (("outputs", each), ("inputs", group)))
        if scheme.has_order:
            found["weight_g_idx"] = StoredTensor(ints, (("inputs", 1),))
        return found
    packed = (("inputs", 1), ("outputs", each))
    if scheme.layout == "gptq":
        packed = (("inputs", each), ("outputs", 1))
    found = {
        "qweight": StoredTensor(ints, packed),
        "qzeros": StoredTensor(ints, (("inputs", group), ("outputs", each))),
        "scales": StoredTensor(torch.float32, (("inputs", group), ("outputs", 1))),
    }
    if scheme.layout == "gptq":
        found["g_idx"] = StoredTensor(ints, (("inputs", 1),), is_optional=not scheme.has_order)
    return found


class StoredMatrix:
    """Memory for the tensors of one matrix, or of a rank's share of it.

    Args:
        shape: Number of outputs and inputs of the whole matrix.
        split: Dimension that ranks share: "outputs", "inputs" or "none".
        first, count: First output or input of the share, and their number.

    Attributes:
        targets: Targets of the tensors by the last part of their names.

    Raises:
        ValueError: The share begins or ends within numbers that are stored, or scaled, as one.
    """

    def __init__(
        self,
        scheme: WeightScheme,
        shape: tuple[int, int],
        split: str,
        first: int,
        count: int,
        device: torch.device,
    ) -> None:
        self._scheme = scheme
        whole = dict(zip(("outputs", "inputs"), shape, strict=True))
        mine = whole | ({split: count} if split in whole else {})
        self._shape = mine["outputs"], mine["inputs"]
        is_split = self._shape != shape
        if is_split and (why := scheme.why_cut(split, count, whole[split])):
            raise ValueError(why)
        self.targets: dict[str, Target] = {}
        for name, stored in stored_tensors(scheme, shape[1]).items():
            run = stored.dim_of(split)
            dim, begin, size = 0, 0, stored.shape(*shape)
            if is_split and run is not None:
                dim, each = run
                # One scale for all inputs stays whole on each rank.
                if each < whole[split]:
                    begin = first // each
                    size = (*size[:dim], count // each, *size[dim + 1 :])
            memory = torch.empty(size, dtype=stored.dtype, device=device)
            self.targets[name] = Target(
                memory,
                stored.shape(*shape),
                dim,
                begin,
                is_flat=True,
                is_optional=stored.is_optional,
            )

    def decode(self) -> Matrix:
        """Returns the numbers, scales and zero points that the tensors hold.

        Raises:
            ValueError: The tensors contradict each other.
        """
        tensors = {name: target.memory for name, target in self.targets.items()}
        scheme, (num_outputs, num_inputs) = self._scheme, self._shape
        if scheme.layout == "gguf":
            return gguf_blocks.decode(scheme.gguf_type, tensors["weight_blocks"])
        if scheme.layout in ("fp8", "int8"):
            scales = tensors[scheme.scale_name]
            if scheme.granularity == "block":
                scales = scales.repeat_interleave(BLOCK, 0)[:num_outputs]
            else:
                scales = scales.reshape(-1, 1).expand(num_outputs, 1)
            return Matrix(tensors["weight"], scales.contiguous())
        bits = scheme.bits
        if scheme.layout == "packed":
            numbers = _unpack(tensors["weight_packed"], bits, num_inputs)
            scales = tensors["weight_scale"]
            if scheme.has_zeros:
                zeros = _unpack(tensors["weight_zero_point"].t(), bits, num_outputs).t()
            else:
                zeros = torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8)
            return Matrix(numbers, scales, zeros.contiguous(), self._order(tensors))
        scales = tensors["scales"].t().contiguous()
        zeros = _unpack(tensors["qzeros"], bits, num_outputs)
        if scheme.layout == "gptq":
            numbers = _unpack(tensors["qweight"].t(), bits, num_inputs)
            zeros = (zeros + scheme.zero_offset).t().contiguous()
            return Matrix(numbers, scales, zeros, self._order(tensors))
        numbers = _in_awq_order(_unpack(tensors["qweight"], bits, num_outputs)).t().contiguous()
        return Matrix(numbers, scales, _in_awq_order(zeros).t().contiguous())

    def _order(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        if not self._scheme.has_order:
            return None
        name = "g_idx" if self._scheme.layout == "gptq" else "weight_g_idx"
        groups = tensors[name].long()
        size = self._scheme.group_size
        counts = torch.bincount(groups.clamp_min(0), minlength=self._scheme.num_groups(len(groups)))
        if int(groups.min()) < 0 or bool((counts != size).any()):
            raise ValueError(f"{name} does not put {size} inputs into each group")
        in_order = torch.arange(len(groups), device=groups.device) // size
        return None if torch.equal(groups, in_order) else groups


def _unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpacks int32 [rows, n] -> uint8 [rows, count]: numbers of `bits` bits from the lowest
    bits on.
    """
    as_bytes = packed.contiguous().view(torch.uint8)
    if bits == 4:
        as_bytes = torch.stack((as_bytes & 15, as_bytes >> 4), 2).flatten(1)
    return as_bytes[:, :count].contiguous()


def _in_awq_order(numbers: torch.Tensor) -> torch.Tensor:
    """Reorders [rows, n], groups of eight numbers as they lie in an int32, by output."""
    return numbers.view(len(numbers), -1, 8)[:, :, list(_AWQ_PLACES)].flatten(1)
