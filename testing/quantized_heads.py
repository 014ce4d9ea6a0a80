"""Draft heads with quantised matrices, and the plain heads that these stand for."""

import re
from collections.abc import Callable

import torch

from testing.draft_heads import TinyHead
from testing.quantized_checkpoints import Format

# Matrices that heads are read with in a quantised form.
_MATRICES = re.compile(r"(.*\.)?(fc|input_proj|(self_attn|mlp)\.\w+_proj)\.weight")


def quantized(
    head: TinyHead, form: Format, keep: Callable[[str], bool] = lambda name: False
) -> tuple[TinyHead, TinyHead]:
    """Returns a head in a quantised format, and the plain one with its weights in float64.

    Args:
        keep: Returns whether the matrix of a weight stays plain.
    """
    stored: dict[str, torch.Tensor] = {}
    meant = dict(head.tensors)
    for name, weight in head.tensors.items():
        if not _MATRICES.fullmatch(name) or keep(name):
            stored[name] = weight
            continue
        tensors, meant[name] = form.pack(weight.double())
        stem = name.removesuffix("weight")
        stored |= {f"{stem}{part}": tensor.contiguous() for part, tensor in tensors.items()}
    config = head.config | {"quantization_config": form.config}
    return (
        TinyHead(head.algorithm, config, stored, head.num_streams),
        TinyHead(head.algorithm, head.config, meant, head.num_streams),
    )
