"""Drafts with a head that reads the target's hidden states and has its own KV.

The KV lies on the verifier's page numbers; key p belongs to (hidden state of p, token p + 1).
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from draft_service.drafters.beam_drafting import Scratch
from draft_service.drafters.block_method import BlockMethod
from draft_service.drafters.head_method import HeadMethod
from draft_service.drafters.method import DraftMethod
from draft_service.drafters.module_chain import ModuleChainMethod
from draft_service.drafters.paged import (
    TYPICAL_BATCH,
    DrafterOptions,
    PagedDrafter,
    check_plain,
    device_of,
    weight_bytes,
)
from draft_service.drafters.paged_proposer import PagedProposer
from draft_service.drafters.parallel_method import ParallelMethod
from draft_service.drafters.target_weights import TargetWeights
from draft_service.drafters.tree_limits import TreeLimits
from draft_service.models.block_draft import BlockDraft
from draft_service.models.draft_head import DraftHead, LevelHead
from draft_service.models.head_loader import load_head
from draft_service.models.peagle import PEagleHead
from draft_service.models.shared_weights import (
    load_shared_weights,
    read_token_map,
    reduce_vocabulary,
)
from draft_service.steps.block_runner import BlockRunner
from draft_service.steps.head_runner import HeadRunner
from foredraft import __version__
from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.services import DraftConfig
from foredraft.errors import AttachRefused
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.conversions import convert_linears
from foredraft.models.config import ModelConfig
from foredraft.models.head_config import HeadConfig
from foredraft.models.kept_fingerprints import kept_fingerprint
from foredraft.models.registry import resolve_model_path
from foredraft.models.speculation import complete
from foredraft.transport import codec
from foredraft.transport.fusion import describe, parts_of

logger = logging.getLogger(__name__)


class HeadDrafter(PagedDrafter):
    """Serves a loaded head to one verifier at a time.

    Args:
        head: The loaded head.
        target: Configuration of the target that the head was trained for.
        name: Name of the head.
        fingerprint: Fingerprint of the target's tokenizer; empty without one.
        limits: See `PagedDrafter`.
        options: See `PagedDrafter`.
        target_weights: On a GPU, the target's weights that the head uses; None where they are
            loaded with the head.
    """

    def __init__(
        self,
        head: DraftHead,
        target: ModelConfig,
        name: str,
        fingerprint: str,
        limits: TreeLimits,
        options: DrafterOptions | None = None,
        target_weights: TargetWeights | None = None,
    ) -> None:
        options = options or DrafterOptions()
        super().__init__(head.config.layer, head.dtype, head.device, fingerprint, limits, options)
        self._head = head
        self._target = target
        self._name = name
        self._target_weights = target_weights
        self.has_fixed_steps = head.num_modules == 1
        # The fusion of hidden states, where the verifier may compute it itself.
        self._offered_fusion = None
        if head.fusion is not None and head.fusion.is_plain and not options.is_converted:
            self._offered_fusion = head.fusion

    @classmethod
    def load(cls, config: DraftConfig) -> "HeadDrafter":
        """Loads the configured head; without a path it is read from the target's checkpoint.

        Raises:
            CheckpointError: The path or the files cannot be used.
            ConfigError: A flag asks for something that this machine or the head does not have.
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
        # On a GPU the verifier may share its weights; the flag quantises the draft's own.
        flag = config.speculative_draft_model_quantization
        is_plain = flag == "unquant"
        stored = HeadConfig.from_dir(path, config.speculative_algorithm).layer.quantization  # type: ignore[arg-type]
        check_plain(path, flag, stored)
        on_host = device.type == "cuda" and is_plain
        shared = load_shared_weights(
            target_path, target, dtype, device, config.load_format, on_host=on_host
        )
        if config.speculative_token_map:
            token_map = read_token_map(config.speculative_token_map, target.vocab_size)
            shared.token_map = token_map.to(device)
            shared.lm_head = reduce_vocabulary(shared.lm_head, shared.token_map, dtype)
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
        convert_linears(head, flag, device)
        return cls(
            head,
            target,
            Path(given).name if given else path.name,
            kept_fingerprint(target_path),
            TreeLimits.of(config.tree_limits),
            DrafterOptions.of(config, path, head.config.layer.quantization, device),
            TargetWeights(head, shared) if on_host else None,
        )

    def info(self) -> draft_pb2.GetDraftInfoResponse:
        """Describes the head: its sizes, the hidden states it reads, the target's vocabulary."""
        config = self._head.config
        shared, theirs = self._target_weights, 0
        is_block = config.num_drafted is not None  # drafts all tokens in one forward
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
            limits=self._limits.message,
            proposes=draft_pb2.PROPOSAL_SHAPE_BLOCKS if is_block else self.proposes,
            cost=draft_pb2.DRAFT_COST_PER_PROPOSAL if is_block else draft_pb2.DRAFT_COST_PER_LEVEL,
            vocab_size=self._target.vocab_size,
            tokenizer_fingerprint=self._fingerprint,
            uses_pages=True,
            version=__version__,
        )
        info.MergeFrom(self._source)
        if self._offered_fusion is not None:
            info.fusion.CopyFrom(describe(self._offered_fusion.shape))
        columns = self._head.lm_head.weight.shape[0]
        self.add_memory(info, columns)
        if info.workspace_bytes and config.num_drafted is not None:
            batch = self.graphs.limit if self.graphs and self.graphs.limit else TYPICAL_BATCH
            info.workspace_bytes += columns * batch * config.num_drafted * self._dtype.itemsize
        return info

    def fusion_parts(self) -> Iterator[draft_pb2.GetFusionResponse]:
        """See Drafter."""
        if self._offered_fusion is not None:
            yield from parts_of(self._offered_fusion.tensors())

    def _allocate(
        self, request: draft_pb2.AttachRequest
    ) -> tuple[PagedProposer, draft_pb2.AttachResponse]:
        """See PagedDrafter; on a GPU the head gets its target's weights first."""
        weights = self._target_weights
        if weights is None:
            return super()._allocate(request)
        weights.attach(request.weights)
        try:
            proposer, response = super()._allocate(request)
        except BaseException:
            weights.detach()
            raise
        proposer.on_close = weights.detach
        return proposer, response

    def _method(
        self, kv: PagedKV, attach: draft_pb2.AttachRequest, scratch: Scratch
    ) -> DraftMethod:
        head = self._head
        if isinstance(head, BlockDraft):
            return BlockMethod(BlockRunner(head, kv, self.attention), attach, scratch)
        assert isinstance(head, LevelHead)
        runner = HeadRunner(head, kv, self.attention)
        if isinstance(head, PEagleHead):
            return ParallelMethod(runner, head, attach, scratch)
        if head.num_modules > 1:
            return ModuleChainMethod(runner, attach)
        return HeadMethod(runner, attach, scratch)

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
                "the head was made for %d positions, sequences may have %d: expect fewer accepted"
                " tokens beyond",
                trained,
                request.max_context,
            )

    def _scratch_rows(self, limits: TreeLimits) -> int:
        block = self._head.config.block
        return super()._scratch_rows(limits) if block is None else block.block_size

    def _check_limits(self, limits: TreeLimits) -> None:
        super()._check_limits(limits)
        steps, topk, _ = limits
        columns = self._head.lm_head.weight.shape[0]
        if topk > columns:
            raise AttachRefused("limits.topk", f"{topk} of a draft vocabulary of {columns}")
        block = self._head.config.block
        if block is not None and steps > block.num_drafted:
            raise AttachRefused(
                "limits.num_steps", f"{steps}: a block proposes {block.num_drafted} tokens"
            )
        modules = self._head.num_modules
        if modules > 1 and (steps > modules or topk > 1):
            raise AttachRefused(
                "limits.num_steps", f"{modules} modules draft a chain of {modules} tokens"
            )
