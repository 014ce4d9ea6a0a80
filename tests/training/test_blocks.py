"""Block drafters in training: what is trained is what is served, a measured chain is a drafted one,
and training pays.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from draft_service.drafters.chains import rows_behind
from draft_service.drafters.paged_sequences import PagedSequence
from draft_service.models.block_draft import BlockDraft
from draft_service.steps.block_runner import BlockRunner
from foredraft.attention.cpu import CpuAttention
from foredraft.errors import ConfigError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import SequenceRows
from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.loaded_heads import CPU, load
from training.draft.block_trainer import BlockTrainer
from training.draft.blocks import (
    BlockHead,
    BlockShape,
    block_chain,
    load_block_head,
    save_block_head,
    spread_layers,
)
from training.draft.config import DraftTrainingConfig
from training.lm.model import LlamaShape

LAYER = LlamaShape(128, 48, 2, 4, 2, 12, 64, 512)
ALGORITHMS = ("DFLASH", "DSPARK")


def random_head(algorithm: str, block: int = 5) -> BlockHead:
    rank = 6 if algorithm == "DSPARK" else 0
    head = BlockHead(BlockShape(algorithm, LAYER, (1, 3), 4, block, 120, rank))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            scale = 0.3 if parameter.dim() == 2 else 0.2
            noise = torch.randn(parameter.shape, generator=generator) * scale
            # As they are written.
            parameter.copy_((noise + (parameter.dim() == 1)).bfloat16())
    return head


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@torch.no_grad()
def test_a_trained_draft_is_served_as_it_was_trained(algorithm: str, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", seed=5, num_hidden_layers=4)
    head = random_head(algorithm)
    save_block_head(head, tmp_path / "draft", "target")
    served = load(tmp_path / "draft", algorithm, target)
    assert isinstance(served, BlockDraft)
    assert served.captured_layers == head.shape.aux_layers
    assert served.options.num_drafted == head.shape.block
    captured = [torch.randn(1, 20, 48) for _ in range(2)]
    tokens = torch.randint(100, (1, 1, 5))
    tokens[..., 1:] = 120
    embed, output = served.embedding.weight, served.lm_head.weight
    anchor = torch.tensor([17])
    hidden = head(head.fuse(captured), F.embedding(tokens, embed), anchor)[0, 0]
    kv = PagedKV.for_model(served.config.layer, 12, 4, torch.float32, CPU)
    runner = BlockRunner(served, kv, CpuAttention())
    pages = [3, 0, 7, 5, 1]
    states = torch.cat(captured, -1)[0, :17]
    runner.extend([SequenceRows.chunk(pages, 0, [0] * 17)], runner.fuse(states))
    sequence = PagedSequence(0, SamplingParams(), 0, 18, 17, pages=pages)
    rows = rows_behind(sequence, tokens[0, 0].tolist(), [9, 10], 4, False)
    found = runner.propose([rows], None)
    torch.testing.assert_close(found, hidden, atol=1e-4, rtol=1e-4)
    previous = torch.tensor([4, 9, 2, 7, 1])
    logits = head.logits(hidden, previous, output)
    own = served.lm_head(found)
    if served.markov is not None:
        state = served.markov.start(5)
        own = own + served.markov.bias(served.markov.embed(previous), found, state)[0]
    torch.testing.assert_close(own, logits, atol=1e-3, rtol=1e-3)
    load_block_head(tmp_path / "draft", head.shape)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@torch.no_grad()
def test_a_measured_chain_is_one_that_is_drafted_token_by_token(algorithm: str) -> None:
    head = random_head(algorithm)
    generator = torch.Generator().manual_seed(3)
    embed = torch.randn(128, 48, generator=generator)
    output = torch.randn(128, 48, generator=generator)
    captured = [torch.randn(2, 30, 48, generator=generator) for _ in range(2)]
    tokens = torch.randint(100, (2, 30), generator=generator)
    anchors = torch.tensor([1, 8, 20])
    for row in range(2):  # some drafted tokens have to be right
        for anchor, count in zip(anchors.tolist(), (0, 2, 5), strict=True):
            for step in range(count):
                tokens[row, anchor + step + 1] = drafted(
                    head, tokens, captured, embed, output, row, anchor, step + 1
                )[-1]
    matched = block_chain(head, tokens, captured, embed, output, anchors, 5)
    for row in range(2):
        for index, anchor in enumerate(anchors.tolist()):
            chain = drafted(head, tokens, captured, embed, output, row, anchor, 5)
            text = tokens[row, anchor + 1 : anchor + 6].tolist()
            agree = [a == b for a, b in zip(chain, text, strict=True)]
            expected = (*agree, False).index(False)
            assert int(matched[row, index]) == expected
    assert matched.max() == 5
    assert matched[:, 1].min() >= 2


def drafted(
    head: BlockHead,
    tokens: torch.Tensor,
    captured: list[torch.Tensor],
    embed: torch.Tensor,
    output: torch.Tensor,
    row: int,
    anchor: int,
    steps: int,
) -> list[int]:
    """Returns the greedy draft behind a position, from tokens before it alone."""
    known = [streams[row : row + 1, :anchor] for streams in captured]
    block = torch.full((1, 1, head.shape.block), head.shape.mask_token)
    block[..., 0] = tokens[row, anchor]
    hidden = head(head.fuse(known), F.embedding(block, embed), torch.tensor([anchor]))[0, 0]
    previous, chain = tokens[row, anchor], []
    for step in range(steps):
        previous = head.logits(hidden[step], previous, output).argmax()
        chain.append(int(previous))
    return chain


def block_config(
    toy: tuple[Path, Path], out: Path, algorithm: str, **changes: object
) -> DraftTrainingConfig:
    folder, target = toy
    settings: dict[str, object] = {
        "target": target,
        "algorithm": algorithm,
        "data": (folder / "train",),
        "validation": (folder / "heldout",),
        "out": out,
        "windows": 48,
        "free_windows": 16,
        "text_windows": 48,
        "prompt": 32,
        "window": 96,
        "generate_batch": 32,
        "steps": 60,
        "warmup": 6,
        "batch": 8,
        "lr": 5e-3,
        "block": 5,
        "streams": 2,
        "anchors": 12,
        "markov_rank": 8,
        "depth": 5,
        "eval_prompts": 8,
        "eval_prompt": 32,
        "eval_new_tokens": 32,
        "compile": False,
    }
    return DraftTrainingConfig(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_trained_draft_clearly_beats_an_untrained_one(
    algorithm: str, toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    trainer = BlockTrainer(block_config(toy_target, tmp_path, algorithm))
    untrained, _ = trainer.measure(tree=False)
    result = trainer.run()
    assert result.finished
    assert result.chain["py"].length > untrained["py"].length + 0.7
    assert len(trainer.windows) == 48 + 16 + 48
    load_block_head(tmp_path, trainer.head.shape)


def test_a_resumed_run_ends_with_the_same_draft_bit_for_bit(
    toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    changes = {"steps": 6, "validation": (), "generated": tmp_path / "generated"}
    whole = BlockTrainer(block_config(toy_target, tmp_path / "whole", "DSPARK", **changes))
    whole.run()
    parts = block_config(toy_target, tmp_path / "parts", "DSPARK", **changes)
    first = BlockTrainer(parts)
    for _ in range(2):
        first._train_step()
    first._save_checkpoint()
    second = BlockTrainer(
        block_config(toy_target, tmp_path / "parts", "DSPARK", **changes, resume=True)
    )
    assert second.step == 2
    second.run()
    for (name, ours), theirs in zip(
        second.head.state_dict().items(), whole.head.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_layers_are_spread_as_published_drafters_have_them() -> None:
    # What these layers give: 1, 9, 17, 25, 33 of Qwen3-8B.
    assert spread_layers(36, 5) == (2, 10, 18, 26, 34)
    assert spread_layers(2, 2) == (1, 2)
    assert spread_layers(2, 4) == (0, 1, 2)  # no more than there are


@pytest.mark.parametrize("num_target_layers", range(1, 12))
def test_layers_of_small_targets_are_given_once(num_target_layers: int) -> None:
    for count in range(1, 8):
        layers = spread_layers(num_target_layers, count)
        assert list(layers) == sorted(set(layers))
        assert len(layers) == min(count, num_target_layers + 1)
        assert set(layers) <= set(range(num_target_layers + 1))


def test_a_block_that_fits_no_window_is_refused(
    toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--window must be more than --block"):
        BlockTrainer(block_config(toy_target, tmp_path, "DFLASH", block=95, validation=()))
