"""The training loop of `foredraft train lm`: data, steps, checkpoints, logs, evaluation, export."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from foredraft.errors import CheckpointError, ConfigError
from training.bounds import check_least, check_seed_and_rate
from training.export import save_sharded, settings_of, to_bf16, write_json
from training.lm.evaluate import DomainScore, heldout_texts, score_domains, token_losses
from training.lm.loading import load_model
from training.lm.model import Llama, LlamaShape
from training.lm.optimizer import MuonAdamW, cosine_schedule
from training.lm.speed import matmul_tflops, shape_tflops
from training.plots import plot_curves
from training.progress import Progress, say
from training.resume import drop_state, load_state, save_state
from training.run_log import RunLog
from training.text_data import (
    END_OF_TEXT,
    LEAST_TOKENS,
    Document,
    WindowSampler,
    load_or_pack,
    num_ids,
    read_documents,
    read_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from training.text_marks import copy_tokenizer, read_marks

_LEAST = {
    "steps": 1, "warmup": 0, "batch": 1, "micro_batch": 1, "tokenizer_bytes": 1, "eval_every": 0,
    "eval_bytes": 1, "checkpoint_every": 0, "max_minutes": 0,
}  # fmt: skip
_SHAPE_FLAGS = {
    "num_layers": "--layers", "hidden_size": "--hidden", "num_heads": "--heads",
    "num_kv_heads": "--kv-heads", "head_dim": "--head-dim", "intermediate_size": "--intermediate",
    "context_length": "--context",
}  # fmt: skip
_LEAST_OF_SHAPE = dict.fromkeys(_SHAPE_FLAGS, 1) | {"vocab_size": LEAST_TOKENS}


@dataclass(frozen=True, slots=True)
class LMTrainingConfig:
    """Settings of a training run.

    Attributes:
        data: Files or folders of training text.
        validation: Files or folders of held-out text; its domains are scored separately.
        out: Folder for the model, logs and checkpoint.
        shape: Sizes; `vocab_size` is also the size of a tokenizer that has to be trained.
        tokenizer: Folder or file with a `tokenizer.json` to use; None trains one.
        repeats: Number of times that a domain's documents are seen in an epoch.
        steps, warmup, batch, micro_batch: Number of optimizer steps, of warm-up steps, of windows
            in a step, and of windows in a forward.
        lr, weight_decay, optimizer: Peak learning rate, decoupled decay, `muon` or `adamw`.
        teacher: A model folder with the same tokenizer; its distribution is the target with weight
            `teacher_weight`.
        max_minutes: Minutes after which the run stops with a checkpoint; the schedule does not
            change.
    """

    data: tuple[Path, ...]
    out: Path
    shape: LlamaShape
    validation: tuple[Path, ...] = ()
    tokenizer: Path | None = None
    tokenizer_bytes: int = 60_000_000
    repeats: Mapping[str, int] = field(default_factory=dict)
    steps: int = 1000
    warmup: int = 100
    batch: int = 64
    micro_batch: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.1
    optimizer: str = "muon"
    teacher: Path | None = None
    teacher_weight: float = 0.7
    seed: int = 1
    device: str = "cpu"
    compile: bool = True
    eval_every: int = 0
    eval_bytes: int = 1_500_000
    checkpoint_every: int = 0
    max_minutes: float = math.inf
    resume: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that cannot be trained."""
        check_least(self, _LEAST, {})
        check_least(self.shape, _LEAST_OF_SHAPE, _SHAPE_FLAGS)
        check_seed_and_rate(self.seed, self.lr)
        if self.shape.head_dim % 2:
            raise ConfigError(f"--head-dim must be even, not {self.shape.head_dim}")
        if self.batch % self.micro_batch:
            raise ConfigError("--batch must be a multiple of --micro-batch")
        if self.shape.num_heads % self.shape.num_kv_heads:
            raise ConfigError("--heads must be a multiple of --kv-heads")


@dataclass(frozen=True, slots=True)
class LMTrainingResult:
    """The result of a run: whether all steps are done, the last loss of its log, scores by domain,
    tokens per second.
    """

    finished: bool
    step: int
    loss: float | None
    scores: dict[str, DomainScore]
    tokens_per_second: float


