"""Models shared by ranks: each rank's weights are its share, and together they compute what one
rank computes.
"""

from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.attention.cpu import CpuAttention
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.linear import Linear
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import load_model
from foredraft.parallel.group import SINGLE, Group, SingleRank, share
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from testing.checkpoints import ARCHITECTURES, make_checkpoint
from testing.cpu_ranks import Way, run_ranks

CPU = torch.device("cpu")
PROMPT = [5, 3, 8, 1, 9, 2, 6, 4, 7, 11, 13]


def logits_of(model: DecoderModel, group: Group) -> torch.Tensor:
    """Logits of all rows of a prompt."""
    config = model.config
    kv = PagedKV(config.num_layers, 8, 4, model.num_kv_heads, config.head_dim, torch.float32, CPU)
    runner = ModelRunner(model, kv, CpuAttention())
    return runner.forward([SequenceRows.chunk([1, 2, 3], 0, PROMPT, "all")]).logits


def shapes_of(model: DecoderModel) -> list[int]:
    """Returns the sizes that ranks divide among themselves."""
    layer = model.decoder_layers[0]
    return [
        layer.attention.qkv.weight.shape[0],
        layer.mlp.down.weight.shape[1],
        model.embedding.weight.shape[0],
    ]


def compute(group: Group, model: str, out: str) -> None:
    """Runs a rank: loads its share, computes, and writes the logits and the shapes of its share."""
    loaded = load_model(model, torch.float32, group=group)
    shapes = torch.tensor(shapes_of(loaded))
    save_file(
        {"logits": logits_of(loaded, group).contiguous(), "shapes": shapes},
        f"{out}/{group.rank}.safetensors",
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_ranks_compute_what_one_computes(tmp_path: Path, name: str) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    out.mkdir()
    biases = {"attention_bias": True, "mlp_bias": True} if name.startswith("Llama") else {}
    make_checkpoint(model, name, **biases)
    whole = load_model(model, torch.float32)
    expected = logits_of(whole, SINGLE)
    run_ranks(2, out, compute, str(model), str(out))
    halves = [size // 2 for size in shapes_of(whole)]
    found = [load_file(out / f"{rank}.safetensors") for rank in range(2)]
    assert torch.equal(found[0]["logits"], found[1]["logits"])
    torch.testing.assert_close(found[0]["logits"], expected, atol=1e-4, rtol=1e-4)
    assert [each["shapes"].tolist() for each in found] == [halves, halves]


def test_few_key_heads_and_a_vocabulary_that_ranks_cannot_share_equally(tmp_path: Path) -> None:
    """Four ranks: two hold the same key head, and the last has fewer tokens than the others."""
    model, out = tmp_path / "model", tmp_path / "out"
    out.mkdir()
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 101}
    make_checkpoint(model, **sizes)
    whole = load_model(model, torch.float32)
    expected = logits_of(whole, SINGLE)
    run_ranks(4, out, compute, str(model), str(out))
    head_dim = whole.config.head_dim
    own = [(2 + 1 + 1) * head_dim, shapes_of(whole)[1] // 4, 26]
    for rank in range(4):
        found = load_file(out / f"{rank}.safetensors")
        torch.testing.assert_close(found["logits"], expected, atol=1e-4, rtol=1e-4)
        assert found["shapes"].tolist() == own


def add_up(group: Group, out: str) -> None:
    """Sums numbers whose sum depends on their order."""
    generator = torch.Generator().manual_seed(group.rank)
    own = torch.randn(1000, generator=generator) * 10.0 ** (3 * group.rank)
    sums = {"float": group.all_reduce(own), "half": group.all_reduce(own.bfloat16())}
    save_file({"own": own, **sums}, f"{out}/{group.rank}.safetensors")


@pytest.mark.parametrize("way", get_args(Way))
def test_sums_are_in_the_order_of_the_ranks_and_rounded_once(tmp_path: Path, way: Way) -> None:
    run_ranks(3, tmp_path, add_up, str(tmp_path), way=way)
    found = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(3)]
    first, second, third = (each["own"].numpy() for each in found)
    want = torch.from_numpy((first + second) + third)
    other = torch.from_numpy(first + (second + third))
    assert not torch.equal(want, other)
    halves = [each["own"].bfloat16().float() for each in found]
    rounded = ((halves[0] + halves[1]) + halves[2]).bfloat16()
    for each in found:
        assert torch.equal(each["float"], want)
        assert torch.equal(each["half"], rounded)


@pytest.mark.parametrize("split", ["none", "outputs", "inputs"])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_target_is_the_rank_s_share(split: str, rank: int) -> None:
    """Against slices taken by hand of the whole matrices."""
    group = SingleRank(rank, 2)
    linear = Linear(6, {"a": 4, "b": 8}, True, torch.float32, CPU, split, group)
    whole = {name: torch.randn(size, 6) for name, size in (("a", 4), ("b", 8))}
    own = {
        "none": lambda w: w,
        "outputs": lambda w: w[rank * len(w) // 2 : (rank + 1) * len(w) // 2],
        "inputs": lambda w: w[:, 3 * rank : 3 * rank + 3],
    }[split]
    targets = linear.targets("x.")
    for name, weight in whole.items():
        target = targets[f"x.{name}.weight"]
        assert target.shape == tuple(weight.shape)
        length = target.memory.shape[target.dim]
        target.memory.copy_(weight.narrow(target.dim, target.first, length))
    assert torch.equal(linear.weight, torch.cat([own(weight) for weight in whole.values()]))
    assert bool(targets["x.a.bias"].memory.numel()) == (split != "inputs" or rank == 0)


def test_shares_that_are_not_equal_are_refused() -> None:
    with pytest.raises(ValueError, match="3 query heads cannot be shared equally by 2 ranks"):
        share(3, SingleRank(0, 2), "query heads")
