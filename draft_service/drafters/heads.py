"""Drafting with a head on the target's hidden states: EAGLE-2, EAGLE-3, MTP. Its KV lies on the verifier's page numbers;
slot p holds the state of (hidden state of p, token p + 1)."""

import dataclasses
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
from foredraft.attention.sdpa import SdpaAttention
from foredraft.config.services import DraftConfig, with_tree_defaults
from foredraft.errors import AttachRefused, ConfigError, InvalidRequest
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.config import ModelConfig
from foredraft.models.draft_heads.loader import load_head, read_token_map
from foredraft.models.draft_heads.modules import DraftHead
from foredraft.models.registry import resolve_model_path
from foredraft.runner.batch import SequenceRows, build_batch
from foredraft.text.tokenizer import tokenizer_fingerprint
from foredraft.transport import codec

# Rows of one forward while catching up, over all sequences.
_CHUNK_ROWS = 512

logger = logging.getLogger(__name__)


class HeadDrafter(Drafter):
    """Serves a loaded head, to one verifier at a time.

    Args:
        target: What it was made for.
        name: Of the head.
        fingerprint: Of the target's tokenizer; empty when it has none.
        limits: (steps, topk, draft tokens) where a verifier does not say.
    """

    max_sessions = 1

    def __init__(
        self,
        head: DraftHead,
        target: ModelConfig,
        name: str,
        fingerprint: str,
        limits: tuple[int, int, int],
    ) -> None:
        self._head = head
        self._target = target
        self._name = name
        self._fingerprint = fingerprint
        self._limits = limits

    @classmethod
    def load(cls, config: DraftConfig) -> "HeadDrafter":
        """Loads the head as configured; an MTP layer without a path is looked for in the target's checkpoint.

        Raises:
            CheckpointError: What is wrong with the path or the files.
            ConfigError: A flag asks for what this machine does not have.
        """
        has_cuda = torch.cuda.is_available()
        if config.device == "cuda" and not has_cuda:
            raise ConfigError("--device cuda: this process sees no CUDA device")
        device = torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")
        target_path = resolve_model_path(config.model_path)
        target = ModelConfig.from_dir(target_path)
        config = with_tree_defaults(config, target.architecture)
        dtype = getattr(torch, target.dtype if config.dtype == "auto" else config.dtype)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads or os.cpu_count() or 1)
            dtype = torch.float32 if config.dtype == "auto" else dtype
        given = config.speculative_draft_model_path
        path = resolve_model_path(given) if given else target_path
        token_map = None
        if config.speculative_token_map:
            token_map = read_token_map(Path(config.speculative_token_map), target.vocab_size)
        head = load_head(
            path,
            config.speculative_algorithm,
            target_path,
            dtype,
            device,
            config.speculative_draft_load_format,
            token_map,
        )
        name = Path(given).name if given else path.name
        return cls(head, target, name, tokenizer_fingerprint(target_path), config.tree_limits)

    def info(self) -> draft_pb2.GetDraftInfoResponse:
        """Which hidden states it reads, and that vocabulary and tokenizer must be the target's."""
        config = self._head.config
        steps, topk, tokens = self._limits
        weight = self._head.lm_head.weight
        weights = list(self._head.parameters())
        return draft_pb2.GetDraftInfoResponse(
            algorithm=config.algorithm,
            model=self._name,
            kv_bytes_per_token=config.layer.kv_bytes_per_token(weight.dtype.itemsize),
            weight_bytes=sum(w.numel() * w.element_size() for w in weights),
            hidden=draft_pb2.HiddenNeeds(
                layers=config.aux_layers,
                width=config.input_width,
                dtype=codec.to_message(weight.dtype),
            ),
            limits=draft_pb2.TreeLimits(num_steps=steps, topk=topk, num_draft_tokens=tokens),
            vocab_size=self._target.vocab_size,
            tokenizer_fingerprint=self._fingerprint,
            uses_pages=True,
            version=__version__,
        )

    def attach(self, request: draft_pb2.AttachRequest) -> tuple[Proposer, draft_pb2.AttachResponse]:
        """Allocates KV for the verifier's pages, and scratch."""
        self._check(request)
        asked, own = request.limits, self._limits
        limits = (
            asked.num_steps or own[0],
            asked.topk or own[1],
            (asked.num_draft_tokens or own[2]) - 1,
        )
        scratch = Scratch(
            request.num_pages, request.page_size, (limits[0] - 1) * limits[1], request.max_batch
        )
        weight = self._head.lm_head.weight
        try:
            kv = PagedKV.for_model(
                self._head.config.layer,
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
        proposer = HeadProposer(HeadRunner(self._head, kv), request, limits, scratch)
        return proposer, draft_pb2.AttachResponse(kv_bytes=kv_bytes)

    def _check(self, request: draft_pb2.AttachRequest) -> None:
        target = self._target
        for field, has in (
            ("vocab_size", target.vocab_size),
            ("hidden_size", target.hidden_size),
            ("num_layers", target.num_layers),
        ):
            if getattr(request, field) != has:
                raise AttachRefused(
                    field,
                    f"the target's is {getattr(request, field)}, the head was loaded for {has}",
                )
        both = request.tokenizer_fingerprint, self._fingerprint
        if all(both) and both[0] != both[1]:
            raise AttachRefused(
                "tokenizer_fingerprint", "the head was loaded for a target with another tokenizer"
            )
        for name in ("page_size", "num_pages", "max_batch", "max_context"):
            if not getattr(request, name):
                raise AttachRefused(name, "must be at least 1")


class HeadRunner:
    """A head on its paged KV."""

    shift = 1

    def __init__(self, head: DraftHead, kv: PagedKV) -> None:
        self.head = head
        self.token_map = head.token_map
        self._kv = kv
        self._attention = SdpaAttention()

    def run(
        self, rows: Sequence[SequenceRows], features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits and features of the rows that ask for logits, given the features that all rows read."""
        assert features is not None
        kv = self._kv
        batch = build_batch(rows, kv.page_size, kv.data.shape[2], kv.data.device)
        output = self.head(batch, features, kv, self._attention)
        return output.logits, output.features


@dataclasses.dataclass(slots=True)
class _Part:
    """Rows of one extension in one forward."""

    rows: SequenceRows
    features: torch.Tensor
    ends: Extension | None


class HeadProposer(Proposer):
    """Drafts for one verifier."""

    def __init__(
        self,
        runner: HeadRunner,
        attach: draft_pb2.AttachRequest,
        limits: tuple[int, int, int],
        scratch: Scratch,
    ) -> None:
        self._runner = runner
        self._sequences = PagedSequences(attach, limits)
        self._drafter = BeamDrafter(
            runner,
            scratch,
            attach.page_size,
            "coupled" if attach.draft_sampling == "coupled" else "topk",
        )

    @torch.inference_mode()
    def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        """Computes the state of what was committed, then drafts."""
        started = time.perf_counter_ns()
        hidden = {s.slot: s.hidden for s in request.sequences if s.HasField("hidden")}
        wishes = self._extend(self._sequences.apply(request), hidden)
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

    def _extend(
        self, extensions: list[Extension], hidden: dict[int, draft_pb2.HiddenRows]
    ) -> list[Wish]:
        """Computes all slots in forwards of bounded size, in order."""
        wishes: list[Wish] = []
        waiting: list[_Part] = []
        num_rows = 0
        for extension in extensions:
            for part in self._parts(extension, hidden.get(extension.sequence.slot)):
                if num_rows + len(part.rows.tokens) > _CHUNK_ROWS:
                    wishes += self._run(waiting)
                    waiting, num_rows = [], 0
                waiting.append(part)
                num_rows += len(part.rows.tokens)
        return wishes + self._run(waiting)

    def _parts(self, extension: Extension, hidden: draft_pb2.HiddenRows | None) -> list[_Part]:
        """An extension in parts of bounded size. Token 0 has no hidden state before it and makes no slot."""
        first = max(extension.start, 1)
        tokens = extension.tokens[first - extension.start :]
        if not tokens:
            return []
        sequence = extension.sequence
        if hidden is None or self.hidden is None or hidden.num_rows != len(tokens):
            raise InvalidRequest("hidden", f"slot {sequence.slot}: {len(tokens)} rows are needed")
        features = self._runner.head.fuse(self.hidden.read(hidden))
        sequence.valid_from = min(sequence.valid_from, first - 1)
        parts = []
        for done in range(0, len(tokens), _CHUNK_ROWS):
            chunk = tokens[done : done + _CHUNK_ROWS]
            slot = first - 1 + done
            is_last = done + len(chunk) == len(tokens) and extension.limits is not None
            rows = SequenceRows(
                tokens=chunk,
                positions=range(slot, slot + len(chunk)),
                pages=sequence.pages,
                prefix_len=slot,
                write_index=slot,
                prefix_start=min(sequence.valid_from, slot),
                logits="last" if is_last else "none",
            )
            part = features[done : done + len(chunk)]
            parts.append(_Part(rows, part, extension if is_last else None))
        return parts

    def _run(self, parts: list[_Part]) -> list[Wish]:
        if not parts:
            return []
        logits, features = self._runner.run(
            [part.rows for part in parts], torch.cat([part.features for part in parts])
        )
        assert features is not None
        wishes = []
        ending = [part.ends for part in parts if part.ends is not None]
        for extension, row, feature in zip(ending, logits, features, strict=True):
            assert extension.limits is not None
            wishes.append(Wish(extension.sequence, extension.limits, row, feature))
        return wishes