class LMTrainer:
    """One run of `foredraft train lm`."""

    def __init__(self, config: LMTrainingConfig) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.on_cuda = self.device.type == "cuda"
        heldout = list(read_documents(config.validation))
        config.out.mkdir(parents=True, exist_ok=True)
        self.step = 0
        self.log = RunLog(config.out / "log.jsonl")
        self.tokenizer, stream = self._prepare_text()
        self.shape = replace(config.shape, vocab_size=num_ids(self.tokenizer))
        dtype = torch.bfloat16 if self.on_cuda else torch.float32
        self.model = Llama(self.shape, dtype)
        self.model.initialize(config.seed)
        self.model.to(self.device)
        self.optimizer = MuonAdamW(self.model, config.weight_decay, config.optimizer == "muon")
        self.teacher = load_model(config.teacher, self.device, dtype) if config.teacher else None
        if self.teacher is not None:
            self._check_teacher(self.teacher.shape)
        tokens = torch.from_numpy(np.asarray(stream).astype(np.int32)).to(self.device)
        self.num_tokens = len(tokens)
        self.sampler = WindowSampler(tokens, self.shape.context_length, config.batch, config.seed)
        self.heldout = heldout_texts(heldout, config.eval_bytes)
        self._loss = torch.compile(self._micro_loss) if config.compile else self._micro_loss
        if config.resume:
            self._load_checkpoint()
        else:
            drop_state(config.out / "checkpoint.pt")
            self.log.restore(())

    def _check_teacher(self, teacher: LlamaShape) -> None:
        own = self.shape
        if teacher.vocab_size != own.vocab_size:
            raise ConfigError(
                f"--teacher has {teacher.vocab_size} tokens in its vocabulary, the tokenizer"
                f" {own.vocab_size}; give its folder as --tokenizer, if both are as many there"
            )
        if own.context_length > teacher.context_length:
            raise ConfigError(
                f"--context: {own.context_length} tokens are more than the teacher's"
                f" {teacher.context_length}"
            )

    def _prepare_text(self) -> tuple[Tokenizer, np.ndarray]:
        config = self.config
        documents: list[Document] = []
        source = config.tokenizer or config.out
        file = source / "tokenizer.json" if source.is_dir() else source
        cache = config.out / "tokens.npy"
        # What an earlier run left may be of other text, and of another vocabulary.
        if not config.resume:
            cache.unlink(missing_ok=True)
        has_tokenizer = config.tokenizer is not None or (config.resume and file.is_file())
        if not (cache.is_file() and has_tokenizer):
            documents = list(read_documents(config.data))
            size = sum(len(document.text) for document in documents)
            say(f"read {len(documents)} documents, {size / 1e6:.1f} M characters")
        if has_tokenizer:
            tokenizer = read_tokenizer(source)
        else:
            tokenizer = train_tokenizer(
                documents,
                config.shape.vocab_size,
                config.tokenizer_bytes,
                config.repeats,
                config.seed,
            )
            say(f"trained a tokenizer of {tokenizer.get_vocab_size()} tokens")
        self.marks = read_marks(tokenizer, source)
        if tokenizer.token_to_id(END_OF_TEXT) == 0:
            save_tokenizer(tokenizer, config.out, config.shape.context_length)
        else:
            copy_tokenizer(tokenizer, source, config.out)
        packing = (tokenizer, self.marks, config.repeats, config.seed)
        return tokenizer, load_or_pack(cache, documents, *packing)

    def _micro_loss(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (the loss to minimise, the plain cross-entropy) of windows [rows, T + 1]."""
        hidden, _ = self.model(windows[:, :-1])
        targets = windows[:, 1:]
        if self.teacher is None:
            loss = token_losses(self.model, hidden, targets).mean()
            return loss, loss.detach()
        logits = self.model.logits(hidden).float()
        log_q = F.log_softmax(logits, dim=-1)
        plain = -log_q.gather(-1, targets[..., None]).mean()
        with torch.no_grad():
            p = F.softmax(self.teacher.logits(self.teacher(windows[:, :-1])[0]).float(), dim=-1)
        distilled = -(p * log_q).sum(-1).mean()
        weight = self.config.teacher_weight
        return weight * distilled + (1 - weight) * plain, plain.detach()

    def run(self) -> LMTrainingResult:
        """Trains to the last step or the time limit, evaluates, exports."""
        config = self.config
        began = time.monotonic()
        say(self._describe())
        tokens_per_step = config.batch * self.shape.context_length
        flops = self.model.flops_per_token(self.shape.context_length)
        ceiling = self._measure_ceilings()
        recent: list[Tensor] = []
        mark, mark_step = time.monotonic(), self.step
        with Progress(config.steps, self.step, "train") as progress:
            while self.step < config.steps and time.monotonic() - began < 60 * config.max_minutes:
                recent.append(self._train_step())
                if self.step % 20 == 0 or self.step == config.steps:
                    loss = float(torch.stack(recent).mean())
                    recent.clear()
                    seconds = time.monotonic() - mark
                    rate = (self.step - mark_step) * tokens_per_step / seconds
                    self.log.add(
                        {"step": self.step, "loss": loss, "tokens_per_second": round(rate)}
                    )
                    text = f"loss {loss:.4f}, {rate / 1e6:.3f} M tokens/s"
                    if ceiling:
                        text += (
                            f", {rate * flops / 1e12:.0f} TFLOP/s ="
                            f" {rate * flops / 1e12 / ceiling:.1%}"
                        )
                    progress.advance(self.step - mark_step, text)
                    if not math.isfinite(loss):
                        raise ConfigError(f"the loss is {loss} at step {self.step}; lower --lr")
                    mark, mark_step = time.monotonic(), self.step
                paused = time.monotonic()
                if config.eval_every and self.step % config.eval_every == 0:
                    self._evaluate()
                if config.checkpoint_every and self.step % config.checkpoint_every == 0:
                    self._save_checkpoint()
                mark += time.monotonic() - paused
        return self._finish(began)

    def _train_step(self) -> Tensor:
        config = self.config
        windows = self.sampler.batch_at(self.step)
        parts = []
        for rows in windows.split(config.micro_batch):
            loss, plain = self._loss(rows)
            (loss * (len(rows) / len(windows))).backward()
            parts.append(plain)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(cosine_schedule(self.step, config.steps, config.warmup, config.lr))
        self.step += 1
        return torch.stack(parts).mean()

    def _finish(self, began: float) -> LMTrainingResult:
        config = self.config
        finished = self.step >= config.steps
        seconds = time.monotonic() - began
        logged = self.log.having("loss")
        rates = [entry["tokens_per_second"] for entry in logged][1:]
        rate = float(np.median(rates)) if rates else 0.0
        if not finished:
            self._save_checkpoint()
        # The weights that are scored are those that are shipped: rounded to bf16.
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.bfloat16())
        scores = self._evaluate()
        self.export(scores)
        say(
            f"{self.step}/{config.steps} steps in {seconds:.0f} s, median {rate / 1e6:.3f} M"
            " tokens/s"
        )
        loss = logged[-1]["loss"] if logged else None
        return LMTrainingResult(finished, self.step, loss, scores, rate)

    def export(self, scores: Mapping[str, DomainScore]) -> None:
        """Writes the Hugging Face directory, the log, the curves and the checksums."""
        config, out = self.config, self.config.out
        save_sharded(to_bf16(self.model.state_dict()), out)
        begin, end = self.marks
        write_json(out / "config.json", self.shape.to_config("bfloat16", begin, end))
        ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
        write_json(out / "generation_config.json", ids | {"do_sample": False})
        report = {
            "parameters": self.model.num_parameters(),
            "tokens_in_corpus": self.num_tokens,
            "tokens_seen": self.step * config.batch * self.shape.context_length,
            "heldout": {domain: score.as_dict() for domain, score in scores.items()},
            "config": settings_of(config),
        }
        write_json(out / "training.json", report)
        losses = self.log.having("loss")
        curves = {"": ([e["step"] for e in losses], [e["loss"] for e in losses])}
        evaluated = self.log.having("heldout")
        heldout = {
            domain: (
                [entry["step"] for entry in evaluated],
                [entry["heldout"][domain]["bits_per_byte"] for entry in evaluated],
            )
            for domain in self.heldout
        }
        panels = {"training loss (nats per token)": curves}
        if heldout:
            panels["held-out bits per byte"] = heldout
        plot_curves(
            out / "curves.png",
            f"{out.name}: {self.model.num_parameters():,} parameters",
            "step",
            panels,
        )

    def _evaluate(self) -> dict[str, DomainScore]:
        rows = max(1, min(self.config.micro_batch, 64))
        scores = score_domains(self.model, self.tokenizer, self.heldout, rows)
        if scores:
            self.log.add(
                {
                    "step": self.step,
                    "heldout": {domain: score.as_dict() for domain, score in scores.items()},
                }
            )
            text = ", ".join(
                f"{d} {s.loss:.3f} ({s.bits_per_byte:.3f} b/B)" for d, s in scores.items()
            )
            say(f"step {self.step} held out: {text}")
        return scores

    def _measure_ceilings(self) -> float:
        if not self.on_cuda:
            return 0.0
        whole = matmul_tflops(self.device)
        own = shape_tflops(
            self.shape, self.config.micro_batch * self.shape.context_length, self.device
        )
        self.log.add({"step": self.step, "matmul_tflops": whole, "shape_tflops": own})
        say(
            f"bf16 rate: {whole:.0f} TFLOP/s in a large product, {own:.0f} in this model's own"
            " products; percentages below are of the first"
        )
        return whole

    def _describe(self) -> str:
        shape = self.shape
        tokens = self.config.steps * self.config.batch * shape.context_length
        return (
            f"{self.model.num_parameters() / 1e6:.2f} M parameters, {shape.num_layers} layers of"
            f" {shape.hidden_size}; {self.num_tokens / 1e6:.1f} M tokens in the corpus,"
            f" {tokens / 1e6:.0f} M to see"
        )

    def _save_checkpoint(self) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.log.entries,
            "shape": self.shape.as_dict(),
        }
        save_state(state, self.config.out / "checkpoint.pt")

    def _load_checkpoint(self) -> None:
        path = self.config.out / "checkpoint.pt"
        if not path.is_file():
            say("nothing to resume: starting at step 0")
            return
        state = load_state(path, ("model", "shape"))
        if state["shape"] != self.shape.as_dict():
            raise CheckpointError(f"{path} holds a model of other sizes: {state['shape']}")
        self.model.load_state_dict(state["model"])
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except ValueError:
            raise CheckpointError(f"{path} is of another --optimizer") from None
        self.step = state["step"]
        self.log.restore(state["history"])
        say(f"resumed at step {self.step}")
