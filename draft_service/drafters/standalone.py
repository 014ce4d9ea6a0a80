"""Drafting with a whole small model that has its own KV on the verifier's page numbers. Not shifted: the KV of token i
lies at key index i and is computed from tokens 0 .. i."""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from draft_service.drafters.base import Drafter, Proposer
from draft_service.drafters.beam_drafting import BeamDrafter, Scratch, Wish
from draft_service.drafters.paged_sequences import Extension, PagedSequences
from foredraft import __version__
from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.attention.sdpa import SdpaAttention
from foredraft.config.services import DraftConfig
from foredraft.errors import AttachRefused, ConfigError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import load_model
from foredraft.models.registry import resolve_model_path
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from foredraft.text.tokenizer import tokenizer_fingerprint

# Rows of one forward while catching up, over all sequences.
_CHUNK_ROWS = 512

logger = logging.getLogger(__name__)


class StandaloneDrafter(Drafter):
    """Serves a loaded model, to one verifier at a time.

    Args:
        name: Of the draft model.
        fingerprint: Of its tokenizer; empty when it has none.
        limits: (steps, topk, draft tokens) where a verifier does not say.
    """

    max_sessions = 1

    def __init__(
        self, model: DecoderModel, name: str, fingerprint: str, limits: tuple[int, int, int]
    ) -> None:
        self._model = model
        self._name = name
        self._fingerprint = fingerprint
        self._limits = limits

    @classmethod
    def load(cls, config: DraftConfig) -> "StandaloneDrafter":
        """Loads the draft model as configured.

        Raises:
            CheckpointError: What is wrong with the path or the files.
            ConfigError: A flag asks for what this machine does not have.
        """
        has_cuda = torch.cuda.is_available()
        if config.device == "cuda" and not has_cuda:
            raise ConfigError("--device cuda: this process sees no CUDA device")
        device = torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")
        dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads or os.cpu_count() or 1)
            dtype = dtype or torch.float32
        path = resolve_model_path(
            config.speculative_draft_model_path, config.speculative_draft_model_revision
        )
        model = load_model(
            path, dtype=dtype, device=device, load_format=config.speculative_draft_load_format
        )
        name = Path(config.speculative_draft_model_path).name.removesuffix(".gguf")
        return cls(model, name, tokenizer_fingerprint(path), config.tree_limits)

    def info(self) -> draft_pb2.GetDraftInfoResponse:
        """Vocabulary and tokenizer must be the target's; hidden states are not needed."""
        config = self._model.config
        steps, topk, tokens = self._limits
        weights = list(self._model.parameters())
        return draft_pb2.GetDraftInfoResponse(
            algorithm="STANDALONE",
            model=self._name,
            kv_bytes_per_token=config.kv_bytes_per_token(weights[0].dtype.itemsize),
            weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights),
            transports=[tensor_pb2.TRANSPORT_INLINE],
            limits=draft_pb2.TreeLimits(num_steps=steps, topk=topk, num_draft_tokens=tokens),
            vocab_size=config.vocab_size,
            tokenizer_fingerprint=self._fingerprint,
            uses_pages=True,
            version=__version__,
        )

    def attach(self, request: draft_pb2.AttachRequest) -> tuple[Proposer, draft_pb2.AttachResponse]:
        """Allocates KV for the verifier's pages, and scratch."""
        self._check(request)
        asked = request.limits
        steps, topk, tokens = self._limits
        limits = (
            asked.num_steps or steps,
            asked.topk or topk,
            (asked.num_draft_tokens or tokens) - 1,
        )
        scratch = Scratch(
            request.num_pages, request.page_size, (limits[0] - 1) * limits[1], request.max_batch
        )
        weight = next(iter(self._model.parameters()))
        try:
            kv = PagedKV.for_model(
                self._model.config,
                request.num_pages,
                request.page_size,
                weight.dtype,
                weight.device,
                num_scratch_pages=scratch.num_pages,
            )
        except (RuntimeError, MemoryError) as error:
            raise AttachRefused(
                "num_pages", f"no memory for {request.num_pages} pages: {error}"
            ) from error
        kv_bytes = kv.bytes_per_page() * (request.num_pages + scratch.num_pages)
        proposer = StandaloneProposer(
            ModelRunner(self._model, kv, SdpaAttention()), request, limits, scratch
        )
        return proposer, draft_pb2.AttachResponse(kv_bytes=kv_bytes)

    def _check(self, request: draft_pb2.AttachRequest) -> None:
        config = self._model.config
        if request.vocab_size != config.vocab_size:
            raise AttachRefused(
                "vocab_size",
                f"the target's is {request.vocab_size}, the draft's {config.vocab_size}",
            )
        if not request.tokenizer_fingerprint or not self._fingerprint:
            logger.warning("no tokenizer files on one side; taking the tokenizers to be the same")
        elif request.tokenizer_fingerprint != self._fingerprint:
            raise AttachRefused(
                "tokenizer_fingerprint",
                "the tokenizers of target and draft give tokens different ids; a draft model needs the target's tokenizer",
            )
        if request.max_context > config.max_position_embeddings:
            raise AttachRefused(
                "max_context",
                f"the target's sequences have up to {request.max_context} tokens, the draft model "
                f"{config.max_position_embeddings} positions; lower --context-length",
            )
        if request.draft_sampling not in ("topk", "coupled"):
            raise AttachRefused(
                "draft_sampling", f"must be topk or coupled, not {request.draft_sampling!r}"
            )
        for name in ("page_size", "num_pages", "max_batch", "max_context"):
            if not getattr(request, name):
                raise AttachRefused(name, "must be at least 1")
        if request.limits.num_draft_tokens == 1:
            raise AttachRefused("limits.num_draft_tokens", "must be at least 2, the root included")


