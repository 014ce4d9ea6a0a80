"""Connects to the configured drafts and makes their attach messages."""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.services import VerifyConfig
from foredraft.config.speculation import each_draft, largest_limits, with_tree_defaults
from foredraft.errors import AttachRefused, ForedraftError, InvalidRequest
from foredraft.models.decoder import DecoderModel
from foredraft.models.kept_fingerprints import kept_fingerprint
from foredraft.models.speculation import TokenIds, check_tokens, resolve
from foredraft.rpc.protocol import DRAFT_PROTOCOL
from foredraft.rpc.tls import service_identity
from foredraft.transport import codec
from foredraft.transport.device_exchange import StepSizes
from verify_service.attach.fusion import FusionSource
from verify_service.attach.trained_quantization import quantization_note
from verify_service.connection.arena import Arena
from verify_service.connection.client import DraftClient
from verify_service.drafts.capabilities import DraftCapabilities, layers_to_capture
from verify_service.drafts.remote_draft import RemoteDraft
from verify_service.drafts.settings import DraftSettings
from verify_service.metrics import AnyMetrics, SpeculationMetrics
from verify_service.scheduler.page_pool import PagePool
from verify_service.sizes import arena_bytes, chunk_size
from verify_service.target import Target

logger = logging.getLogger(__name__)


def _shared(model: DecoderModel) -> dict[str, torch.Tensor]:
    """Returns the weights that a draft on the same card may use.

    There are none where ranks share the model or where the weights are quantised.
    """
    table = model.embedding.table or model.embedding
    found: dict[str, torch.Tensor] = {"embedding": table.weight, "lm_head": model.lm_head.weight}
    is_plain = all(weight.is_floating_point() for weight in found.values())
    return found if is_plain and model.embedding.share.group.size == 1 else {}


