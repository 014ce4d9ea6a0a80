"""Targets and drafts of `divergence`: the bundled family, Gemma, and random weights of real and of
tiny shapes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.divergence_jobs import grammars_of, jobs_of, random_prompts, text_prompts
from benchmarks.gpu.shapes import EAGLE3_8B, GEMMA3_1B, LLAMA_8B, QWEN3_8B
from foredraft.models.config import ModelConfig
from foredraft.models.registry import BUNDLED_DRAFTS, DEMO_GEMMA, resolve_model_path
from testing.block_drafts import tiny_block, tiny_peagle
from testing.checkpoints import make_checkpoint
from testing.draft_heads import save_head
from testing.engines import Job

CHAIN, TREE = (3, 1, 4), (4, 4, 12)
SHAPES = {"chain": CHAIN, "tree": TREE}
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
# Random weights: matrices of these sizes have columns that cuBLAS cuts for few rows.
RANDOM: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA_8B,
    "qwen3-8b": QWEN3_8B,
    "gemma3-1b": GEMMA3_1B,
    "k-18944": {
        **LLAMA_8B,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "k-25600": {
        **QWEN3_8B,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
    },
}
NAMES = ("demo", "gemma", "tiny", *RANDOM)


@dataclass(frozen=True, slots=True)
class Family:
    """A target and what can draft for it.

    Attributes:
        drafts: Flags of each draft, by algorithm.
        flags: Flags that the target is served with.
        context: Positions of a sequence at most.
    """

    path: Path
    drafts: dict[str, dict[str, Any]]
    flags: dict[str, Any]
    context: int = 1024

    def jobs(self, num_texts: int, num_tokens: int) -> list[Job]:
        """Requests to compare."""
        vocab_size = ModelConfig.from_dir(self.path).vocab_size
        if not (self.path / "tokenizer.json").is_file():
            room = self.context - num_tokens - 16
            prompts = [prompt[:room] for prompt in random_prompts(num_texts, vocab_size)]
            return jobs_of(prompts, num_tokens, [])
        prompts = text_prompts(self.path, num_texts)
        return jobs_of(prompts, num_tokens, grammars_of(self.path, vocab_size))

    def draft_flags(self, algorithm: str, shape: str) -> dict[str, Any]:
        """Flags of an engine with a draft."""
        steps, topk, tokens = SHAPES[shape]
        if algorithm == "NGRAM":
            return {"speculative_num_draft_tokens": tokens}
        return {
            **self.drafts[algorithm],
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": tokens,
        }


def family_of(name: str, folder: Path, num_layers: int) -> Family:
    """Returns the family of that name, one of NAMES; writes its files to a folder.

    Args:
        num_layers: Number of layers, for random weights.
    """
    if name == "demo":
        drafts = {
            algorithm: {"speculative_draft_model_path": str(resolve_model_path(draft))}
            for algorithm, draft in BUNDLED_DRAFTS.items()
        }
        return Family(resolve_model_path("foredraft-demo"), {"NGRAM": {}, **drafts}, {})
    if name == "gemma":
        path = resolve_model_path(DEMO_GEMMA)
        own = {"speculative_draft_model_path": str(path)}
        return Family(path, {"NGRAM": {}, "STANDALONE": own}, {})
    if name == "tiny":
        heads = {
            "DFLASH": tiny_block("DFLASH", 1, ids=(0, 2), window=9, num_layers=3, sliding=(1,)),
            "DSPARK": tiny_block("DSPARK", 4, markov="rnn"),
            "PEAGLE": tiny_peagle(3),
        }
        drafts = {}
        for algorithm, head in heads.items():
            (folder / algorithm).mkdir()
            path = save_head(head, folder / algorithm)
            drafts[algorithm] = {"speculative_draft_model_path": str(path)}
        (folder / "target").mkdir()
        target = make_checkpoint(folder / "target", seed=5)
        context = ModelConfig.from_dir(target).max_position_embeddings
        return Family(target, {"NGRAM": {}, **drafts}, {}, min(1024, context))
    config = {**RANDOM[name], "num_hidden_layers": num_layers}
    target = _written(folder / "target", config)
    last = num_layers - 1  # the streams that a head reads by default need more layers
    layers = {"eagle_aux_hidden_state_layer_ids": [min(2, last), num_layers // 2, max(1, last - 2)]}
    widths = {key: config[key] for key in WIDTHS}
    head = _written(folder / "eagle3", {**EAGLE3_8B, **widths, **layers})
    dummy = {"speculative_draft_load_format": "dummy"}
    # The target itself as a draft: much of what it proposes is accepted.
    drafts = {
        "EAGLE3": {"speculative_draft_model_path": str(head), **dummy},
        "STANDALONE": {"speculative_draft_model_path": str(target), **dummy},
    }
    return Family(target, {"NGRAM": {}, **drafts}, {"load_format": "dummy"})


def _written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder
