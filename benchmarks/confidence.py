"""Models what a draft's own confidence would be worth: how much of each block a step verifies.

    python -m benchmarks.confidence --table benchmarks/step_tables/gemma_cpu.json

The bundled DSpark head drafts a block behind every position of texts that the target wrote greedily
after held-out prompts. Steps then take what a table says, as in `benchmarks.adaptive`, drafting a
whole block of every sequence included. Each policy has one budget for a step's batch: the likeliest
tokens first, as many as give the most tokens per second. They differ in what they know: the mean of
all blocks (which is one size for all), the block's class by its confidence, six in all, or the
confidence of each token. Means, classes and the calibration of confidences come from the other half
of the texts. Ratios are to the best fixed size.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from benchmarks.real_prompts import real_prompts
from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from testing.step_model import TABLES, StepModel
from training.draft.blocks import BlockHead, BlockShape, load_block_head
from training.draft.target import Target

Array = NDArray[np.float64]
PROMPT, NEW, AT_ONCE, CLASSES, BINS, STEPS = 96, 128, 16, 6, 12, 400


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--table", type=Path, default=TABLES / "gemma_cpu.json")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 16, 32, 64])
    parser.add_argument("--head", default=BUNDLED_DRAFTS["DSPARK"], help="a DSpark head")
    args = parser.parse_args()
    scores, right = drafted(resolve_model_path(args.head))
    size = right.shape[-1]
    model = StepModel.from_json(args.table, (size, 1, size))
    fitted, tested = slice(0, None, 2), slice(1, None, 2)
    known = knowledge(scores, right, fitted)
    print(
        "| batch | best size | " + " | ".join(known) + " |\n| --- | --- |" + " --- |" * len(known)
    )
    for batch in args.batch:
        blank = np.zeros(right[tested].shape)
        fixed = []
        for nodes in range(size + 1):
            blank[..., :nodes], blank[..., nodes:] = 1.0, 0.0
            fixed.append(rate(model, batch, right[tested], blank, is_fixed=True))
        best = max(fixed)
        ratios = [rate(model, batch, right[tested], of[tested]) / best for of in known.values()]
        cells = " | ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"| {batch} | {fixed.index(best)} | {cells} |", flush=True)


@torch.no_grad()
def drafted(path: Path) -> tuple[Array, Array]:
    """Returns the confidence in each token of the block behind each position, and whether it and
    all before it are right, [texts, positions, block] each.
    """
    folder = resolve_model_path("foredraft-demo")
    target = Target(folder, torch.device("cpu"), torch.float32)
    prompts = [one[:PROMPT] for one in real_prompts(Tokenizer.from_dir(folder))]
    prompts = [one for one in prompts if len(one) == PROMPT]
    texts = target.generate(torch.tensor(prompts), NEW, 0.0, 0)
    head = load(path, target)
    rows = torch.arange(head.shape.block)
    scores, right = [], []
    for tokens in texts.split(AT_ONCE):
        _, captured = target.features(tokens, head.shape.aux_layers)
        features = head.fuse(captured)
        for anchors in torch.arange(PROMPT, PROMPT + NEW - len(rows) - 1).split(AT_ONCE):
            at = anchors[:, None] + rows
            before = tokens[:, at]
            inputs = before.clone()
            inputs[..., 1:] = head.shape.mask_token
            hidden = head(features, F.embedding(inputs, target.embed_weight), anchors)
            probs = head.logits(hidden, before, target.output_weight).softmax(-1)
            best = probs.max(-1)
            scores.append(best.values)
            right.append((best.indices == tokens[:, at + 1]).long().cumprod(-1))
    parts = -(-(NEW - len(rows) - 1) // AT_ONCE)
    joined = [
        torch.cat([torch.cat(all_of[i : i + parts], 1) for i in range(0, len(all_of), parts)])
        for all_of in (scores, right)
    ]
    return joined[0].double().numpy(), joined[1].double().numpy()


def load(path: Path, target: Target) -> BlockHead:
    """Loads a DSpark head in DeepSpec's layout."""
    config = json.loads((path / "config.json").read_text())
    layer = dataclasses.replace(
        target.shape,
        num_layers=config["num_hidden_layers"],
        intermediate_size=config["intermediate_size"],
    )
    shape = BlockShape(
        "DSPARK",
        layer,
        tuple(number + 1 for number in config["target_layer_ids"]),
        target.shape.num_layers,
        config["block_size"],
        config["mask_token_id"],
        config["markov_rank"],
    )
    return load_block_head(path, shape)


def knowledge(scores: Array, right: Array, fitted: slice) -> dict[str, Array]:
    """Returns, for each policy, the chance that a token and all before it are right, as far as the
    policy knows, [texts, positions, block].
    """
    size = right.shape[-1]
    edges = np.quantile(scores[fitted], np.linspace(0, 1, BINS + 1)[1:-1])
    chances = np.empty_like(scores)
    for depth in range(size):
        number = np.digitize(scores[..., depth], edges)
        is_alive = (
            right[fitted][..., depth - 1] > 0 if depth else np.ones(right[fitted].shape[:2], bool)
        )
        for one in range(BINS):
            seen = right[fitted][..., depth][is_alive & (number[fitted] == one)]
            chances[..., depth][number == one] = (seen.sum() + 0.5) / (len(seen) + 1)
    by_token = chances.cumprod(-1)
    lengths = by_token.sum(-1)
    kind = np.digitize(lengths, np.quantile(lengths[fitted], np.linspace(0, 1, CLASSES + 1)[1:-1]))
    means = np.stack([right[fitted][kind[fitted] == one].mean(0) for one in range(CLASSES)])
    mean = np.broadcast_to(right[fitted].mean((0, 1)), right.shape)
    return {"mean": mean, "class": means[kind], "each token": by_token}


def rate(
    model: StepModel, batch: int, right: Array, chances: Array, is_fixed: bool = False
) -> float:
    """Returns the tokens per second of a batch whose sequences walk through the texts.

    Args:
        right: Whether a token and all before it are right, [texts, positions, block].
        chances: What the policy knows of that.
        is_fixed: Whether all tokens with a chance are verified, whatever they cost.
    """
    rng = np.random.default_rng(1)
    texts, at = rng.integers(0, len(right), batch), rng.integers(0, right.shape[1] // 2, batch)
    drafting = model.draft_seconds(batch, 1)  # a block is drafted like one level
    costs = np.array(
        [model.seconds(batch, batch + num) for num in range(batch * right.shape[-1] + 1)]
    )
    tokens = seconds = 0.0
    for _ in range(STEPS):
        own = chances[texts, at]
        nodes = (own > 0).sum(-1) if is_fixed else _best_nodes(costs + drafting, batch, own)
        accepted = np.minimum(right[texts, at].sum(-1), nodes).astype(int)
        tokens += batch + accepted.sum()
        seconds += costs[int(nodes.sum())] + drafting * (nodes.any() or not is_fixed)
        at = at + accepted + 1
        is_over = at >= right.shape[1]
        texts = np.where(is_over, rng.integers(0, len(right), batch), texts)
        at[is_over] = 0
    return tokens / seconds


def _best_nodes(costs: Array, batch: int, chances: Array) -> Array:
    values = np.minimum.accumulate(chances, -1)
    order = np.sort(values.ravel())[::-1]
    expected = batch + np.concatenate([[0.0], np.cumsum(order)])
    count = int(np.argmax(expected / costs))
    found: Array = (values >= order[count - 1]).sum(-1) if count else np.zeros(batch, int)
    return found


if __name__ == "__main__":
    main()
