"""Products that give a row the same bits beside any number of others; on a GPU, or in Triton's
interpreter for what they compute.
"""

import json

import pytest
import torch
import torch.nn.functional as F

from foredraft.layers import exact_gemm, exact_linear, fused, skinny_gemm
from foredraft.layers.exact_linear import ExactMethod, Proofs
from foredraft.layers.linear import Linear
from foredraft.layers.padded_rows import proven_size, with_more
from testing.triton_device import DEVICE, INTERPRETED, needs_gpu, needs_triton

ROWS = (1, 2, 3, 8, 16, 17, 33, 64, 65, 100, 128, 200, 256, 300, 512, 777, 1024)


def numbers(*shape, dtype=torch.bfloat16, outliers=0.0):
    generator = torch.Generator(device=DEVICE).manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator, device=DEVICE)
    large = torch.rand(shape, generator=generator, device=DEVICE) < outliers
    return torch.where(large, 100 * x, x).to(dtype)


def same_bits(one, other):
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("num_rows", [1, 5, 64, 65])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (40, 100)])
def test_multiplies(num_rows, outputs, inputs):
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    x, weight = numbers(num_rows, inputs, dtype=dtype), numbers(outputs, inputs, dtype=dtype)
    bias = numbers(outputs, dtype=dtype)
    want = x.double() @ weight.double().t()
    tolerance = {"rtol": 1e-2, "atol": 5e-2}
    got = exact_gemm.multiply(x, weight, None)
    torch.testing.assert_close(got.double(), want, **tolerance)
    got = exact_gemm.multiply(x, weight, bias)
    torch.testing.assert_close(got.double(), want + bias.double(), **tolerance)
    if num_rows <= exact_gemm.SKINNY_ROWS:
        gate, up = (want + bias.double()).chunk(2, 1)
        got = exact_gemm.multiply(x, weight, bias, gated=True)
        torch.testing.assert_close(got.double(), F.silu(gate) * up, rtol=3e-2, atol=0.2)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(4096, 4096), (4096, 14336), (6144, 4096), (3584, 18944), (960, 320)]
)
def test_a_row_has_the_same_bits_beside_any_number(outputs, inputs, has_bias, dtype):
    linear = Linear(inputs, outputs, has_bias, dtype, DEVICE, method=ExactMethod(Proofs()))
    linear.weight.data.copy_(numbers(outputs, inputs, dtype=dtype).mul_(0.02))
    if linear.bias is not None:
        linear.bias.data.copy_(numbers(outputs, dtype=dtype))
    x = numbers(max(ROWS), inputs, dtype=dtype, outliers=0.002)
    wanted = linear(x)
    for num_rows in ROWS:
        assert same_bits(linear(x[:num_rows].contiguous()), wanted[:num_rows]), num_rows


@needs_gpu
@pytest.mark.gpu
def test_parts_are_the_same_bits_beside_any_number_and_what_the_norm_adds_up():
    method = ExactMethod(Proofs())
    linear = Linear(14336, 4096, False, torch.bfloat16, DEVICE, method=method)
    linear.weight.data.copy_(numbers(4096, 14336).mul_(0.02))
    x, stream = numbers(max(ROWS), 14336, outliers=0.002), numbers(max(ROWS), 4096)
    wanted = method.apply_deferred(linear, x)
    assert wanted.shape == (2, max(ROWS), 4096)
    weight = torch.ones(4096, dtype=torch.bfloat16, device=DEVICE)
    for num_rows in ROWS:
        rows = x[:num_rows].contiguous()
        found = method.apply_deferred(linear, rows)
        assert torch.equal(found, wanted[:, :num_rows]), num_rows
        added, once = stream[:num_rows].clone(), stream[:num_rows].clone()
        fused.add_norm(added, found, weight, 1e-5, False)
        fused.add_norm(once, linear(rows), weight, 1e-5, False)
        assert same_bits(added, once), num_rows


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (3072, 4096), (4096, 7168)])
def test_halves_in_one_kernel_and_in_two_are_the_same_bits(outputs, inputs):
    method, weight = ExactMethod(Proofs()), numbers(outputs, inputs).mul_(0.02)
    x = numbers(4000, inputs, outliers=0.002)
    wanted = (exact_gemm.multiply_in_parts(x, weight, 2)).sum(0).to(x.dtype)
    by_library = exact_linear._library_parts(x[:2048], weight, 2).sum(0).to(x.dtype)
    assert same_bits(by_library, wanted[:2048])
    for num_rows in (128, 129, 200, 512, 1024, 1025, 2500, 4000):
        rows = x[:num_rows].contiguous()
        assert same_bits(method.multiply(rows, weight, None), wanted[:num_rows]), num_rows