class DraftLink:
    """Holds a draft's client and the data of its attach message.

    The pool's sizes are known only after the connection has started.

    Args:
        name: Name of the draft for logs, where there are several.
        config: Configuration as if this draft were the only one, with its tree's sizes set.
        address: Address of the draft.
        target: The target.
        metrics: Metrics of the draft.
        on_device: Whether the draft's steps may stay on the GPU.

    Attributes:
        name, config: The arguments of these names.
        on_attached: Called whenever the draft has attached.
    """

    def __init__(
        self,
        name: str,
        config: VerifyConfig,
        address: str,
        target: Target,
        metrics: SpeculationMetrics,
        on_device: bool,
    ) -> None:
        self.name = name
        self.config = config
        self.on_attached: Callable[[], None] = lambda: None
        self._address = address
        self._model = target.model.config
        self._metrics = metrics
        self._pool = (0, 0, 0)
        self._fingerprint = kept_fingerprint(target.path)
        self._fusion = FusionSource(address, service_identity(config), target.device)
        nodes = config.tree_limits[2]
        steps = StepSizes(config.max_running_requests, config.tree_limits[0] + 1, nodes - 1)
        num_rows = chunk_size(config, target.device) + config.max_running_requests * nodes
        self.arena = Arena(
            address,
            self._model.hidden_size,
            self._model.num_layers,
            max_bytes=arena_bytes(config, target.device),
            # Rows of a step and of the one before it, whose answer may be unread.
            useful_rows=2 * num_rows,
            required=config.require_transport,
            device=target.device,
            shared=_shared(target.model),
            steps=steps if on_device else None,
        )
        self.client = DraftClient(
            address,
            self._attach,
            config.draft_step_timeout,
            self._on_state,
            self.arena.attached,
            self.arena.ended,
            service_identity(config),
        )

    def sized(self, num_pages: int, page_size: int, context_length: int) -> None:
        """Sets the sizes of the pool, and allows the client to attach."""
        self._pool = (num_pages, page_size, context_length)
        self.client.allow_attach()

    def check_tokens(self, info: draft_pb2.GetDraftInfoResponse) -> None:
        """Raises ConfigError if the draft's tokens are not the target's; it could never attach."""
        check_tokens(
            f"the {info.algorithm} draft {info.model or self._address}",
            TokenIds(info.vocab_size, info.tokenizer_fingerprint),
            TokenIds(self._model.vocab_size, self._fingerprint),
            may_pad=not info.HasField("hidden"),
        )

    @property
    def capabilities(self) -> DraftCapabilities:
        """The draft's capabilities; the algorithm's usual ones until the draft has answered."""
        info = self.client.info
        if info is None:
            return DraftCapabilities.expected(self.config.traits)
        return DraftCapabilities.of(info)

    @property
    def note(self) -> str:
        """Warning for the operator about the draft, beside its description; mostly empty."""
        info = self.client.info
        if info is None or not info.HasField("hidden"):
            return ""
        quantization = self._model.quantization
        return quantization_note(info.trained_for, self.config.model_path, quantization)

    def _on_state(self, state: str) -> None:
        is_attached = state == "attached"
        level = logging.INFO if is_attached else logging.WARNING
        name = f"draft {self.name}" if self.name else "draft"
        logger.log(level, "%s: %s", name, state)
        if is_attached:
            self.on_attached()
            self._metrics.attaches.inc()
            if self.client.info is not None and (about := described(self.client.info)):
                logger.info("%s: %s", name, about)
            if note := self.note:
                logger.warning("%s: %s", name, note)

    def _attach(self, info: draft_pb2.GetDraftInfoResponse, epoch: int) -> draft_pb2.AttachRequest:
        expected = self.config.speculative_algorithm
        if self.name and info.algorithm != expected:
            raise AttachRefused(
                "algorithm", f"{self._address} is a draft for {info.algorithm}, not {expected}"
            )
        if info.protocol != DRAFT_PROTOCOL:
            raise AttachRefused(
                "protocol",
                f"the draft, version {info.version or 'unknown'}, speaks {info.protocol}, this"
                f" verifier {DRAFT_PROTOCOL}; both must be of one release",
            )
        model = self._model
        fusion = None
        if self._projects_here(info):
            fusion = self._fusion.get(info, self.client.may_cancel)
        num_pages, page_size, context_length = self._pool
        steps, topk, tokens = self.config.tree_limits
        return draft_pb2.AttachRequest(
            epoch=epoch,
            protocol=DRAFT_PROTOCOL,
            target_fingerprint=model.fingerprint,
            architecture=model.architecture,
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            vocab_size=model.vocab_size,
            tokenizer_fingerprint=self._fingerprint,
            page_size=page_size,
            num_pages=num_pages,
            max_batch=self.config.max_running_requests,
            max_context=context_length,
            limits=draft_pb2.TreeLimits(num_steps=steps, topk=topk, num_draft_tokens=tokens),
            draft_sampling=self.config.speculative_draft_sampling,
            arena=self.arena.open(info, epoch, fusion),
            fused=fusion is not None,
            weights=self.arena.weights(info, epoch),
        )

    def proxy(self, number: int, pool: PagePool) -> RemoteDraft:
        """Creates the engine's side of the draft.

        Args:
            number: Number of the draft, where there are several.
            pool: The verifier's pages.
        """
        settings = DraftSettings(
            self._model.vocab_size,
            self.config.tree_limits[:2],
            self.config.speculative_ngram_scope,
            self.config.draft_refill_tokens,
            number,
        )
        return RemoteDraft(self.name, self.client, self.arena, pool, settings, self._metrics)

    @property
    def projection_bytes(self) -> int:
        """Bytes of the draft's projection in this process.

        They are 0 until the draft has answered, and where its attach will be refused since it names
        no known type.
        """
        info = self.client.info
        if info is None or not self._projects_here(info):
            return 0
        try:
            dtype = codec.to_torch(info.hidden.dtype)
        except InvalidRequest:
            return 0
        return info.hidden.width * info.fusion.width * dtype.itemsize

    def _projects_here(self, info: draft_pb2.GetDraftInfoResponse) -> bool:
        """Returns whether the verifier projects hidden states for the draft.

        By default it does unless the draft runs on the same GPU.
        """
        where = self.config.draft_projection
        if not info.HasField("fusion") or where == "draft":
            return False
        return where == "verifier" or not self.arena.is_on_same_gpu(info)


def connect_drafts(
    config: VerifyConfig,
    target: Target,
    metrics: AnyMetrics,
) -> list[DraftLink]:
    """Starts the connections to the configured drafts and waits for their info.

    A draft that does not answer in time connects later; its KV is then not counted.

    Args:
        config: Configuration of the verifier.
        target: The target.
        metrics: Metrics of the drafts.

    Raises:
        ConfigError: A draft that has answered has other tokens than the target.
    """
    addresses = config.draft_addresses()
    are_several = len(addresses) > 1
    configs = [
        with_tree_defaults(
            resolve(one, on_cpu=target.device.type == "cpu") if are_several else one,
            target.model.config.architecture,
        )
        for one in each_draft(config)
    ]
    levels = followed_levels(configs)
    links = []
    for (name, address), one in zip(addresses.items(), configs, strict=False):
        # The tensors that a step hands to a draft on the device have one size.
        on_device = one.tree_limits[0] == levels or not are_several
        links.append(
            DraftLink(
                name if are_several else "",
                one,
                address,
                target,
                metrics.of(name),
                on_device,
            )
        )
    for link in links:
        link.client.start()
    deadline = time.monotonic() + config.draft_wait
    for link, address in zip(links, addresses.values(), strict=True):
        info = link.client.wait(max(deadline - time.monotonic(), 0.0))
        if info is not None:
            try:
                link.check_tokens(info)
            except ForedraftError:
                for other in links:
                    other.client.close()
                raise
        else:
            logger.warning(
                "the draft at %s has not answered in %.0f s; serving without it until it does",
                address,
                config.draft_wait,
            )
    return links


def described(info: draft_pb2.GetDraftInfoResponse) -> str:
    """Describes a draft's model for the log; empty for a draft without a model."""
    if not info.checksum:
        return ""
    trained_for = info.trained_for or "a target that its files do not name"
    shape = draft_pb2.ProposalShape.Name(info.proposes).removeprefix("PROPOSAL_SHAPE_").lower()
    proposes = f", proposes {shape}" if info.proposes else ""
    return (
        f"{info.algorithm} {info.model}, checksum {info.checksum}, weights {info.quantization}, "
        f"trained for {trained_for}{proposes}"
    )


def captured_layers(links: Sequence[DraftLink]) -> tuple[int, ...]:
    """Returns the layers that drafts read, as far as drafts have answered."""
    return layers_to_capture(link.capabilities for link in links) or ()


def infos_of(links: Sequence[DraftLink]) -> list[draft_pb2.GetDraftInfoResponse]:
    """Returns the info of the drafts that have answered."""
    return [info for link in links if (info := link.client.info) is not None]


def tree_limits_of(links: Sequence[DraftLink], config: VerifyConfig) -> tuple[int, int, int]:
    """Returns (steps, topk, draft tokens), each the largest of all drafts."""
    if not links:
        return config.tree_limits
    return largest_limits([link.config.tree_limits for link in links])


def followed_levels(configs: Sequence[VerifyConfig]) -> int:
    """Returns the depth of the deepest tree of the drafts that can follow on the device.

    Without such drafts, it is the depth of the deepest tree of all.
    """
    levels = [one.tree_limits[0] for one in configs]
    expected = [DraftCapabilities.expected(one.traits) for one in configs]
    followed = [num for one, num in zip(expected, levels, strict=True) if one.follows_on_device]
    return max(followed or levels)
