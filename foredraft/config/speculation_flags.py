"""The flags of speculation, and what follows from one draft's."""

from dataclasses import dataclass

from foredraft.config.algorithms import ALGORITHMS, Algorithm
from foredraft.config.options import option


@dataclass(frozen=True, kw_only=True)
class SpeculationFlags:
    """Flags of speculation; `SpeculationConfig` checks them."""

    speculative_algorithm: str = option(
        "NGRAM",
        "How tokens are drafted: NONE, NGRAM, STANDALONE, EAGLE (EAGLE-2; NEXTN is another name of"
        " it), EAGLE3, MTP, or a block in one forward: DFLASH, DSPARK or PEAGLE. Several may be"
        " given with commas between them, as in EAGLE3,NGRAM: each sequence is drafted for by the"
        " best one.",
        choices=tuple(ALGORITHMS),
        joined=True,
        aliases=("--speculative-algo",),
    )
    speculative_draft_model_path: str = option(
        "",
        "Draft model of STANDALONE, or head of any other algorithm but NGRAM; `foredraft serve`"
        " finds out the algorithm, and the target where the files name it. Without a head MTP takes"
        " the target's own layers, and so does EAGLE. Where several algorithms have a model,"
        " NAME=PATH for each, with commas between them.",
        aliases=("--speculative-draft-model", "--speculative-draft"),
    )
    speculative_draft_model_revision: str = option("", "Like --revision, for the draft model.")
    speculative_draft_load_format: str = option(
        "auto", "Like --load-format, for the draft model.", choices=("auto", "dummy")
    )
    speculative_num_steps: int | None = option(
        None,
        "Depth of the draft tree (heads: 5 for a Llama target, else 3; blocks: what one proposes;"
        " STANDALONE: 3; NGRAM: --speculative-num-draft-tokens - 1).",
    )
    speculative_eagle_topk: int | None = option(
        None,
        "Children per node and beams per level of a model's draft tree (heads of a Llama target on"
        " a GPU: 4; 1: a chain).",
    )
    speculative_num_draft_tokens: int | None = option(
        None,
        "Rows that the target verifies per step, the root included (heads of a Llama target: 8, on"
        " a CPU 6; STANDALONE: 4; NGRAM: 12).",
    )
    speculative_token_map: str = option(
        "",
        "FR-Spec: file of the token ids that EAGLE, MTP or STANDALONE may draft (.pt, .json or"
        " .safetensors), on the hub as organisation/name/file, or foredraft-demo-token-map.",
    )
    enable_multi_layer_eagle: bool = option(
        False,
        "MTP: one module of the head for each depth, instead of its first for all; drafts chains.",
    )
    speculative_draft_ahead: bool | None = option(
        None,
        "STANDALONE chains of up to 8 tokens on a GPU: while the target verifies one or two"
        " sequences, their draft prepares the chains that follow the likeliest outcomes, and the"
        " target does not wait where one was right. Each batch size keeps it only while steps are"
        " faster by it (default: on with a --draft-device that has no rank of the target).",
    )
    speculative_draft_model_quantization: str = option(
        "unquant",
        "Weights of the draft in memory, quantized while loading, scales per output: int8 (on the"
        " CPU it saves memory, not time), or fp8 on GPUs from sm_89 on, whose activations are"
        " rounded to fp8 too.",
        choices=("unquant", "int8", "fp8"),
    )
    speculative_attention_mode: str = option(
        "prefill",
        "Which attention backend verifies drafts. Prefill and decode have the same one here, so"
        " both values mean the same.",
        choices=("prefill", "decode"),
    )
    enable_torch_compile: bool = option(
        False,
        "Taken from SGLang's command lines, and changes nothing: decode steps are captured as CUDA"
        " graphs with fused kernels anyway.",
    )
    torch_compile_max_bs: int | None = option(
        None,
        "Taken with --enable-torch-compile, and changes nothing; --cuda-graph-max-bs bounds what is"
        " captured.",
    )
    speculative_draft_sampling: str = option(
        "coupled", "Order of drafted children at temperature > 0.", choices=("topk", "coupled")
    )
    speculative_accept_threshold_single: float = option(
        1.0, "LOSSY below 1: accept a drafted token whose target probability reaches this."
    )
    speculative_accept_threshold_acc: float = option(
        1.0, "LOSSY below 1: raise the acceptance of drafted tokens to min(1, P/acc)."
    )
    speculative_ngram_min_match_window_size: int = option(1, "Shortest suffix that is matched.")
    speculative_ngram_max_match_window_size: int | None = option(
        None, "Longest suffix that is matched (12)."
    )
    speculative_ngram_min_bfs_breadth: int = option(1, "Children taken at the deepest level.")
    speculative_ngram_max_bfs_breadth: int = option(10, "Children taken next to the root.")
    speculative_ngram_branch_length: int | None = option(
        None, "Tokens of a window inserted in the trie (18)."
    )
    speculative_ngram_max_trie_depth: int | None = option(
        None, "SGLang's newer name of the window: sets match window and branch length together."
    )
    speculative_ngram_match_type: str = option(
        "BFS", "Expand matches by recency (BFS) or by frequency (PROB).", choices=("BFS", "PROB")
    )
    speculative_ngram_scope: str = option(
        "key",
        "Whose text feeds whose drafts: one request, one API key, or all.",
        choices=("request", "key", "server"),
    )
    speculative_ngram_capacity: int = option(
        10_000_000, "Nodes of the trie at most; the least recently used go first."
    )
    speculative_ngram_override: bool = option(
        False,
        "N-grams over a model's draft: for a sequence and step whose newest text was seen before,"
        " what followed it then is verified in place of the model's proposal.",
    )
    speculative_ngram_override_min_match: int = option(
        4, "Shortest match with which --speculative-ngram-override proposes, in tokens."
    )

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Returns the algorithms, one for each draft; only NONE where nothing is drafted."""
        return tuple(self.speculative_algorithm.split(","))

    @property
    def traits(self) -> Algorithm:
        """Returns what is declared of the algorithm; for several, what is declared of none."""
        return ALGORITHMS.get(self.speculative_algorithm, ALGORITHMS["NONE"])

    @property
    def ngram_window(self) -> tuple[int, int]:
        """Returns (longest matched suffix, inserted window)."""
        depth = self.speculative_ngram_max_trie_depth
        if depth is not None:
            return depth, depth
        longest = self.speculative_ngram_max_match_window_size
        inserted = self.speculative_ngram_branch_length
        return 12 if longest is None else longest, 18 if inserted is None else inserted
