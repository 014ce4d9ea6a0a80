"""`foredraft train lm`: trains a small language model from text files."""

import argparse
import json
from pathlib import Path

from training.commands.parsing import Subparsers, add_checkpoint_flags, resolve_device


def _repeat(text: str) -> tuple[str, int]:
    domain, _, count = text.partition("=")
    if not count.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not DOMAIN=N")
    return domain, int(count)


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("lm", help="train a small language model from text files")
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        help="files or folders of text or .jsonl[.xz]",
    )
    add("--validation", type=Path, nargs="*", default=[], help="held-out files or folders")
    add("--out", type=Path, required=True)
    add("--tokenizer", type=Path, help="use this tokenizer.json or folder instead of training one")
    add("--tokenizer-bytes", type=int, default=60_000_000, help="text to train the tokenizer on")
    add(
        "--repeat",
        type=_repeat,
        nargs="*",
        default=[],
        metavar="DOMAIN=N",
        help="see a domain N times an epoch",
    )
    add("--vocab-size", type=int, default=8192)
    add("--layers", type=int, default=16)
    add("--hidden", type=int, default=320)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, default=2)
    add("--head-dim", type=int, default=64)
    add("--intermediate", type=int, default=832)
    add("--context", type=int, default=2048)
    add("--untied", action="store_true", help="give the output its own matrix")
    add("--steps", type=int, default=1000)
    add("--warmup", type=int, default=100)
    add("--batch", type=int, default=64, help="windows in an optimizer step")
    add("--micro-batch", type=int, help="windows in one forward; default: all")
    add("--lr", type=float, default=3e-3)
    add("--weight-decay", type=float, default=0.1)
    add("--optimizer", choices=("muon", "adamw"), default="muon")
    add("--teacher", type=Path, help="distil from this model folder")
    add("--teacher-weight", type=float, default=0.7)
    add("--seed", type=int, default=1)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--no-compile", action="store_true", help="do not use torch.compile")
    add("--eval-every", type=int, default=0, help="steps between evaluations; 0 = only at the end")
    add("--eval-bytes", type=int, default=1_500_000, help="held-out text scored in each domain")
    add_checkpoint_flags(add)
    add("--resume", action="store_true", help="go on from OUT/checkpoint.pt if there is one")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from training.lm.model import LlamaShape
    from training.lm.trainer import LMTrainer, LMTrainingConfig

    device = resolve_device(arguments.device)
    shape = LlamaShape(
        vocab_size=arguments.vocab_size,
        hidden_size=arguments.hidden,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        intermediate_size=arguments.intermediate,
        context_length=arguments.context,
        tie_embeddings=not arguments.untied,
    )
    config = LMTrainingConfig(
        data=tuple(arguments.data),
        validation=tuple(arguments.validation),
        out=arguments.out,
        shape=shape,
        tokenizer=arguments.tokenizer,
        tokenizer_bytes=arguments.tokenizer_bytes,
        repeats=dict(arguments.repeat),
        steps=arguments.steps,
        warmup=arguments.warmup,
        batch=arguments.batch,
        micro_batch=arguments.micro_batch or arguments.batch,
        lr=arguments.lr,
        weight_decay=arguments.weight_decay,
        optimizer=arguments.optimizer,
        teacher=arguments.teacher,
        teacher_weight=arguments.teacher_weight,
        seed=arguments.seed,
        device=device,
        compile=device == "cuda" and not arguments.no_compile,
        eval_every=arguments.eval_every,
        eval_bytes=arguments.eval_bytes,
        checkpoint_every=arguments.checkpoint_every,
        max_minutes=arguments.max_minutes,
        resume=arguments.resume,
    )
    result = LMTrainer(config).run()
    print(json.dumps({"finished": result.finished, "step": result.step, "loss": result.loss}))
    return 0
