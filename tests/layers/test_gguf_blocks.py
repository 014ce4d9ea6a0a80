"""Blocks of GGUF files against gguf's own reading of them, bit for bit."""

import numpy as np
import pytest
import torch

from foredraft.cpu.products import KERNELS
from foredraft.layers.gguf import BlocksMethod, expanded_targets
from foredraft.layers.gguf_blocks import decode
from foredraft.layers.linear import Linear
from foredraft.layers.parameters import Target
from foredraft.layers.quantized import set_matrix
from foredraft.layers.quantized_matrix import dequantize
from foredraft.layers.stored_weights import StoredMatrix
from foredraft.layers.weight_scheme import GGUF_BLOCKS, GGUF_SCHEMES
from testing import gguf_files

CPU = torch.device("cpu")
kinds = pytest.mark.parametrize("kind", GGUF_SCHEMES)


def matrix(kind: str, num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of a matrix, and its weights in float32."""
    generator = np.random.default_rng(1)
    values = generator.normal(size=(num_outputs, num_inputs)).astype(np.float32)
    data = gguf_files.stored(kind, values, generator)
    blocks = torch.from_numpy(data).view(num_outputs, -1, GGUF_BLOCKS[kind][1])
    return blocks, torch.from_numpy(gguf_files.meant(kind, data))


def fill(targets: dict[str, Target], prefix: str, kind: str, blocks: torch.Tensor) -> None:
    target = targets[f"{prefix}weight_blocks"]
    assert target.takes(tuple(blocks.shape))
    target.memory.copy_(blocks.narrow(target.dim, target.first, target.memory.shape[target.dim]))
    if target.on_filled is not None:
        target.on_filled()


def test_every_type_is_tested() -> None:
    assert set(gguf_files.QUANTIZED) == set(GGUF_SCHEMES)
    for kind, sizes in GGUF_BLOCKS.items():
        assert gguf_files.GGML_QUANT_SIZES[gguf_files.GGMLQuantizationType[kind]] == sizes


@kinds
def test_weights_are_gguf_s(kind: str) -> None:
    blocks, want = matrix(kind, 70, 768)
    got = dequantize(decode(kind, blocks), GGUF_SCHEMES[kind].group_size, torch.float32)
    assert torch.equal(got, want)


@kinds
@pytest.mark.parametrize("kernel", range(len(KERNELS)), ids=KERNELS)
def test_products_use_the_very_weights(kind: str, kernel: int) -> None:
    """Rows of the identity give the weights themselves, in blocks of any number of rows."""
    blocks, want = matrix(kind, 70, 768)
    linear = Linear(768, 70, False, torch.float32, CPU)
    set_matrix(linear, decode(kind, blocks), GGUF_SCHEMES[kind], torch.float32, CPU)
    assert linear.weight.dtype == torch.uint8
    x = torch.eye(768)
    for first, count in ((0, 1), (1, 2), (3, 3), (250, 12), (500, 24), (0, 768)):
        got = linear.method.multiply(linear, x[first : first + count], kernel)
        assert torch.equal(got, want.T[first : first + count])
    outputs = torch.tensor([0, 69, 31, 32, 17, 17])
    assert torch.equal(linear.method.rows(linear, outputs), want[outputs])


@kinds
@pytest.mark.parametrize("kernel", range(len(KERNELS)), ids=KERNELS)
def test_rows_have_the_same_bits_in_any_number(kind: str, kernel: int) -> None:
    blocks, weight = matrix(kind, 200, 512)
    linear = Linear(512, 200, False, torch.float32, CPU)
    set_matrix(linear, decode(kind, blocks), GGUF_SCHEMES[kind], torch.float32, CPU)
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([linear.method.multiply(linear, row[None], kernel) for row in x])
    want = x.double() @ weight.double().T
    assert float((alone - want).abs().max() / want.abs().max()) < 1e-6
    for count in (2, 3, 5, 13, 40):
        assert torch.equal(linear.method.multiply(linear, x[:count], kernel), alone[:count])


@kinds
def test_memory_is_hardly_more_than_in_the_file(kind: str) -> None:
    blocks, _ = matrix(kind, 64, 1024)
    linear = Linear(1024, 64, False, torch.float32, CPU)
    set_matrix(linear, decode(kind, blocks), GGUF_SCHEMES[kind], torch.float32, CPU)
    kept = sum(one.numel() * one.element_size() for one in linear.parameters())
    numbers = 64 * 1024 * GGUF_SCHEMES[kind].bits // 8
    assert numbers < kept <= max(blocks.numel(), numbers * 1.16)


def test_parts_of_several_types_keep_them() -> None:
    """Neighbours of one type are one matrix."""
    parts = {"q_proj": "Q4_K", "k_proj": "Q4_K", "v_proj": "Q6_K", "g_proj": ""}
    schemes = [GGUF_SCHEMES.get(kind) for kind in parts.values()]
    sizes = dict(zip(parts, (40, 33, 70, 5), strict=True))
    linear = Linear(512, sizes, True, torch.float32, CPU, method=BlocksMethod(schemes))
    torch.nn.init.normal_(linear.bias)
    bias = linear.bias.clone()
    targets, want = linear.targets(""), []
    for name, kind in parts.items():
        if not kind:
            weight = torch.randn(5, 512)
            targets[f"{name}.weight"].memory.copy_(weight)
        else:
            blocks, weight = matrix(kind, sizes[name], 512)
            fill(targets, f"{name}.", kind, blocks)
        want.append(weight)
    linear.method.finish(linear)
    assert [piece.num_outputs for piece in linear.pieces] == [73, 70, 5]
    assert not linear.method.is_exact  # of float32's products
    x = torch.randn(4, 512)
    exact = x.double() @ torch.cat(want).double().T + bias.double()
    assert float((linear(x) - exact).abs().max() / exact.abs().max()) < 1e-6
    assert [name for name, _ in linear.named_parameters(recurse=False)] == []


@kinds
def test_ranks_read_their_own_blocks(kind: str) -> None:
    blocks, weight = matrix(kind, 48, 768)
    scheme = GGUF_SCHEMES[kind]
    for split, first, count in (("outputs", 24, 24), ("inputs", 256, 256)):
        stored = StoredMatrix(scheme, (48, 768), split, first, count, CPU)
        fill(stored.targets, "", kind, blocks)
        got = dequantize(stored.decode(), scheme.group_size, torch.float32)
        assert torch.equal(got, weight.narrow(0 if split == "outputs" else 1, first, count))
    with pytest.raises(ValueError, match="stored or scaled as one"):
        StoredMatrix(scheme, (48, 768), "inputs", 16, 16, CPU)


@kinds
def test_a_rank_s_share_of_a_table_can_be_expanded(kind: str) -> None:
    blocks, weight = matrix(kind, 50, 256)
    share = torch.empty(20, 256, dtype=torch.bfloat16)
    fill(expanded_targets(GGUF_SCHEMES[kind], 50, 30, share), "", kind, blocks)
    assert torch.equal(share, weight[30:].bfloat16())


def test_gpus_multiply_two_types_and_expand_the_rest() -> None:
    method = BlocksMethod([])
    method._dtype, method._device = torch.bfloat16, CPU
    for names in (["Q8_0", "Q8_0"], ["Q4_0"], ["Q4_0", "Q8_0"], ["Q6_K"], ["Q8_0", ""]):
        parts, want = [], []
        for name in names:
            blocks, weight = matrix(name or "Q4_1", 40, 256)
            scheme = GGUF_SCHEMES.get(name)
            parts.append((scheme, decode(name, blocks) if name else weight.bfloat16()))
            want.append(weight)
        kept, got = method._on_gpu(parts)
        is_kept = names in (["Q8_0", "Q8_0"], ["Q4_0"])
        assert (kept is not None) == is_kept
        if kept is not None:
            assert str(kept) == f"int{kept.bits} (groups of 32)"
            got = dequantize(got, 32, torch.bfloat16)
        assert torch.equal(got, torch.cat(want).bfloat16())
