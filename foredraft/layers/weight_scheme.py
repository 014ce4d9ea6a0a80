"""The form in which a checkpoint stores quantised matrices of linear layers. Torch-free."""

from dataclasses import dataclass
from typing import Literal

Layout = Literal["fp8", "int8", "awq", "gptq", "packed", "gguf"]
Granularity = Literal["tensor", "channel", "group", "block"]
BLOCK = 128  # outputs and inputs that share a scale where scales go by blocks
UNIT = 256  # inputs of one of GGUF's K blocks, whose scales are multiples of one float


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Describes one quantised matrix [outputs, inputs]; a weight is (number - zero point) *
    scale.

    Attributes:
        layout: Set of tensors and order of the numbers in them; see `stored_weights`.
        bits: Number of bits of a number.
        granularity: Unit that shares a scale: the matrix, an output, a group of an output's inputs,
            or a block of 128 x 128.
        group_size: Number of inputs in a group; 0 for all but groups.
        has_zeros: Whether zero points are stored.
        has_order: Whether a tensor assigns each input to a group (act-order).
        zero_offset: Number that is added to stored zero points.
        scale_name: Last part of the scales' name.
        gguf_type: Type of a GGUF file's blocks, such as Q4_K; empty for other layouts.
    """

    layout: Layout
    bits: int
    granularity: Granularity
    group_size: int = 0
    has_zeros: bool = False
    has_order: bool = False
    zero_offset: int = 0
    scale_name: str = "weight_scale"
    gguf_type: str = ""

    def num_groups(self, num_inputs: int) -> int:
        """Returns the number of scales of an output with `num_inputs` inputs; the last group
        may be shorter.
        """
        size = BLOCK if self.granularity == "block" else self.group_size
        return -(-num_inputs // size) if size else 1

    def why_cut(self, split: str, count: int, whole: int) -> str:
        """Returns why a rank cannot hold a share of a matrix; empty where it can.

        Args:
            split: What ranks divide, "outputs" or "inputs".
            count: Number of outputs or inputs of each rank.
            whole: Number of those of the matrix.
        """
        if count == whole:
            return ""
        if split == "inputs" and self.has_order:
            return "act-order (desc_act) cannot be shared by inputs among ranks"
        # One scale for all stays whole on each rank.
        units = [unit for unit in self._units(split) if unit < whole and count % unit]
        if not units:
            return ""
        return (
            f"{count} {split} a rank are no multiple of {max(units)}, which are stored or scaled as"
            " one"
        )

    def _units(self, split: str) -> list[int]:
        """Returns how many outputs or inputs one element of each tensor holds or serves."""
        if self.layout == "gguf":
            return [GGUF_BLOCKS[self.gguf_type][0]] if split == "inputs" else []
        if self.layout in ("fp8", "int8"):
            return [BLOCK] if self.granularity == "block" else []
        word = [32 // self.bits]
        if split == "outputs":
            return word if self.has_zeros else []
        groups = [self.group_size] if self.group_size else []
        return groups if self.layout == "awq" else word + groups

    def __str__(self) -> str:
        if self.gguf_type:
            return self.gguf_type
        kind = f"fp{self.bits}" if self.layout == "fp8" else f"int{self.bits}"
        shared = {
            "tensor": "one scale a matrix",
            "channel": "one scale an output",
            "group": f"groups of {self.group_size}",
            "block": f"blocks of {BLOCK} x {BLOCK}",
        }[self.granularity]
        return f"{kind} ({shared})"


# Inputs and bytes of a block of GGUF's types.
GGUF_BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (UNIT, 144),
    "Q5_K": (UNIT, 176),
    "Q6_K": (UNIT, 210),
}
GGUF_ON_GPUS = ("Q4_0", "Q8_0")  # those that are not expanded there
# Numbers of 5 and 6 bits lie in 8.
GGUF_SCHEMES = {
    name: WeightScheme(
        "gguf",
        4 if name.startswith("Q4") else 8,
        "group",
        16 if name == "Q6_K" else 32,
        gguf_type=name,
    )
    for name in GGUF_BLOCKS
}
