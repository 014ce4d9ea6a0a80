"""P-EAGLE in training: what is trained is what is served, a measured chain is a drafted one, and
training pays.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from draft_service.drafters.heads import HeadDrafter
from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.services import DraftConfig
from foredraft.errors import ConfigError
from foredraft.types import SamplingParams
from testing.block_drafts import parallel_chain as reference_chain
from testing.checkpoints import make_checkpoint
from testing.draft_heads import TinyHead
from testing.engines import Job, accept_length, running_engine
from testing.head_verifier import attached
from training.draft.config import DraftTrainingConfig
from training.draft.heads import HeadShape
from training.draft.parallel import ParallelHead, parallel_chain, save_parallel_head
from training.draft.parallel_trainer import ParallelTrainer
from training.draft.unroll import DraftInputs
from training.export import load_tensors
from training.lm.model import LlamaShape

LAYER = LlamaShape(128, 48, 2, 4, 2, 12, 64, 512)
MASK = 127
STEPS = 5


def random_head() -> ParallelHead:
    head = ParallelHead(HeadShape("PEAGLE", LAYER, (1, 2, 4), 80), MASK, STEPS)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            scale = 0.3 if parameter.dim() == 2 else 0.2
            noise = torch.randn(parameter.shape, generator=generator) * scale
            # As they are written.
            parameter.copy_((noise + (parameter.dim() == 1)).bfloat16())
    ids = torch.randperm(128, generator=generator)[:80].sort().values
    weight = head.lm_head.weight.detach().clone()
    head.set_vocabulary(ids, torch.zeros(128, 48).index_copy(0, ids, weight))
    return head


def inputs_of(tokens: torch.Tensor, embed: torch.Tensor, seed: int) -> DraftInputs:
    generator = torch.Generator().manual_seed(seed)
    streams = [torch.randn(*tokens.shape, 48, generator=generator) for _ in range(3)]
    return DraftInputs(F.embedding(tokens, embed), streams[0], streams)


def as_tiny(folder: Path) -> TinyHead:
    """Returns a saved head by the reference's names, in float64."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for name, tensor in load_tensors(folder).items():
        name = name.replace("layers.0.", "midlayer.")
        if name.startswith("layers."):
            name = name.replace("input_layernorm", "hidden_norm")
        tensors[name] = tensor
    return TinyHead("PEAGLE", config["transformer_layer_config"], tensors, 3)


@torch.no_grad()
def drafted(head: ParallelHead, inputs: DraftInputs, embed: torch.Tensor, slot: int) -> list[int]:
    logits = head.logits(head(inputs, embed[MASK], torch.tensor([slot]))[0, 0], embed)
    best = logits.argmax(-1)
    return (best + head.d2t[best]).tolist()