@needs_gpu
@pytest.mark.gpu
def test_gates_in_one_kernel_and_in_two_are_the_same_bits():
    weight, x = numbers(2 * 14336, 4096).mul_(0.02), numbers(64, 4096, outliers=0.002)
    wanted = fused.gated(exact_gemm.multiply(x, weight, None), "silu")
    for num_rows in (1, 16, 33, 64):
        found = exact_gemm.multiply(x[:num_rows].contiguous(), weight, None, gated=True)
        assert same_bits(found, wanted[:num_rows]), num_rows


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 2048), (2 * 14336, 4096)])
def test_a_gated_row_has_the_same_bits_beside_any_number(outputs, inputs):
    """Plain products cut the columns of the narrower matrix; the gating kernel does not."""
    linear = Linear(inputs, outputs, False, torch.bfloat16, DEVICE, method=ExactMethod(Proofs()))
    linear.weight.data.copy_(numbers(outputs, inputs).mul_(0.02))
    x = numbers(max(ROWS), inputs, outliers=0.002)

    def gated(rows):
        found = linear.gated(rows)
        return fused.gated(linear(rows), "silu") if found is None else found

    wanted = gated(x)
    for num_rows in ROWS:
        assert same_bits(gated(x[:num_rows].contiguous()), wanted[:num_rows]), num_rows


@needs_gpu
@pytest.mark.gpu
def test_columns_that_are_cut_are_found():
    weight, x = numbers(4096, 14336).mul_(0.02), numbers(4, 14336, outliers=0.002)
    cut = skinny_gemm.multiply_in_parts(x, weight, 4).sum(0).to(x.dtype)
    assert not same_bits(cut, ExactMethod(Proofs()).multiply(x, weight, None))


@needs_gpu
@pytest.mark.gpu
def test_a_library_that_cuts_columns_is_not_used(monkeypatch, tmp_path):
    weight = numbers(4096, 4096).mul_(0.02)
    file = tmp_path / "found" / "proofs.json"
    proofs = Proofs(file)
    assert proofs.size(weight, None, 1, 2048) == 2048

    def cut(x, weight, bias):
        parts = zip(x.float().chunk(2, 1), weight.float().chunk(2, 1), strict=True)
        return sum(one @ other.t() for one, other in parts).to(x.dtype)

    monkeypatch.setattr(exact_linear.F, "linear", cut)
    assert not Proofs().size(weight, None, 1, 512)
    assert not Proofs().size(weight, None, 1, 2048)
    assert not proofs.size(weight, None, 1, 4096)
    # What was found is there for the next start.
    monkeypatch.undo()
    assert json.loads(file.read_text()) == {
        "bfloat16 4096x4096 2048": 0.0,
        "bfloat16 4096x4096 4096": None,
    }
    assert not Proofs(file).size(weight, None, 1, 4096)


def test_the_fastest_of_equal_products_is_taken(monkeypatch):
    weight = torch.empty(64, 64, dtype=torch.bfloat16)
    times = {0: 12.0, 160: 9.0, 176: 30.0, 192: 20.0}  # 0: our own kernel
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(exact_linear, "_measured", lambda *args: times[args[3]])
    assert Proofs().size(weight, None, 1, 150) == 160
    times[0] = 8.5  # no more than noise
    assert Proofs().size(weight, None, 1, 150) == 160
    times[0] = 8.0
    assert Proofs().size(weight, None, 1, 150) == 0
    times[160] = None  # other bits
    assert Proofs().size(weight, None, 1, 150) == 0
    times[0] = 40.0
    assert Proofs().size(weight, None, 1, 150) == 192
    times[176] = times[192] = None
    assert Proofs().size(weight, None, 1, 150) == 0


def test_a_broken_file_of_proofs_is_not_read(tmp_path, caplog):
    file = tmp_path / "proofs.json"
    file.write_text("[1")
    Proofs(file)
    assert "is not read" in caplog.text


def test_rows_are_padded_in_place_where_there_is_room():
    rows = torch.arange(40.0).view(10, 4)
    padded = with_more(rows[2:5], 8)
    assert padded.data_ptr() == rows[2].data_ptr()
    assert torch.equal(padded, rows[2:])
    copied = with_more(rows[2:5], 9)
    assert copied.shape == (9, 4)
    assert torch.equal(copied[:3], rows[2:5])


def test_rows_are_padded_by_less_than_an_eighth():
    for num_rows in range(65, 8193):
        size = proven_size(num_rows)
        assert num_rows <= size < num_rows * 9 / 8 + 8
        assert proven_size(size) == size
