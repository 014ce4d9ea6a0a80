"""Drafting with a head that continues the target's hidden states, with KV of its own on the verifier's page numbers;
slot p holds the state of (hidden state of p, token p + 1)."""

import logging
from pathlib import Path

import torch

from draft_service.drafters.base import Proposer
from draft_service.drafters.beam_drafting import Scratch
from draft_service.drafters.head_proposer import HeadProposer
from draft_service.drafters.module_chain import ModuleChainProposer
from draft_service.drafters.paged import (
    Limits,
    PagedDrafter,
    device_of,
    graph_settings,
    weight_bytes,
)
from draft_service.drafters.target_weights import TargetWeights
from draft_service.models.draft_head import DraftHead
from draft_service.models.head_loader import load_head
from draft_service.models.shared_weights import (
    load_shared_weights,
    read_token_map,
    reduce_vocabulary,
)
from draft_service.steps.head_runner import HeadRunner
from foredraft import __version__
from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.services import DraftConfig
from foredraft.errors import AttachRefused
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.conversions import convert_linears
from foredraft.models.config import ModelConfig
from foredraft.models.registry import resolve_model_path
from foredraft.models.speculation import complete
from foredraft.text.tokenizer import tokenizer_fingerprint
from foredraft.transport import codec

logger = logging.getLogger(__name__)


class HeadDrafter(PagedDrafter):
    """Serves a loaded head, to one verifier at a time.

    Args:
        target: What it was made for.
        name: Of the head.
        fingerprint: Of the target's tokenizer; empty when it has none.
        limits: (steps, topk, draft tokens) where a verifier does not say.

    Attributes:
        target_weights: Where the head's weights that are the target's lie, on a GPU; None where they are here for good.
    """

    def __init__(
        self, head: DraftHead, target: ModelConfig, name: str, fingerprint: str, limits: Limits
    ) -> None:
        super().__init__(head.config.layer, head.dtype, head.device, fingerprint, limits)
        self._head = head
        self._target = target
        self._name = name
        self.target_weights: TargetWeights | None = None
        self.has_device_steps = head.num_modules == 1

    @classmethod
    def load(cls, config: DraftConfig) -> "HeadDrafter":
        """Loads the head as configured; without a path it lies in the target's checkpoint.

        Raises:
            CheckpointError: What is wrong with the path or the files.
            ConfigError: A flag asks for what this machine or the head does not have.
        """
        device = device_of(config)
        target_path = resolve_model_path(config.model_path, config.revision)
        target = ModelConfig.from_dir(target_path)
        given = config.speculative_draft_model_path
        path = target_path
        if given:
            path = resolve_model_path(given, config.speculative_draft_model_revision, bins=True)
        config = complete(config, target, path if given else None, device.type == "cpu")
        name = target.dtype if config.dtype == "auto" else config.dtype
        if config.dtype == "auto" and device.type == "cpu":
            name = "float32"
        dtype = getattr(torch, name)
        # On a GPU the verifier may share them; where weights are changed, a head needs its own.
        is_plain = config.speculative_draft_model_quantization == "unquant"
        on_host = device.type == "cuda" and is_plain
        shared = load_shared_weights(
            target_path, target, dtype, device, config.load_format, on_host=on_host
        )
        if config.speculative_token_map:
            token_map = read_token_map(config.speculative_token_map, target.vocab_size)
            shared.token_map = token_map.to(device)
            shared.lm_head = reduce_vocabulary(shared.lm_head, shared.token_map)
        head = load_head(
            path,
            config.speculative_algorithm,  # type: ignore[arg-type]
            target,
            shared,
            dtype,
            device,
            config.speculative_draft_load_format,
            config.enable_multi_layer_eagle,
        )
        convert_linears(head, config.speculative_draft_model_quantization, device)
        drafter = cls(
            head,
            target,
            Path(given).name if given else path.name,
            tokenizer_fingerprint(target_path),
            config.tree_limits,
        )
        drafter.graphs = graph_settings(config, device)
        if on_host:
            drafter.target_weights = TargetWeights(head, shared)
        return drafter

    def info(self) -> draft_pb2.GetDraftInfoResponse:
        """Which hidden states it reads, and that vocabulary and tokenizer must be the target's."""
        config = self._head.config
        shared, theirs = self.target_weights, 0
        if shared is not None:
            theirs = shared.num_bytes
        info = draft_pb2.GetDraftInfoResponse(
            algorithm=config.algorithm,
            model=self._name,
            kv_bytes_per_token=config.layer.kv_bytes_per_token(self._dtype.itemsize),
            weight_bytes=weight_bytes(self._head) - theirs,
            shared_weights=shared.names if shared is not None else (),
            shared_weight_bytes=theirs,
            hidden=draft_pb2.HiddenNeeds(
                layers=self._head.captured_layers,
                width=self._head.hidden_width,
                dtype=codec.to_message(self._dtype),
            ),
            limits=self.tree_limits,
            vocab_size=self._target.vocab_size,
            tokenizer_fingerprint=self._fingerprint,
            uses_pages=True,
            version=__version__,
        )
        self.add_memory(info, self._head.lm_head.weight.shape[0])
        return info

    def attach(self, request: draft_pb2.AttachRequest) -> tuple[Proposer, draft_pb2.AttachResponse]:
        """See PagedDrafter; on a GPU the head gets its target's weights first."""
        weights = self.target_weights
        if weights is None:
            return super().attach(request)
        self._check(request)
        weights.attach(request.weights)
        try:
            proposer, response = super().attach(request)
        except BaseException:
            weights.detach()
            raise
        assert isinstance(proposer, HeadProposer)
        proposer.on_close = weights.detach
        return proposer, response

    def _proposer(
        self, kv: PagedKV, attach: draft_pb2.AttachRequest, limits: Limits, scratch: Scratch
    ) -> Proposer:
        runner = HeadRunner(self._head, kv, self.attention)
        if self._head.num_modules > 1:
            return ModuleChainProposer(runner, attach, limits, scratch)
        return HeadProposer(runner, attach, limits, scratch, self.graphs)

    def _check_target(self, request: draft_pb2.AttachRequest) -> None:
        target = self._target
        wanted = {
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "num_layers": target.num_layers,
            "target_fingerprint": target.fingerprint,
        }
        for field, own in wanted.items():
            theirs = getattr(request, field)
            if theirs != own and (theirs or field != "target_fingerprint"):
                raise AttachRefused(
                    field, f"the verifier's target has {theirs}, the head was loaded for {own}"
                )
        trained = self._head.config.layer.max_position_embeddings
        if request.max_context > trained:
            logger.warning(
                "the head was made for %d positions, sequences may have %d: expect fewer accepted tokens beyond",
                trained,
                request.max_context,
            )

    def _check_limits(self, limits: Limits) -> None:
        super()._check_limits(limits)
        steps, topk, _ = limits
        columns = self._head.lm_head.weight.shape[0]
        if topk > columns:
            raise AttachRefused("limits.topk", f"{topk} of a draft vocabulary of {columns}")
        modules = self._head.num_modules
        if modules > 1 and (steps > modules or topk > 1):
            raise AttachRefused(
                "limits.num_steps", f"{modules} modules draft a chain of {modules} tokens"
            )
