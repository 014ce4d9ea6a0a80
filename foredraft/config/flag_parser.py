"""Command lines that answer an unknown flag, such as one of SGLang or vLLM, with the right one."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

_NO_EXPERTS = "models with experts are not served here; leave it out"
_NO_LORA = "LoRA is not supported: merge the adapter into its model first"
_CHOSEN = "is chosen by the device here; leave it out"
_BY_TEMPLATE = "the chat template says how calls are written; leave it out"
_LLGUIDANCE = "grammars are always kept by llguidance; leave it out"
_ALWAYS = "is always on; leave it out"
_TEXT_ALONE = "models here generate text, and nothing else; leave it out"
_NO_LOGS = "prompts are never logged; leave it out"
_DEFAULTS = "is not read; requests have OpenAI's defaults"
_SEEDS = "give a seed with each request"

# Flags of other servers: ours with the same meaning, or what to do without.
ELSEWHERE: dict[str, str] = {
    "--pp-size": "--tensor-parallel-size",
    "--pipeline-parallel-size": "--tensor-parallel-size",
    "--ep-size": _NO_EXPERTS,
    "--enable-dp-attention": _NO_EXPERTS,
    "--dp": "start several verifiers behind one gateway (docs/several-verifiers.md)",
    "--dp-size": "start several verifiers behind one gateway (docs/several-verifiers.md)",
    "--data-parallel-size": (
        "start several verifiers behind one gateway (docs/several-verifiers.md)"
    ),
    "--enable-lora": _NO_LORA,
    "--lora-paths": _NO_LORA,
    "--lora-modules": _NO_LORA,
    "--max-loras-per-batch": _NO_LORA,
    "--max-lora-rank": _NO_LORA,
    "--is-embedding": _TEXT_ALONE,
    "--task": _TEXT_ALONE,
    "--runner": _TEXT_ALONE,
    "--enable-multimodal": _TEXT_ALONE,
    "--limit-mm-per-prompt": _TEXT_ALONE,
    "--enable-expert-parallel": _NO_EXPERTS,
    "--disable-log-requests": _NO_LOGS,
    "--enable-log-requests": _NO_LOGS,
    "--log-requests": _NO_LOGS,
    "--generation-config": _DEFAULTS,
    "--sampling-defaults": _DEFAULTS,
    "--preferred-sampling-params": _DEFAULTS,
    "--sampling-backend": _CHOSEN,
    "--grammar-backend": _LLGUIDANCE,
    "--guided-decoding-backend": _LLGUIDANCE,
    "--enable-auto-tool-choice": _BY_TEMPLATE,
    "--enable-reasoning": "--reasoning-parser",
    "--enable-metrics": _ALWAYS,
    "--enable-cache-report": _ALWAYS,
    "--enable-prefix-caching": _ALWAYS,
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-mixed-chunk": _ALWAYS,
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-model-len": "--context-length",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--max-prefill-tokens": "--chunked-prefill-size",
    "--block-size": "--page-size",
    "--enforce-eager": "--disable-cuda-graph",
    "--tokenizer": "--tokenizer-path",
    "--tokenizer-mode": "the model's files say how; leave it out",
    "--log-level-http": "--log-level",
    "--uvicorn-log-level": "--log-level",
    "--num-speculative-tokens": "--speculative-num-steps",
    "--speculative-config": "--speculative-algorithm and the flags beside it",
    "--random-seed": _SEEDS,
    "--seed": _SEEDS,
}


class FlagParser(argparse.ArgumentParser):
    """Parses whole flags, and suggests the flag that was probably meant for an unknown one."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, **keywords)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parses arguments; ends the process with status 2 and a message where a flag is
        unknown.
        """
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            hints = [hint for hint in map(self._hint, rest) if hint]
            self.error("\n  ".join([f"unrecognized arguments: {' '.join(rest)}", *hints]))
        return known

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2; the message says where the flags are explained."""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help explains every flag\n")

    def _hint(self, argument: str) -> str:
        flag = argument.partition("=")[0]
        if not flag.startswith("--"):
            return ""
        if found := ELSEWHERE.get(flag):
            return f"instead of {flag} give {found}" if found[:2] == "--" else f"{flag}: {found}"
        own = [name for name in self._option_string_actions if name.startswith("--")]
        near = difflib.get_close_matches(flag, own, n=1, cutoff=0.8)
        return f"did you mean {near[0]}?" if near else ""