class _Levels:
    """A whole model's levels: it reads no features and shares the target's vocabulary and positions."""

    shift = 0
    token_map: torch.Tensor | None = None

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def run(
        self, rows: Sequence[SequenceRows], features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._runner.forward(rows).logits, None


class StandaloneProposer(Proposer):
    """Drafts for one verifier."""

    def __init__(
        self,
        runner: ModelRunner,
        attach: draft_pb2.AttachRequest,
        limits: tuple[int, int, int],
        scratch: Scratch,
    ) -> None:
        self._runner = runner
        self._sequences = PagedSequences(attach, limits)
        self._drafter = BeamDrafter(
            _Levels(runner),
            scratch,
            attach.page_size,
            "coupled" if attach.draft_sampling == "coupled" else "topk",
        )

    @torch.inference_mode()
    def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        """Computes the KV of what was committed, then drafts."""
        started = time.perf_counter_ns()
        wishes = self._extend(self._sequences.apply(request))
        extended = time.perf_counter_ns()
        response = draft_pb2.StepResponse()
        for wish, tree in zip(wishes, self._drafter.draft(wishes), strict=True):
            if tree.tokens:
                response.proposals.add(
                    slot=wish.sequence.slot, tokens=tree.tokens, parents=tree.parents
                )
        response.extend_microseconds = (extended - started) // 1000
        response.draft_microseconds = (time.perf_counter_ns() - extended) // 1000
        return response

    def close(self) -> None:
        """Drops the KV."""
        del self._runner, self._drafter

    def _extend(self, extensions: list[Extension]) -> list[Wish]:
        """Computes all tokens' KV in forwards of bounded size, in order."""
        wishes: list[Wish] = []
        rows: list[SequenceRows] = []
        ending: list[Extension] = []  # whose last row is in `rows` and is wanted
        num_rows = 0

        def run() -> None:
            nonlocal num_rows
            logits = self._runner.forward(rows).logits
            for extension, row in zip(ending, logits, strict=True):
                assert extension.limits is not None
                wishes.append(Wish(extension.sequence, extension.limits, row))
            rows.clear()
            ending.clear()
            num_rows = 0

        for extension in extensions:
            done = 0
            while done < len(extension.tokens):
                tokens = extension.tokens[done : done + _CHUNK_ROWS - num_rows]
                start = extension.start + done
                done += len(tokens)
                wanted = done == len(extension.tokens) and extension.limits is not None
                rows.append(_chunk(extension, start, tokens, wanted))
                if wanted:
                    ending.append(extension)
                num_rows += len(tokens)
                if num_rows == _CHUNK_ROWS:
                    run()
        if rows:
            run()
        return wishes


def _chunk(extension: Extension, start: int, tokens: list[int], wanted: bool) -> SequenceRows:
    return SequenceRows(
        tokens=tokens,
        positions=range(start, start + len(tokens)),
        pages=extension.sequence.pages,
        prefix_len=start,
        write_index=start,
        prefix_start=extension.sequence.valid_from,
        logits="last" if wanted else "none",
    )
