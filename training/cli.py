"""The commands below `foredraft train`: corpus, lm, draft, baselines, token-map.

Torch is imported when a command runs.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from foredraft.errors import ForedraftError
from training.progress import say

Subparsers = argparse._SubParsersAction

ALGORITHMS = ("EAGLE3", "EAGLE", "MTP", "DFLASH", "DSPARK", "PEAGLE")  # choices of `train draft`
_BLOCKS = "DFLASH, DSPARK, PEAGLE"


def add_parsers(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the training commands; each sets `run`, a function of the parsed arguments that returns
    an exit status.
    """
    _add_corpus(subparsers)
    _add_lm(subparsers)
    _add_draft(subparsers)
    _add_baselines(subparsers)
    _add_token_map(subparsers)


def main(argv: list[str]) -> int:
    """Runs one training command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="foredraft train",
        description=(
            "Trains a head or a block drafter for a target of yours (draft: EAGLE3, EAGLE, MTP,"
            " DFLASH, DSPARK, PEAGLE), or the models that come with Foredraft."
        ),
        epilog="docs/training.md goes from text to a measured head; COMMAND --help has the flags.",
    )
    add_parsers(parser.add_subparsers(title="commands", metavar="COMMAND", required=True))
    if not argv:
        parser.print_help()
        return 0
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ForedraftError as error:
        print(f"foredraft train: {error}", file=sys.stderr)
        return 2


def _add_corpus(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "corpus", help="gather permissively licensed text out of packages"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--packages", type=Path, help="folder with downloaded .deb files: build the documents"
    )
    parser.add_argument(
        "--wheels", type=Path, help="folder with the unpacked chitchat-dataset wheel"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.set_defaults(run=_run_corpus)


def _run_corpus(arguments: argparse.Namespace) -> int:
    from training.corpus.build import build_code, build_documents

    if arguments.packages:
        wheels = arguments.wheels or arguments.packages
        build_documents(arguments.packages, wheels, arguments.out, arguments.seed)
    else:
        build_code(arguments.out)
    return 0


def _repeat(text: str) -> tuple[str, int]:
    domain, _, count = text.partition("=")
    return domain, int(count)


def _add_lm(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
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
    add(
        "--checkpoint-every",
        type=int,
        default=0,
        help="steps between checkpoints; 0 = only at the end",
    )
    add("--max-minutes", type=float, default=math.inf, help="stop with a checkpoint after so long")
    add("--resume", action="store_true", help="go on from OUT/checkpoint.pt if there is one")
    parser.set_defaults(run=_run_lm)


def _run_lm(arguments: argparse.Namespace) -> int:
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


def _add_draft(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("draft", help="train a head or a block drafter for a target")
    add = parser.add_argument
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
    add("--depth", type=int, default=5, help="drafted tokens of a measured chain or tree level")
    add("--topk", type=int, default=8, help="of the measured trees")
    add("--tree-tokens", type=int, default=32, help="of the measured trees, root included")
    add("--eval-every", type=int, default=0, help="steps between measurements; 0 = only at the end")
    add("--eval-prompts", type=int, default=128, help="held-out prompts of each domain")
    add("--eval-prompt", type=int, default=256, help="tokens of a held-out prompt")
    add("--eval-new-tokens", type=int, default=160, help="tokens written after each")
    add(
        "--checkpoint-every",
        type=int,
        default=0,
        help="steps between checkpoints; 0 = only at the end",
    )
    add("--max-minutes", type=float, default=math.inf, help="stop with a checkpoint after so long")
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
    parser.set_defaults(run=_run_draft)


def _run_draft(arguments: argparse.Namespace) -> int:
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


def resolve_device(name: str) -> str:
    """Returns the device type for a name; `auto` is CUDA where there is a device, else the CPU.

    Raises:
        ConfigError: CUDA was requested, and no usable device was found.
    """
    from foredraft.attention.choice import device_for

    return device_for(name).type


def _add_baselines(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "baselines", help="bits per byte of xz and a byte n-gram model on held-out text"
    )
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, help="training text of the n-gram model"
    )
    parser.add_argument("--validation", type=Path, nargs="+", required=True)
    parser.add_argument("--max-bytes", type=int, default=100_000_000, help="training text to use")
    parser.add_argument(
        "--eval-bytes", type=int, default=1_500_000, help="as in `train lm`: 1.5 MB a domain"
    )
    parser.add_argument("--order", type=int, default=6)
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    parser.set_defaults(run=_run_baselines)


def _run_baselines(arguments: argparse.Namespace) -> int:
    import random

    from training.baselines import ByteNgram, xz_bits_per_byte
    from training.lm.evaluate import heldout_texts
    from training.text_data import read_documents

    documents = list(read_documents(arguments.data))
    random.Random(1).shuffle(documents)
    text = "\n".join(document.text for document in documents).encode()[: arguments.max_bytes]
    ngram = ByteNgram(text, arguments.order)
    rows = {}
    heldout = heldout_texts(list(read_documents(arguments.validation)), arguments.eval_bytes)
    for domain, texts in heldout.items():
        held = "\n".join(texts).encode()
        rows[domain] = {
            "bytes": len(held),
            "xz": xz_bits_per_byte(held),
            f"ngram{arguments.order}": ngram.bits_per_byte(held),
        }
    print(json.dumps(rows, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _add_token_map(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("token-map", help="rank tokens by frequency for FR-Spec")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="model folder with a tokenizer.json"
    )
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, help="text, or generated output as .jsonl"
    )
    parser.add_argument("--size", type=int, required=True, help="tokens in the map")
    parser.add_argument(
        "--always", type=int, nargs="*", default=[0], help="ids that are always in the map"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write, .pt; a .safetensors lies beside it"
    )
    parser.set_defaults(run=_run_token_map)


def _run_token_map(arguments: argparse.Namespace) -> int:
    from tokenizers import Tokenizer

    from training.text_data import read_documents
    from training.token_map import count_tokens, select_tokens, write_token_map

    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    counts = count_tokens((document.text for document in read_documents(arguments.data)), tokenizer)
    ids, coverage = select_tokens(counts, arguments.size, arguments.always)
    write_token_map(ids, arguments.out)
    print(f"{len(ids)} of {len(counts)} tokens cover {coverage:.2%} of {int(counts.sum())} tokens")
    return 0
