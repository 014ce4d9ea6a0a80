"""Models what a draft's own confidence would be worth: how much of each block a step verifies.

    python -m benchmarks.confidence --table benchmarks/step_tables/gemma_cpu.json benchmarks/step_tables/h200_blocks.json

The bundled DSpark head drafts a block behind every position of texts that the target wrote after
held-out prompts, greedily or at temperature 1 with the noise that both share. First it is shown how
much each sign tells of whether a token is right, in bits for each token whose forerunners are right:
the draft's confidence head, and the values of `foredraft.trees.tree_building`. Steps then take what
a table says, as in `benchmarks.adaptive`, drafting whole blocks included; no clock is read. Each
policy has one budget for a step's batch: the likeliest tokens first, as many as give the most tokens
per second. They differ in what they know of a sequence: the mean of its text (more than a controller
knows that counts outcomes), the block's class by its confidence, six in all, or the confidence of
each token. Classes and the calibration of confidences come from the other half of the texts. Ratios
are to the best fixed size. Where a table pads, all sequences of a step have the same rows: `each
step` chooses them for a batch once its blocks have come; the others could do so only if the rows of
captured steps were handed out on the device, at no cost.
"""  # noqa: E501

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.real_prompts import real_prompts
from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.trees.tree_building import MIN_RIVALS
from testing.step_model import TABLES, StepModel
from training.draft.blocks import BlockHead, BlockShape, load_block_head
from training.draft.target import Target

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
PROMPT, NEW, AT_ONCE, CLASSES, BINS, STEPS = 96, 128, 8, 6, 12, 20_000
HALVES = (slice(0, None, 2), slice(1, None, 2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--table", type=Path, nargs="+", default=[TABLES / "gemma_cpu.json"])
    add("--batch", nargs="+", type=int, default=[1, 8, 16, 32, 64])
    add("--head", default=BUNDLED_DRAFTS["DSPARK"], help="a DSpark head")
    add("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    add("--sign", default="value", choices=["value", "head"], help="what policies know")
    args = parser.parse_args()
    for temperature in args.temperature:
        signs, right = drafted(resolve_model_path(args.head), temperature)
        print(f"\ntemperature {temperature:g}: {1 + right.sum(-1).mean():.2f} tokens a block")
        for name, scores in signs.items():
            print(f"bits by {name}: {surprise(scores, right):.3f}")
        for path in args.table:
            report(path, args.batch, signs[args.sign], right)


def report(path: Path, batches: list[int], scores: Array, right: Array) -> None:
    """Prints a table's ratios."""
    is_padded = "grid" in json.loads(path.read_text())
    size = right.shape[-1] - is_padded  # a root and seven tokens are a captured shape
    scores, right = scores[..., :size], right[..., :size]
    model = StepModel.from_json(path, (size, 1, size))
    known = [knowledge(scores, right, fitted) for fitted in HALVES]
    names = ["each step"] * is_padded + list(known[0])
    print(f"\n{path.stem}\n| batch | best size, over plain | " + " | ".join(names) + " |")
    print("| --- " * (2 + len(names)) + "|")
    for batch in batches:
        if is_padded and batch < 8:
            continue
        sizes = [rows - 1 for rows in (1, 2, 4, 8)] if is_padded else list(range(size + 1))
        sizes = [num for num in sizes if not is_padded or (batch, 1 + num) in model.target]
        fixed = np.array(
            [[rate(model, batch, right[half], num) for num in sizes] for half in HALVES]
        )
        best = fixed.max(1)
        ratios = []
        for name in names:
            policy = "each token" if name == "each step" else name
            rates = [
                rate(model, batch, right[half], of[policy][half], name == "each step")
                for of, half in zip(known, reversed(HALVES), strict=True)
            ]
            ratios.append(float(np.mean(np.array(rates) / best[::-1])))
        found = "/".join(str(sizes[i]) for i in fixed.argmax(1))
        gain = float(np.mean(best / fixed[:, 0]))
        cells = " | ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"| {batch} | {found}, {gain:.2f} | {cells} |", flush=True)


@torch.no_grad()
def drafted(path: Path, temperature: float) -> tuple[dict[str, Array], Array]:
    """Returns two signs of each token of the block behind each position, and whether it and all
    before it are right, [texts, positions, block] each.
    """
    folder = resolve_model_path("foredraft-demo")
    target = Target(folder, torch.device("cpu"), torch.float32)
    prompts = [one[:PROMPT] for one in real_prompts(Tokenizer.from_dir(folder))]
    prompts = [one for one in prompts if len(one) == PROMPT]
    texts = target.generate(torch.tensor(prompts), NEW, temperature, 0)
    head = load(path, target)
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(head.shape.block)
    found: list[list[Tensor]] = [[], [], []]
    for tokens in texts.split(AT_ONCE):
        hidden, captured = target.features(tokens, head.shape.aux_layers)
        features = head.fuse(captured)
        noise = None
        if temperature:
            logits = F.linear(hidden[:, :-1], target.output_weight)
            noise = noise_behind(logits.log_softmax(-1), tokens[:, 1:], generator)
        parts: list[list[Tensor]] = [[], [], []]
        for anchors in torch.arange(PROMPT, PROMPT + NEW - len(rows) - 1).split(AT_ONCE):
            at = anchors[:, None] + rows
            before = tokens[:, at]
            inputs = before.clone()
            inputs[..., 1:] = head.shape.mask_token
            states = head(features, F.embedding(inputs, target.embed_weight), anchors)
            scores = head.logits(states, before, target.output_weight).log_softmax(-1)
            if noise is not None:
                scores += noise[:, at]
            best = scores.topk(MIN_RIVALS if temperature else scores.shape[-1], -1)
            parts[0].append(best.values.softmax(-1)[..., 0])
            parts[1].append(head.confidence(states, before).sigmoid())
            parts[2].append((best.indices[..., 0] == tokens[:, at + 1]).long().cumprod(-1))
        for all_of, part in zip(found, parts, strict=True):
            all_of.append(torch.cat(part, 1))
    value, confidence, right = (torch.cat(all_of).double().numpy() for all_of in found)
    return {"value": value, "head": confidence}, right


def noise_behind(log_probs: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Draws Gumbel noise [B, T, V] under which the best of log probabilities [B, T, V] and noise
    are these tokens [B, T].
    """

    def gumbel(*shape: int) -> Tensor:
        drawn = torch.rand(shape, generator=generator).clamp(1e-20, 1 - 1e-7)
        return -(-drawn.log()).log()

    top = gumbel(*tokens.shape)[..., None]  # the maximum of all, whichever it is
    below = -((-top).exp() + (-(log_probs + gumbel(*log_probs.shape))).exp()).log()
    return below.scatter(-1, tokens[..., None], top) - log_probs


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


def calibrated(scores: Array, right: Array, fitted: slice) -> Array:
    """Returns the chance that a token is right given that all before it are, by its sign."""
    edges = np.quantile(scores[fitted], np.linspace(0, 1, BINS + 1)[1:-1])
    number, is_alive = np.digitize(scores, edges), _is_alive(right)
    chances = np.empty_like(scores)
    for one in range(BINS):
        seen = right[fitted][is_alive[fitted] & (number[fitted] == one)]
        chances[number == one] = (seen.sum() + 0.5) / (len(seen) + 1)
    return chances


def surprise(scores: Array, right: Array) -> float:
    """Returns the bits that outcomes have left once a sign is known."""
    left = []
    for fitted, tested in (HALVES, HALVES[::-1]):
        chances, is_alive = calibrated(scores, right, fitted)[tested], _is_alive(right)[tested]
        of_outcome = np.where(right[tested] > 0, chances, 1 - chances)[is_alive]
        left.append(-np.log2(of_outcome).mean())
    return float(np.mean(left))


def _is_alive(right: Array) -> NDArray[np.bool_]:
    """Returns whether all tokens before each one are right."""
    return np.concatenate((np.ones_like(right[..., :1]), right[..., :-1]), -1) > 0


def knowledge(scores: Array, right: Array, fitted: slice) -> Mapping[str, Array]:
    """Returns, for each policy, the chance that a token and all before it are right, as far as the
    policy knows, [texts, positions, block].
    """
    by_token = calibrated(scores, right, fitted).cumprod(-1)
    lengths = by_token.sum(-1)
    kind = np.digitize(lengths, np.quantile(lengths[fitted], np.linspace(0, 1, CLASSES + 1)[1:-1]))
    means = np.stack([right[fitted][kind[fitted] == one].mean(0) for one in range(CLASSES)])
    of_text = np.broadcast_to(right.mean(1, keepdims=True), right.shape)
    return {"text": of_text, "class": means[kind], "each token": by_token}


def rate(
    model: StepModel, batch: int, right: Array, known: Array | int, is_even: bool = False
) -> float:
    """Returns the tokens per second of a batch whose sequences walk through the texts.

    Args:
        right: Whether a token and all before it are right, [texts, positions, block].
        known: What the policy knows of that; or a number of tokens that is verified of each block.
        is_even: Whether all sequences of a step verify the same number.
    """
    size, rng = right.shape[-1], np.random.default_rng(1)
    texts, at = rng.integers(0, len(right), batch), rng.integers(0, right.shape[1] // 2, batch)
    if model.is_padded:
        shapes = [rows for of, rows in model.target if of == batch]
        totals = np.array([batch * (rows - 1) for rows in sorted(shapes)])
        costs = np.array([model.seconds(batch, rows) for rows in sorted(shapes)])
    else:
        totals = np.arange(batch * size + 1)
        drafting = model.draft_seconds(batch, 1)  # a block is drafted like one level
        costs = np.array([model.seconds(batch, batch + int(num)) + drafting for num in totals])
        costs[0] -= drafting * isinstance(known, int)
    tokens = seconds = 0.0
    for _ in range(max(STEPS // batch, 400)):
        if isinstance(known, int):
            nodes, cost = np.full(batch, known), costs[np.searchsorted(totals, batch * known)]
        else:
            nodes, cost = _best_nodes(totals, costs, known[texts, at], is_even)
        accepted = np.minimum(right[texts, at].sum(-1), nodes).astype(int)
        tokens += batch + accepted.sum()
        seconds += cost
        at = at + accepted + 1
        is_over = at >= right.shape[1]
        texts = np.where(is_over, rng.integers(0, len(right), batch), texts)
        at[is_over] = 0
    return tokens / seconds


def _best_nodes(
    totals: Counts, costs: Array, chances: Array, is_even: bool
) -> tuple[Counts, float]:
    """Returns the numbers of tokens to verify of each block, and the seconds of the step."""
    batch, size = chances.shape
    order = np.argsort(-chances, axis=None, kind="stable")
    if is_even:
        order = np.arange(batch * size).reshape(batch, size).T.ravel()
    expected = batch + np.concatenate([[0.0], np.cumsum(chances.ravel()[order])])
    # A padded step that has drafted is one with trees.
    first = int(totals[1] > 1)
    index = first + int(np.argmax(expected[totals[first:]] / costs[first:]))
    nodes = np.bincount(order[: totals[index]] // size, minlength=batch)
    return nodes, float(costs[index])


if __name__ == "__main__":
    main()
