"""Draft heads: what training unrolls is what drafting does, checkpoints keep their names, and
training pays.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from draft_service.models.draft_head import SharedWeights
from draft_service.models.head_loader import load_head as load_served_head
from foredraft.errors import CheckpointError
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.models.config import ModelConfig
from testing.draft_training import draft_config
from training.draft.acceptance import (
    head_chain,
    head_tree,
    summarize,
    walk,
)
from training.draft.heads import (
    ALGORITHMS,
    DraftHead,
    Eagle3Head,
    HeadShape,
    default_aux_layers,
    load_head,
    make_head,
    save_head,
)
from training.draft.target import Target
from training.draft.trainer import DraftTrainer
from training.draft.unroll import DraftInputs, draft_loss, unroll
from training.lm.model import LlamaShape

LAYER = LlamaShape(
    vocab_size=50,
    hidden_size=24,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    context_length=64,
)
STEPS = 4


def random_head(algorithm: str) -> DraftHead:
    aux = (1, 2, 3) if algorithm == "EAGLE3" else ()
    head = make_head(HeadShape(algorithm, LAYER, aux, 30 if aux else 0))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    if isinstance(head, Eagle3Head):
        head.set_vocabulary(
            torch.arange(0, 50)[torch.randperm(50, generator=generator)[:30].sort()[0]],
            torch.randn(50, 24, generator=generator),
        )
    return head.double()


def random_inputs(
    batch: int, length: int
) -> tuple[DraftInputs, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    embed = torch.randn(50, 24, generator=generator, dtype=torch.float64)
    output = torch.randn(50, 24, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 50, (batch, length), generator=generator)
    hidden = torch.randn(batch, length, 24, generator=generator, dtype=torch.float64)
    captured = [
        torch.randn(batch, length, 24, generator=generator, dtype=torch.float64) for _ in range(3)
    ]
    return DraftInputs(F.embedding(tokens, embed), hidden, captured), tokens, embed, output


def draft_one_by_one(
    head: DraftHead, inputs: DraftInputs, output: torch.Tensor, slot: int
) -> list[torch.Tensor]:
    """Computes logits of one sequence's drafting steps from `slot`.

    Each step runs every row again with plain attention.
    """
    features = head.fuse(inputs.hidden, inputs.captured)[:, : slot + 1]
    logits = []
    for step in range(STEPS):
        count = slot + 1 + step
        positions = torch.arange(count)
        x, residual = head.prepare(inputs.embeds[:, 1 : count + 1], features, positions)
        q, k, v = head.project(x, positions)
        scores = q @ k.mT / 8**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        out = head.complete(scores.softmax(-1) @ v, residual)
        logits.append(head.logits(out[:, -1], output))
        features = torch.cat((features, out[:, -1:]), dim=1)
    return logits


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_row_of_the_unrolled_pass_drafts_like_a_server(algorithm: str) -> None:
    head = random_head(algorithm)
    inputs, _, _, output = random_inputs(2, 14)
    results = unroll(head, inputs, output, STEPS)
    rows = results[0][0].shape[1]
    assert rows == 14 - STEPS - 1
    for slot in range(rows):
        for step, expected in enumerate(draft_one_by_one(head, inputs, output, slot)):
            torch.testing.assert_close(results[step][1][:, slot], expected)


def test_the_loss_compares_each_draft_with_what_the_target_says_there() -> None:
    """Row i of step k says what comes at position i + k + 2, which the target says at position i +
    k + 1.
    """
    steps, length, decay = 3, 9, 0.5
    generator = torch.Generator().manual_seed(2)
    rows = length - steps - 1
    probs = torch.rand(2, length, 7, generator=generator).softmax(-1) * 0.9
    hidden = torch.randn(2, length, 4, generator=generator)
    results = [
        (torch.randn(2, rows, 4, generator=generator), torch.randn(2, rows, 7, generator=generator))
        for _ in range(steps)
    ]
    wanted, agreement = 0.0, []
    for k, (features, logits) in enumerate(results):
        losses, agrees = [], []
        for b, i in itertools.product(range(2), range(rows)):
            log_q = (logits[b, i].double().exp() / logits[b, i].double().exp().sum()).log()
            at = i + k + 1
            entropy = -float((probs[b, at] * log_q).sum())
            distance = (features[b, i] - hidden[b, at]).abs()
            smooth = torch.where(distance < 1, 0.5 * distance**2, distance - 0.5)
            losses.append(0.7 * entropy + 0.3 * float(smooth.mean()))
            agrees.append(float(logits[b, i].argmax() == probs[b, at].argmax()))
        wanted += decay**k * float(np.mean(losses))
        agreement.append(float(np.mean(agrees)))
    loss, found = draft_loss(results, hidden, probs, decay, token_weight=0.7, feature_weight=0.3)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert found.tolist() == pytest.approx(agreement)


def test_a_head_that_says_what_the_target_says_agrees_everywhere() -> None:
    head = random_head("EAGLE")
    inputs, _, _, output = random_inputs(2, 14)
    results = unroll(head, inputs, output, STEPS)
    rows = results[0][0].shape[1]
    # A target whose distribution at i + k + 1 is the head's at row i of step k, for one k at a
    # time.
    for k in range(STEPS):
        probs = torch.zeros(2, 14, 50, dtype=torch.float64)
        probs[:, k + 1 : k + 1 + rows] = results[k][1].softmax(-1)
        _, agreement = draft_loss(results, inputs.hidden, probs, 1.0, 1.0, 0.0)
        assert agreement[k] == 1.0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_tree_of_one_branch_accepts_what_the_chain_accepts(algorithm: str) -> None:
    head = random_head(algorithm)
    inputs, tokens, embed, output = random_inputs(3, 40)
    # Let the text agree with the head in many places.
    for _ in range(4):
        results = unroll(
            head, DraftInputs(F.embedding(tokens, embed), inputs.hidden, inputs.captured), output, 1
        )
        best = results[0][1].argmax(-1)
        if isinstance(head, Eagle3Head):
            best = best + head.d2t[best]
        changed = torch.rand(best.shape, generator=torch.Generator().manual_seed(1)) < 0.8
        tokens[:, 2:40] = torch.where(changed, best, tokens[:, 2:40])
    inputs = DraftInputs(F.embedding(tokens, embed), inputs.hidden, inputs.captured)
    chain = head_chain(head, inputs, tokens, output, 10, STEPS)
    tree = head_tree(head, inputs, tokens, embed, output, 10, STEPS, 1, STEPS + 1)
    assert sorted(chain) == sorted(tree)
    assert sum(chain) > 0
    wide = head_tree(head, inputs, tokens, embed, output, 10, STEPS, 4, 20)
    assert summarize(wide, STEPS).length >= summarize(chain, STEPS).length


def test_walking_counts_each_verify_once() -> None:
    assert walk([9, 2, 9, 9, 0, 1], root=2) == [2, 0, 1]
    result = summarize([2, 0, 1], 2)
    assert result.length == 2
    assert result.depths == (pytest.approx(2 / 3), pytest.approx(1 / 2))


NAMES = {
    "EAGLE": {
        "fc.weight": (24, 48),
        "fc.bias": (24,),
        "layers.0.self_attn.q_proj.weight": (32, 24),
    },
    "EAGLE3": {
        "fc.weight": (24, 72),
        "midlayer.input_layernorm.weight": (24,),
        "midlayer.hidden_norm.weight": (24,),
        "midlayer.self_attn.k_proj.weight": (16, 48),
        "norm.weight": (24,),
        "lm_head.weight": (30, 24),
        "d2t": (30,),
        "t2d": (50,),
    },
    "MTP": {
        "model.mtp_layers.0.token_layernorm.weight": (24,),
        "model.mtp_layers.0.input_proj.weight": (24, 48),
        "model.mtp_layers.0.self_attn.q_proj.bias": (32,),
        "model.mtp_layers.0.final_layernorm.weight": (24,),
    },
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_checkpoints_have_the_names_other_servers_read_and_load_again(
    algorithm: str, tmp_path: Path
) -> None:
    head = random_head(algorithm).float()
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, shape in NAMES[algorithm].items():
        assert tuple(tensors[name].shape) == shape
    assert len(tensors) == len(head.state_dict())
    again = load_head(tmp_path, head.shape)
    for name, tensor in head.state_dict().items():
        expected = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(again.state_dict()[name], expected), name
    with pytest.raises(CheckpointError, match="unexpected"):
        head.load_checkpoint({**tensors, "extra.weight": torch.zeros(1)})


def test_normalised_streams_are_written_as_the_server_reads_them(tmp_path: Path) -> None:
    head = make_head(HeadShape("EAGLE3", LAYER, (1, 2, 3), 30, stream_norms=True))
    assert isinstance(head, Eagle3Head)
    head.initialize(1)
    head.set_vocabulary(torch.arange(30), torch.randn(50, 24))
    streams = [torch.randn(2, 5, 24) * scale for scale in (1, 50, 600)]
    features = head.fuse(streams[0], streams)
    # However large a stream is, it weighs as much as the others.
    scaled = head.fuse(streams[0], [10 * stream for stream in streams])
    torch.testing.assert_close(features, scaled, atol=1e-4, rtol=1e-3)
    save_head(head, tmp_path)
    target = ModelConfig.from_dict(LAYER.to_config("float32", 0, 0) | {"num_hidden_layers": 4})
    weights = SharedWeights(
        Embedding(50, 24, 1.0, torch.float32, torch.device("cpu")),
        LMHead(24, 50, None, None, torch.float32, torch.device("cpu")),
    )
    cpu = torch.device("cpu")
    served = load_served_head(tmp_path, "EAGLE3", target, weights, torch.float32, cpu)
    found = served.fuse(torch.cat(streams, -1).flatten(0, 1))
    torch.testing.assert_close(found, features.flatten(0, 1), atol=2e-3, rtol=2e-2)  # bf16 weights


def test_offsets_map_the_draft_vocabulary_onto_the_target() -> None:
    head = random_head("EAGLE3")
    assert isinstance(head, Eagle3Head)
    ids = torch.arange(30) + head.d2t
    assert head.t2d[ids].all()
    assert int(head.t2d.sum()) == len(set(ids.tolist())) == 30


def test_default_layers_follow_the_published_rule() -> None:
    assert default_aux_layers(16) == (2, 8, 13)
    assert default_aux_layers(2) == (1, 1, 2)


def test_a_trained_head_clearly_beats_an_untrained_one(
    toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    trainer = DraftTrainer(draft_config(toy_target, tmp_path))
    untrained, _ = trainer.measure(tree=False)
    result = trainer.run()
    assert result.finished
    assert result.chain["py"].length > untrained["py"].length + 0.7
    assert result.tree["py"].length >= result.chain["py"].length
    assert (tmp_path / "curves.png").is_file()
    load_head(tmp_path, trainer.shape)


@pytest.mark.parametrize("algorithm", ["EAGLE", "MTP"])
def test_the_other_heads_learn_too(
    algorithm: str, toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    config = draft_config(
        toy_target,
        tmp_path,
        algorithm=algorithm,
        steps=40,
        unroll_steps=1,
        feature_weight=0.5,
        noise=0.05,
    )
    trainer = DraftTrainer(config)
    untrained, _ = trainer.measure(tree=False)
    assert trainer.run().chain["py"].length > untrained["py"].length


def test_a_target_of_another_architecture_runs_in_transformers(
    toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=7,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config)
    model.save_pretrained(tmp_path / "target")
    tokenizer = toy_target[1] / "tokenizer.json"
    (tmp_path / "target" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    target = Target(tmp_path / "target", torch.device("cpu"), torch.float32)
    tokens = torch.randint(0, 300, (2, 12))
    hidden, (first, middle) = target.features(tokens, (0, 3))
    expected = model(tokens, output_hidden_states=True)
    torch.testing.assert_close(F.linear(hidden, target.output_weight), expected.logits)
    torch.testing.assert_close(first, expected.hidden_states[0])
    torch.testing.assert_close(middle, expected.hidden_states[3])
    changes = {"target": tmp_path / "target", "generated": tmp_path, "steps": 3, "windows": 8}
    result = DraftTrainer(draft_config(toy_target, tmp_path / "head", **changes)).run()
    assert result.finished
