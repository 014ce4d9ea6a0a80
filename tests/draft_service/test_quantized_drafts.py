"""Proposals of quantised drafts are those of the weights that their files stand for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draft_service.drafters.heads import HeadDrafter
from draft_service.drafters.standalone import StandaloneDrafter
from foredraft.config.services import DraftConfig
from foredraft.errors import CheckpointError, ConfigError
from testing.block_cases import KINDS as BLOCKS
from testing.block_cases import check_batch_that_grows
from testing.block_drafts import BlockReference, parallel_chain, tiny_peagle
from testing.draft_cases import KINDS
from testing.draft_heads import HeadReference, paths_of
from testing.head_verifier import attached, text
from testing.quantized_checkpoints import FORMATS, tiny_llama, write
from testing.quantized_heads import quantized

PACKED, FP8 = FORMATS["packed-channel"], FORMATS["fp8-block"]
SHAPES = [(4, 1, 5), (3, 3, 9), (2, 2, 7), (4, 2, 15)]
Make = Callable[..., HeadDrafter]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_trees_of_heads(kind: str, make: Make, target: Path) -> None:
    stored, meant = quantized(KINDS[kind], PACKED)
    reference = HeadReference(meant, target)
    with attached(make(stored), target) as verifier:
        for round_number in range(2):
            messages = [
                verifier.news(slot, text(10 * round_number + slot, 5 + slot), shape)
                for slot, shape in enumerate(SHAPES)
            ]
            trees = verifier.step(*messages)
            for slot, shape in enumerate(SHAPES):
                assert paths_of(trees[slot]) == verifier.paths(reference, slot, shape), slot


@pytest.mark.parametrize("kind", ["dflash", "dflash-speculators", "dspark", "dspark-rnn"])
def test_chains_of_block_drafters(kind: str, make: Make, target: Path) -> None:
    head, options = BLOCKS[kind]
    stored, meant = quantized(head, PACKED)
    check_batch_that_grows(make(stored), BlockReference(meant, target, **options), target)


def test_chains_of_peagle(make: Make, target: Path) -> None:
    stored, meant = quantized(tiny_peagle(1), PACKED)
    drafter = make(stored)
    limits = drafter.info().limits
    with attached(drafter, target, limits=limits) as verifier:
        tree = verifier.step(verifier.news(0, text(3, 17), (4, 1, 5)))[0]
        states = verifier.hidden(0)[:16].double().numpy()
        expected = parallel_chain(meant, target, verifier.tokens[0], states, 4)
        assert list(tree[0]) == expected


def test_what_a_quantised_head_says_of_itself(make: Make) -> None:
    plain, small = make(KINDS["eagle3"]), make(quantized(KINDS["eagle3"], PACKED)[0])
    assert plain.info().quantization == "unquant"
    assert small.info().quantization == "compressed-tensors int4 (one scale an output)"
    assert small.info().weight_bytes < plain.info().weight_bytes - 20_000
    # A verifier can multiply with plain weights alone.
    assert plain.info().HasField("fusion")
    assert not small.info().HasField("fusion")
    assert not list(small.fusion_parts())
    only_layers = quantized(KINDS["eagle3"], PACKED, lambda name: name == "fc.weight")[0]
    assert make(only_layers).info().HasField("fusion")


def test_a_quantised_draft_is_not_quantised_again(make: Make, tmp_path: Path) -> None:
    head = quantized(KINDS["eagle3"], FP8)[0]
    with pytest.raises(ConfigError, match=r"-quantization int8: .* is fp8 fp8 .*leave the flag"):
        make(head, speculative_draft_model_quantization="int8")
    write(tiny_llama(tmp_path / "plain"), tmp_path / "small", FORMATS["awq"])
    config = DraftConfig(
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(tmp_path / "small"),
        speculative_draft_model_quantization="int8",
        device="cpu",
    )
    with pytest.raises(ConfigError, match=r"-quantization int8: .*small is awq int4"):
        StandaloneDrafter.load(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_with_a_quantised_embedding_and_lm_head(dtype: str, tmp_path: Path) -> None:
    """As of a GGUF file: some of its tokens alone, and a target that pads the tokens to more."""
    path, ids = tmp_path / "small", [5, 0, 96, 64]
    form = FORMATS["packed-32"]
    meant = write(tiny_llama(tmp_path / "plain"), path, form, has_vocabulary=True)
    torch.save(ids, tmp_path / "map.pt")
    config = DraftConfig(
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(path),
        speculative_token_map=str(tmp_path / "map.pt"),
        dtype=dtype,
        device="cpu",
        num_threads=1,
    )
    model = StandaloneDrafter.load(config)._model
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    wanted = x.double() @ meant["lm_head.weight"][ids].T
    error = float((model.lm_head(x).double() - wanted).norm() / wanted.norm())
    assert error < (1e-5 if dtype == "float32" else 1e-2)
    model.embedding.takes_any_id = True
    rows = model.embedding(torch.tensor([96, 97, 5000])).double()
    error = float((rows - meant["model.embed_tokens.weight"][[96] * 3]).abs().max())
    assert error < (1e-6 if dtype == "float32" else 2e-3)


def test_another_format_than_is_read_is_refused_before_anything_loads(make: Make) -> None:
    stored = quantized(KINDS["eagle3"], PACKED)[0]
    stored.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    with pytest.raises(CheckpointError, match=r"NVFP4.*--speculative-draft-model-quantization"):
        make(stored)
