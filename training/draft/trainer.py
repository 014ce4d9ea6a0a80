"""The training loop of `foredraft train draft`."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.errors import CheckpointError, ConfigError
from training.draft.acceptance import Acceptance, measure
from training.draft.config import DraftTrainingConfig
from training.draft.heads import (
    Eagle3Head,
    HeadShape,
    default_aux_layers,
    make_head,
    save_head,
)
from training.draft.origin import check_origin, origin_of
from training.draft.target import Target
from training.draft.unroll import DraftInputs, draft_loss, unroll
from training.draft.windows import (
    check_length,
    check_vocabulary,
    cut,
    encode_stream,
    heldout_continuations,
    heldout_prompts,
    written_windows,
)
from training.export import settings_of, write_json
from training.lm.model import LlamaShape
from training.lm.optimizer import MuonAdamW, cosine_schedule
from training.plots import plot_curves
from training.progress import Progress, say
from training.resume import drop_state, load_state, save_state
from training.run_log import RunLog
from training.text_data import read_documents, read_tokenizer
from training.token_map import select_tokens


@dataclass(frozen=True, slots=True)
class DraftTrainingResult:
    """The result of a run: whether all steps are done, and accept lengths by domain."""

    finished: bool
    step: int
    chain: dict[str, Acceptance]
    tree: dict[str, Acceptance]


class DraftTrainer:
    """One run of `foredraft train draft`."""

    has_trees = True  # whether trees are measured

    def __init__(self, config: DraftTrainingConfig) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.target = Target(config.target, self.device, self.dtype)
        self.shape = self._head_shape()
        self.step = 0
        self.log = RunLog(config.out / "log.jsonl")
        self._check_lengths()
        self._prepare_text()
        config.out.mkdir(parents=True, exist_ok=True)  # nothing is left where the input was bad
        self.head = self._make_head()
        self.head.initialize(config.seed)
        self.head.to(self.device)
        if isinstance(self.head, Eagle3Head):
            self.head.set_vocabulary(self.draft_ids, self.target.output_weight)
        self.optimizer = MuonAdamW(self.head, config.weight_decay)
        own = self.target.is_own
        self._features = self._compiled(self.target.features) if own else self.target.features
        self._loss = self._compiled(self._loss_function())
        if config.resume:
            self._load_checkpoint()
        else:
            self.log.restore(())

    def _make_head(self) -> Any:
        return make_head(self.shape)

    def _loss_function(self) -> Callable[..., Any]:
        return self._window_loss

    @property
    def num_depths(self) -> int:
        """Number of depths whose agreement with the target is reported."""
        return self.config.unroll_steps

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function) if self.config.compile else function

    def _head_shape(self) -> HeadShape:
        config, shape = self.config, self.target.shape
        layer = LlamaShape(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_layers=1,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=config.intermediate_size or shape.intermediate_size,
            context_length=shape.context_length,
            rope_theta=shape.rope_theta,
            norm_eps=shape.norm_eps,
        )
        if config.algorithm not in ("EAGLE3", "PEAGLE"):
            return HeadShape(config.algorithm, layer)
        size = config.draft_vocab_size or shape.vocab_size
        if size > shape.vocab_size:
            raise ConfigError(f"--draft-vocab-size must be at most {shape.vocab_size}")
        streams = default_aux_layers(shape.num_layers)
        return HeadShape(config.algorithm, layer, streams, size, config.stream_norms)

    def _check_lengths(self) -> None:
        """Raises ConfigError for what the target is too small for."""
        config, shape = self.config, self.target.shape
        lengths = {"--window": config.window}
        if config.validation:
            measured = config.eval_prompt + config.eval_new_tokens
            lengths["--eval-prompt and --eval-new-tokens"] = measured
            drafted = self.shape.draft_vocab_size or shape.vocab_size
            if self.has_trees and config.topk > drafted:
                raise ConfigError(
                    f"--topk must be at most the {drafted} tokens of the draft vocabulary, not"
                    f" {config.topk}"
                )
        for flags, length in lengths.items():
            if length > shape.context_length:
                raise ConfigError(
                    f"{flags}: {length} tokens are more than the target's {shape.context_length}"
                )
        if config.mask_token is not None and not 0 <= config.mask_token < shape.vocab_size:
            raise ConfigError(f"--mask-token must be in [0, {shape.vocab_size - 1}]")

    def _prepare_text(self) -> None:
        """Reads all text before the target writes, which may take hours."""
        config = self.config
        tokenizer = read_tokenizer(config.target)
        start = tokenizer.encode("", add_special_tokens=True).ids
        stream = np.zeros(0, dtype=np.int32)
        plain = np.zeros((0, config.window), dtype=np.int32)
        if config.windows or config.text_windows:
            say("reading and encoding the text")
            stream = encode_stream(list(read_documents(config.data)), tokenizer, start)
            check_vocabulary(stream, "--data", self.target.shape.vocab_size)
            say(f"{len(stream) / 1e6:.1f} M tokens of text")
            check_length(stream, config.window if config.text_windows else config.prompt)
        if config.text_windows:
            generator = np.random.default_rng(config.seed)
            plain = cut(stream, config.text_windows, config.window, generator).astype(np.int32)
        prompts = heldout_prompts(
            list(read_documents(config.validation)),
            tokenizer,
            start,
            config.eval_prompts,
            config.eval_prompt,
            config.seed,
        )
        for tokens in prompts.values():
            check_vocabulary(tokens, "--validation", self.target.shape.vocab_size)
        if config.validation and not prompts:
            raise ConfigError(
                f"--validation: there is no text of more than --eval-prompt {config.eval_prompt}"
                " tokens"
            )
        if not config.resume:
            drop_state(config.out / "checkpoint.pt")
        windows = np.concatenate((written_windows(self.target, stream, start, config), plain))
        self.heldout = heldout_continuations(
            self.target, prompts, config.eval_new_tokens, config.seed
        )
        self.windows = torch.from_numpy(windows).to(self.device)
        counts = np.bincount(windows.ravel(), minlength=self.shape.layer.vocab_size)
        size = self.shape.draft_vocab_size or len(counts)
        ids, self.coverage = select_tokens(counts, size, start)
        self.draft_ids = torch.tensor(sorted(ids), device=self.device)

    def _batch_at(self, step: int) -> Tensor:
        """Returns the windows of one step; an epoch has each window once.

        The order depends only on the seed and the epoch.
        """
        config, count = self.config, len(self.windows)
        first = step * config.batch
        rows = []
        for epoch in range(first // count, (first + config.batch - 1) // count + 1):
            generator = torch.Generator().manual_seed(config.seed * 1_000_003 + epoch)
            order = torch.randperm(count, generator=generator)
            low = max(0, first - epoch * count)
            rows.append(order[low : first + config.batch - epoch * count])
        return self.windows[torch.cat(rows).to(self.device)].long()

    def _inputs(self, tokens: Tensor) -> DraftInputs:
        with torch.no_grad():
            hidden, captured = self._features(tokens, self.shape.aux_layers)
            embeds = F.embedding(tokens, self.target.embed_weight)
        return DraftInputs(embeds, hidden, captured)

    @torch.no_grad()
    def _draft_probs(self, hidden: Tensor) -> Tensor:
        """Returns the target's probabilities of the draft vocabulary's tokens, [B, T, Vd].

        They need not sum to one.
        """
        probs = F.softmax(self.target.logits(hidden), dim=-1)
        if len(self.draft_ids) < probs.shape[-1]:
            probs = probs[..., self.draft_ids]
        return probs.to(self.dtype)

    def _window_loss(self, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        config = self.config
        weight = self.target.output_weight
        probs = self._draft_probs(inputs.hidden)
        results = unroll(self.head, inputs, weight, config.unroll_steps, config.noise)
        return draft_loss(
            results,
            inputs.hidden,
            probs,
            config.decay,
            config.token_weight,
            config.feature_weight,
        )

    def run(self) -> DraftTrainingResult:
        """Trains to the last step or the time limit, measures, writes the checkpoint directory."""
        config = self.config
        began = mark = time.monotonic()
        parameters = sum(parameter.numel() for parameter in self.head.parameters())
        say(
            f"{config.algorithm} head of {parameters / 1e6:.2f} M parameters, {len(self.windows)}"
            f" windows of {config.window}; the draft vocabulary covers {self.coverage:.2%} of their"
            " tokens"
        )
        if config.compile:
            say("the first step compiles for about a minute")
        mark_step, told = self.step, ""
        with Progress(config.steps, self.step, config.algorithm) as progress:
            while self.step < config.steps and time.monotonic() - began < 60 * config.max_minutes:
                loss, agreement = self._train_step()
                if self.step % 20 == 0 or self.step == config.steps:
                    value = float(loss)
                    if not math.isfinite(value):
                        raise ConfigError(f"the loss is {value} at step {self.step}; lower --lr")
                    seconds = time.monotonic() - mark
                    rate = (self.step - mark_step) * config.batch * config.window / seconds
                    depths = [round(number, 4) for number in agreement.tolist()]
                    self.log.add(
                        {
                            "step": self.step,
                            "loss": value,
                            "agreement": depths,
                            "tokens_per_second": round(rate),
                        }
                    )
                    text = " ".join(f"{number:.3f}" for number in depths)
                    told = f"loss {value:.4f}, agreement by step {text}, {rate:,.0f} tokens/s"
                    mark, mark_step = time.monotonic(), self.step
                progress.advance(1, told)
                paused = time.monotonic()
                if config.eval_every and self.step % config.eval_every == 0:
                    self.measure(tree=False)
                if config.checkpoint_every and self.step % config.checkpoint_every == 0:
                    self._save_checkpoint()
                mark += time.monotonic() - paused
        return self._finish()

    def _train_loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        loss: tuple[Tensor, Tensor] = self._loss(self._inputs(tokens))
        return loss

    def _train_step(self) -> tuple[Tensor, Tensor]:
        config = self.config
        if config.noise:
            torch.manual_seed(config.seed * 1_000_003 + self.step)
        loss, agreement = self._train_loss(self._batch_at(self.step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step(cosine_schedule(self.step, config.steps, config.warmup, config.lr))
        self.step += 1
        return loss.detach(), agreement.detach()

    def _finish(self) -> DraftTrainingResult:
        config = self.config
        self._save_checkpoint()
        # What is measured is what is shipped: weights rounded to bf16.
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.copy_(parameter.bfloat16())
        chain, tree = self.measure(tree=True)
        self._save_head()
        report = {
            "parameters": sum(parameter.numel() for parameter in self.head.parameters()),
            "tokens_seen": self.step * config.batch * config.window,
            "draft_vocabulary_coverage": self.coverage,
            "chain": {domain: result.as_dict() for domain, result in chain.items()},
            "tree": {domain: result.as_dict() for domain, result in tree.items()},
            "config": settings_of(config),
        }
        write_json(config.out / "training.json", report)
        self._plot()
        return DraftTrainingResult(self.step >= config.steps, self.step, chain, tree)

    def measure(self, tree: bool) -> tuple[dict[str, Acceptance], dict[str, Acceptance]]:
        """Measures accept lengths on the held-out continuations: chains, and trees if requested."""
        config = self.config
        shape = (config.topk, config.tree_tokens) if tree else None
        chains, trees = measure(
            self.head, self.target, self.heldout, config.eval_prompt, config.depth, shape
        )
        self._tell("chain", chains)
        self._tell("tree", trees)
        return chains, trees

    def _tell(self, label: str, results: dict[str, Acceptance]) -> None:
        for domain, result in results.items():
            depths = " ".join(f"{value:.3f}" for value in result.depths)
            say(
                f"step {self.step} {domain} {label}: {result.length:.3f} tokens a verify ({depths})"
            )
        if results and label == "chain":
            measured = {domain: result.as_dict() for domain, result in results.items()}
            self.log.add({"step": self.step, "chain": measured})

    def _save_head(self) -> None:
        save_head(self.head, self.config.out, self.config.target.name)

    def _plot(self) -> None:
        trained = self.log.having("loss")
        steps = [entry["step"] for entry in trained]
        agreement = {
            f"step {k + 1}": (steps, [entry["agreement"][k] for entry in trained])
            for k in range(self.num_depths)
        }
        measured = self.log.having("chain")
        lengths = {
            domain: (
                [entry["step"] for entry in measured],
                [entry["chain"][domain]["accept_length"] for entry in measured],
            )
            for domain in self.heldout
        }
        panels = {"training agreement with the target": agreement}
        if lengths:
            panels[f"held-out accept length, chain of {self.config.depth}"] = lengths
        plot_curves(self.config.out / "curves.png", f"{self.config.algorithm} head", "step", panels)

    def _save_checkpoint(self) -> None:
        state = {
            "step": self.step,
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.log.entries,
            **origin_of(self.head.shape, self.target),
        }
        save_state(state, self.config.out / "checkpoint.pt")

    def _load_checkpoint(self) -> None:
        path = self.config.out / "checkpoint.pt"
        if not path.is_file():
            say("nothing to resume: starting at step 0")
            return
        state = load_state(path, ("head",))
        check_origin(path, state, origin_of(self.head.shape, self.target))
        try:
            self.head.load_state_dict(state["head"])
        except RuntimeError as error:  # with a line for each tensor
            algorithm = self.config.algorithm
            raise CheckpointError(f"{path} is no {algorithm} head of these sizes") from error
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.log.restore(state["history"])
        if isinstance(self.head, Eagle3Head):
            self.draft_ids = self.head.t2d.nonzero().flatten()
        say(f"resumed at step {self.step}")