@torch.no_grad()
def test_a_trained_head_drafts_as_the_equations_say_and_as_it_is_served(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", seed=5, num_hidden_layers=6)
    head = random_head()
    save_parallel_head(head, tmp_path / "draft", "target")
    embed = load_tensors(target)["model.embed_tokens.weight"].float()
    tokens = torch.randint(2, 120, (1, 30), generator=torch.Generator().manual_seed(1))
    inputs = inputs_of(tokens, embed, 2)
    drafter = HeadDrafter.load(
        DraftConfig(
            model_path=str(target),
            speculative_algorithm="PEAGLE",
            speculative_draft_model_path=str(tmp_path / "draft"),
            num_threads=1,
            device="cpu",
        )
    )
    assert drafter.info().hidden.layers == [1, 2, 4]
    assert drafter.info().limits.num_steps == STEPS
    states = torch.cat(inputs.captured, -1)[0]
    for slot in (1, 7, 20):
        text = tokens[0, : slot + 2].tolist()
        chain = drafted(head, inputs, embed, slot)
        known = states[: slot + 1].double().numpy()
        assert chain == reference_chain(as_tiny(tmp_path / "draft"), target, text, known, STEPS)
        limits = draft_pb2.TreeLimits(num_steps=STEPS, topk=1, num_draft_tokens=STEPS + 1)
        with attached(drafter, target, limits=limits) as verifier:
            verifier._hidden[0] = states
            tree = verifier.step(verifier.news(0, text, (STEPS, 1, STEPS + 1)))[0]
        assert list(tree[0]) == chain


@torch.no_grad()
def test_a_measured_chain_is_one_that_is_drafted() -> None:
    head = random_head()
    embed = torch.randn(128, 48, generator=torch.Generator().manual_seed(4))
    tokens = torch.randint(2, 120, (2, 40), generator=torch.Generator().manual_seed(6))
    anchors = torch.tensor([0, 9, 25])
    for row in range(2):  # some drafted tokens have to be right
        for slot, count in zip(anchors.tolist(), (0, 2, 5), strict=True):
            chain = drafted(head, of_row(inputs_of(tokens, embed, 3), row), embed, slot)
            tokens[row, slot + 2 : slot + 2 + count] = torch.tensor(chain[:count])
    inputs = inputs_of(tokens, embed, 3)
    matched = parallel_chain(head, inputs, tokens, embed[MASK], embed, anchors, STEPS)
    for row in range(2):
        for index, slot in enumerate(anchors.tolist()):
            chain = drafted(head, of_row(inputs, row), embed, slot)
            text = tokens[row, slot + 2 : slot + 2 + STEPS].tolist()
            agree = [a == b for a, b in zip(chain, text, strict=True)]
            assert int(matched[row, index]) == (*agree, False).index(False)
    assert matched[:, 1].min() >= 2
    assert matched[:, 2].min() == 5


def of_row(inputs: DraftInputs, row: int) -> DraftInputs:
    """Returns a sequence of a batch."""
    kept = slice(row, row + 1)
    return DraftInputs(
        inputs.embeds[kept], inputs.hidden[kept], [stream[kept] for stream in inputs.captured]
    )


def config_of(toy: tuple[Path, Path], out: Path, **changes: object) -> DraftTrainingConfig:
    folder, target = toy
    settings: dict[str, object] = {
        "target": target,
        "algorithm": "PEAGLE",
        "data": (folder / "train",),
        "validation": (folder / "heldout",),
        "out": out,
        "windows": 48,
        "text_windows": 48,
        "prompt": 32,
        "window": 96,
        "generate_batch": 32,
        "steps": 120,
        "warmup": 6,
        "batch": 8,
        "lr": 5e-3,
        "block": STEPS,
        "draft_vocab_size": 200,
        "anchors": 24,
        "eval_prompts": 8,
        "eval_prompt": 32,
        "eval_new_tokens": 32,
        "compile": False,
    }
    return DraftTrainingConfig(**(settings | changes))  # type: ignore[arg-type]


def test_a_trained_head_beats_an_untrained_one_and_changes_no_token(
    toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    trainer = ParallelTrainer(config_of(toy_target, tmp_path))
    untrained, _ = trainer.measure(tree=False)
    result = trainer.run()
    losses = [entry["loss"] for entry in trainer.log.having("loss")]
    assert losses[-1] < losses[0] - 0.5
    assert result.chain["py"].length > untrained["py"].length + 0.7
    sampling = [SamplingParams(temperature=t, max_new_tokens=24, seed=7) for t in (0.0, 0.8)]
    prompt = trainer.windows[0, :40].tolist()
    jobs = [Job(prompt, one) for one in sampling]
    target = toy_target[1]
    with running_engine(target, page_size=8) as harness:
        plain = [one.tokens for one in harness.run(jobs)]
    flags = {"speculative_draft_model_path": str(tmp_path), "draft_step_timeout": 20.0}
    with running_engine(target, "PEAGLE", page_size=8, **flags) as harness:
        served = harness.run(jobs)
    assert [one.tokens for one in served] == plain
    assert accept_length(served) > 1.5


def test_a_resumed_run_ends_with_the_same_draft_bit_for_bit(
    toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    changes = {"steps": 6, "validation": (), "generated": tmp_path / "generated"}
    whole = ParallelTrainer(config_of(toy_target, tmp_path / "whole", **changes))
    whole.run()
    first = ParallelTrainer(config_of(toy_target, tmp_path / "parts", **changes))
    for _ in range(2):
        first._train_step()
    first._save_checkpoint()
    second = ParallelTrainer(config_of(toy_target, tmp_path / "parts", **changes, resume=True))
    assert second.step == 2
    second.run()
    for (name, ours), theirs in zip(
        second.head.state_dict().items(), whole.head.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_a_block_that_fits_no_window_is_refused(
    toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--window must be more than --block"):
        ParallelTrainer(config_of(toy_target, tmp_path, block=95, validation=()))
