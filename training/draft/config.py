"""The settings of `foredraft train draft`."""

import math
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import ConfigError
from training.bounds import check_least, check_seed_and_rate

_LEAST = {
    "windows": 0, "text_windows": 0, "free_windows": 0, "prompt": 1, "window": 2,
    "generate_batch": 1, "steps": 1, "warmup": 0, "batch": 1, "unroll_steps": 1,
    "draft_vocab_size": 0, "intermediate_size": 0, "block": 2, "draft_layers": 1, "streams": 1,
    "anchors": 1, "markov_rank": 1, "depth": 1, "topk": 1, "tree_tokens": 2, "eval_every": 0,
    "eval_prompts": 1, "eval_prompt": 1, "eval_new_tokens": 1, "checkpoint_every": 0,
    "max_minutes": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DraftTrainingConfig:
    """Settings of a training run.

    Attributes:
        target: Hugging Face directory of the target.
        algorithm: EAGLE3, EAGLE, MTP, DFLASH, DSPARK or PEAGLE.
        data: Text whose pieces are prompts and, for `text_windows`, training text.
        validation: Held-out text; accept lengths are measured on greedy continuations of its
            prompts, by domain.
        generated: Folder of the windows that the target wrote; None is `out`.
        windows, text_windows: Number of windows written by the target, and of plain text.
        free_windows: Number of windows that the target writes from the first token on, at
            temperature 1.
        prompt, window: Number of tokens of a prompt and of a window.
        steps, warmup, batch, lr, weight_decay: the same as in `LMTrainingConfig`; `batch` counts
            windows.
        unroll_steps: Number of steps of training-time test; 1 is plain next-feature training.
        decay: Weight of a step relative to the one before it.
        token_weight, feature_weight, noise: See `unroll.draft_loss` and `unroll.unroll`.
        draft_vocab_size: EAGLE-3, P-EAGLE: number of the windows' most frequent tokens to draft; 0
            is the whole vocabulary.
        stream_norms: EAGLE-3, P-EAGLE: see `HeadShape`.
        intermediate_size: Width of the head's MLP; 0 is the target's.
        block: DFLASH, DSPARK, PEAGLE: number of tokens that one forward proposes.
        draft_layers: DFLASH, DSPARK, PEAGLE: number of layers of the draft.
        streams: DFLASH, DSPARK: number of residual streams of the target that the draft reads.
        anchors: DFLASH, DSPARK, PEAGLE: number of blocks in each window of a step.
        gamma: DFLASH, DSPARK: number of rows after which a row's weight has fallen to 1 / e.
        markov_rank: DSPARK: rank of the bias that depends on the token before.
        mask_token: DFLASH, DSPARK, PEAGLE: token id that stands for tokens to be drafted; None for
            the rarest.
        dtype: Dtype of the activations of target and draft: "float32" or "bfloat16"; weights and
            the optimizer keep float32.
    """

    target: Path
    algorithm: str
    data: tuple[Path, ...]
    out: Path
    validation: tuple[Path, ...] = ()
    generated: Path | None = None
    windows: int = 4096
    text_windows: int = 0
    free_windows: int = 0
    prompt: int = 128
    window: int = 512
    generate_batch: int = 1024
    temperatures: tuple[float, ...] = (0.0, 0.8)
    steps: int = 1000
    warmup: int = 100
    batch: int = 32
    lr: float = 3e-3
    weight_decay: float = 0.05
    unroll_steps: int = 5
    decay: float = 0.8
    token_weight: float = 1.0
    feature_weight: float = 0.0
    noise: float = 0.0
    draft_vocab_size: int = 0
    stream_norms: bool = False
    intermediate_size: int = 0
    block: int = 8
    draft_layers: int = 2
    streams: int = 4
    anchors: int = 32
    gamma: float = 4.0
    markov_rank: int = 64
    mask_token: int | None = None
    depth: int = 5
    topk: int = 8
    tree_tokens: int = 32
    eval_every: int = 0
    eval_prompts: int = 128
    eval_prompt: int = 256
    eval_new_tokens: int = 160
    checkpoint_every: int = 0
    max_minutes: float = math.inf
    seed: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = True
    resume: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that cannot be trained or measured with."""
        check_least(self, _LEAST, {"intermediate_size": "--intermediate"})
        check_seed_and_rate(self.seed, self.lr)
        for temperature in self.temperatures:
            if not 0 <= temperature < math.inf:
                raise ConfigError(f"--temperature must be at least 0, not {temperature}")
        if not self.windows + self.text_windows + self.free_windows:
            raise ConfigError("give --windows, --text-windows or --free-windows")
        if self.windows and self.prompt >= self.window:
            raise ConfigError(
                f"--window counts the prompt: it must be more than --prompt {self.prompt}, not"
                f" {self.window}"
            )
        is_block = self.algorithm in ("DFLASH", "DSPARK", "PEAGLE")
        drafted, flag = (
            (self.block, "--block") if is_block else (self.unroll_steps, "--unroll-steps")
        )
        if self.window < drafted + 2:
            raise ConfigError(f"--window must be more than {flag} + 1 = {drafted + 1} tokens")
        measured, flag = (self.block + 1, "--block + 1") if is_block else (self.depth, "--depth")
        if self.validation and self.eval_new_tokens <= measured:
            raise ConfigError(f"--eval-new-tokens must be more than {flag} = {measured}")
