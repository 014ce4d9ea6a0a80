"""`foredraft train draft`: trains a head or a block drafter for a target."""

import argparse
import json
from pathlib import Path

from training.commands.parsing import AddArgument, Subparsers, add_checkpoint_flags, resolve_device
from training.progress import say

ALGORITHMS = ("EAGLE3", "EAGLE", "MTP", "DFLASH", "DSPARK", "PEAGLE")
_BLOCKS = "DFLASH, DSPARK, PEAGLE"


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("draft", help="train a head or a block drafter for a target")
    _add_text_flags(parser.add_argument)
    _add_optimizer_flags(parser.add_argument)
    _add_head_flags(parser.add_argument)
    _add_run_flags(parser.add_argument)
    parser.set_defaults(run=_run)


def _add_text_flags(add: AddArgument) -> None:
    """Adds the target, and the text that it is to write."""
    add("--algorithm", choices=ALGORITHMS, default="EAGLE3")
    add(
        "--target",
        required=True,
        help="Hugging Face directory of the target, or its name: bundled, as foredraft-demo, or on"
        " the hub",
    )
    add("--data", type=Path, nargs="*", default=[], help="text to take prompts from")
    add("--validation", type=Path, nargs="*", default=[], help="held-out text to measure on")
    add("--out", type=Path, required=True)
    add("--generated", type=Path, help="folder that keeps what the target wrote; default: OUT")
    add("--windows", type=int, default=4096, help="windows that the target writes")
    add("--text-windows", type=int, default=0, help="windows of plain text beside them")
    add(
        "--free-windows",
        type=int,
        default=0,
        help="windows that the target writes from its first token on",
    )
    add("--prompt", type=int, default=128, help="tokens of a prompt")
    add("--window", type=int, default=512, help="tokens of a window, prompt included")
    add("--generate-batch", type=int, default=1024, help="windows written at once")
    add(
        "--temperature", type=float, nargs="+", default=[0.0, 0.8], help="used in turn; 0 is greedy"
    )


def _add_optimizer_flags(add: AddArgument) -> None:
    """Adds the length of the training, its steps and its loss."""
    add("--steps", type=int, default=1000)
    add("--warmup", type=int, default=100)
    add("--batch", type=int, default=32, help="windows in an optimizer step")
    add("--lr", type=float, default=3e-3)
    add("--weight-decay", type=float, default=0.05)
    add("--unroll-steps", type=int, help="training-time test; default: 5, and 1 for EAGLE")
    add("--decay", type=float, default=0.8, help="weight of a step beside the one before it")
    add("--token-weight", type=float, default=1.0)
    add("--feature-weight", type=float, help="default: 1 for EAGLE, else 0")
    add("--noise", type=float, help="on the target's features; default: 0.1 for EAGLE, else 0")


def _add_head_flags(add: AddArgument) -> None:
    """Adds the sizes of the head or the block drafter."""
    add(
        "--draft-vocab-size",
        type=int,
        default=0,
        help="EAGLE3, PEAGLE: most frequent tokens; 0 = all",
    )
    add(
        "--stream-norms",
        action="store_true",
        help=(
            "EAGLE3, PEAGLE: normalise each fused stream (fc_norm), for targets with large residual"
            " streams such as Gemma's"
        ),
    )
    add("--intermediate", type=int, default=0, help="width of the head's MLP; 0 = the target's")
    add("--block", type=int, default=8, help=f"{_BLOCKS}: tokens that a block proposes")
    add("--draft-layers", type=int, default=2, help=f"{_BLOCKS}: layers of the draft")
    add("--streams", type=int, default=4, help="DFLASH, DSPARK: layers of the target that it reads")
    add("--anchors", type=int, default=32, help=f"{_BLOCKS}: blocks in each window of a step")
    add("--gamma", type=float, default=4.0, help="DFLASH, DSPARK: how fast later rows weigh less")
    add("--markov-rank", type=int, default=64, help="DSPARK: width of the bias by the token before")
    add("--mask-token", type=int, help=f"{_BLOCKS}: stands for what is drafted [the rarest]")


def _add_run_flags(add: AddArgument) -> None:
    """Adds what is measured and when, and where and how long the training runs."""
    add("--depth", type=int, default=5, help="drafted tokens of a measured chain or tree level")
    add("--topk", type=int, default=8, help="of the measured trees")
    add("--tree-tokens", type=int, default=32, help="of the measured trees, root included")
    add("--eval-every", type=int, default=0, help="steps between measurements; 0 = only at the end")
    add("--eval-prompts", type=int, default=128, help="held-out prompts of each domain")
    add("--eval-prompt", type=int, default=256, help="tokens of a held-out prompt")
    add("--eval-new-tokens", type=int, default=160, help="tokens written after each")
    add_checkpoint_flags(add)
    add("--seed", type=int, default=1)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of activations; auto: bfloat16 on CUDA, float32 on a CPU",
    )
    add("--no-compile", action="store_true", help="do not use torch.compile")
    add("--resume", action="store_true", help="go on from OUT/checkpoint.pt if there is one")


def _run(arguments: argparse.Namespace) -> int:
    say("loading PyTorch and the target")
    from foredraft.models.registry import resolve_model_path
    from training.draft.block_trainer import BlockTrainer
    from training.draft.config import DraftTrainingConfig
    from training.draft.parallel_trainer import ParallelTrainer
    from training.draft.trainer import DraftTrainer

    device = resolve_device(arguments.device)
    is_eagle = arguments.algorithm == "EAGLE"
    given = dict(vars(arguments))
    for name in ("run", "no_compile"):
        del given[name]
    given["target"] = resolve_model_path(arguments.target)
    given["data"] = tuple(given["data"])
    given["validation"] = tuple(given["validation"])
    given["temperatures"] = tuple(given.pop("temperature"))
    given["intermediate_size"] = given.pop("intermediate")
    given["device"] = device
    for name, eagle, other in (
        ("unroll_steps", 1, 5),
        ("feature_weight", 1.0, 0.0),
        ("noise", 0.1, 0.0),
    ):
        if given[name] is None:
            given[name] = eagle if is_eagle else other
    if given["dtype"] == "auto":
        given["dtype"] = "bfloat16" if device == "cuda" else "float32"
    given["compile"] = device == "cuda" and not arguments.no_compile
    trainers = {"DFLASH": BlockTrainer, "DSPARK": BlockTrainer, "PEAGLE": ParallelTrainer}
    make = trainers.get(arguments.algorithm, DraftTrainer)
    result = make(DraftTrainingConfig(**given)).run()
    lengths = {
        "chain": {domain: round(r.length, 3) for domain, r in result.chain.items()},
        "tree": {domain: round(r.length, 3) for domain, r in result.tree.items()},
    }
    print(json.dumps({"finished": result.finished, "step": result.step} | lengths))
    return 0
