"""The connections to the configured drafts, and what their attach messages need."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.services import VerifyConfig
from foredraft.config.speculation import MODELS, each_draft, largest_limits, with_tree_defaults
from foredraft.errors import AttachRefused
from foredraft.models.decoder import DecoderModel
from foredraft.models.speculation import resolve
from foredraft.rpc.protocol import DRAFT_PROTOCOL
from foredraft.rpc.tls import service_identity
from foredraft.text.tokenizer import tokenizer_fingerprint
from foredraft.transport.device_exchange import StepSizes
from verify_service.drafts.arena import Arena
from verify_service.drafts.client import DraftClient
from verify_service.metrics import AnyMetrics, SpeculationMetrics
from verify_service.sizes import arena_bytes, chunk_size

logger = logging.getLogger(__name__)


class DraftLink:
    """A draft client and what its attach message needs; the sizes are known only after sizing the pool.

    Args:
        name: For logs, where there are several.
        config: As if it were the only one, its tree settled.
        address: Of the draft.
        path: Of the target.
        on_device: Whether its steps may stay on the GPU.

    Attributes:
        name, config: As given.
        num_pages, page_size, context_length: Of the pool, once `sized` has said them.
    """

    def __init__(
        self,
        name: str,
        config: VerifyConfig,
        address: str,
        model: DecoderModel,
        path: Path,
        device: torch.device,
        metrics: SpeculationMetrics,
        on_device: bool,
    ) -> None:
        self.name = name
        self.config = config
        self._address = address
        self._model = model
        self._metrics = metrics
        self._pool = (0, 0, 0)
        self._fingerprint = tokenizer_fingerprint(path)
        nodes = config.tree_limits[2]
        steps = StepSizes(config.max_running_requests, config.tree_limits[0] + 1, nodes - 1)
        self.arena = Arena(
            address,
            model.config.hidden_size,
            model.config.num_layers,
            max_bytes=arena_bytes(config, device),
            # Of a step and of the one before it, whose answer may not have been read.
            useful_rows=2 * (chunk_size(config, device) + config.max_running_requests * nodes),
            required=config.require_transport,
            device=device,
            shared={"embedding": model.embedding.weight, "lm_head": model.lm_head.weight},
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
        """From now on the client may attach."""
        self._pool = (num_pages, page_size, context_length)
        self.client.allow_attach()

    def _on_state(self, state: str) -> None:
        is_attached = state == "attached"
        level = logging.INFO if is_attached else logging.WARNING
        logger.log(level, "%s: %s", f"draft {self.name}" if self.name else "draft", state)
        if is_attached:
            self._metrics.attaches.inc()

    def _attach(self, info: draft_pb2.GetDraftInfoResponse, epoch: int) -> draft_pb2.AttachRequest:
        expected = self.config.speculative_algorithm
        if self.name and info.algorithm != expected:
            raise AttachRefused(
                "algorithm", f"{self._address} is a draft for {info.algorithm}, not {expected}"
            )
        if info.protocol != DRAFT_PROTOCOL:
            raise AttachRefused(
                "protocol",
                f"the draft, version {info.version or 'unknown'}, speaks {info.protocol}, this verifier "
                f"{DRAFT_PROTOCOL}; both must be of one release",
            )
        model = self._model.config
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
            arena=self.arena.open(info, epoch),
            weights=self.arena.weights(info, epoch),
        )


def connect_drafts(
    config: VerifyConfig,
    model: DecoderModel,
    path: Path,
    device: torch.device,
    metrics: AnyMetrics,
) -> list[DraftLink]:
    """Starts the connections to the configured drafts and waits for them to say what they need.

    A draft that does not answer in time is left to connect later; its KV is then not counted.

    Args:
        path: Of the target.
    """
    addresses = config.draft_addresses()
    are_several = len(addresses) > 1
    configs = [
        with_tree_defaults(
            resolve(one, on_cpu=device.type == "cpu") if are_several else one,
            model.config.architecture,
        )
        for one in each_draft(config)
    ]
    levels = followed_levels(configs)
    links = []
    for (name, address), one in zip(addresses.items(), configs, strict=False):
        # What a step hands to a draft on the device has one size.
        on_device = one.tree_limits[0] == levels or not are_several
        links.append(
            DraftLink(
                name if are_several else "",
                one,
                address,
                model,
                path,
                device,
                metrics.of(name),
                on_device,
            )
        )
    for link in links:
        link.client.start()
    deadline = time.monotonic() + config.draft_wait
    for link, address in zip(links, addresses.values(), strict=True):
        if link.client.wait(max(deadline - time.monotonic(), 0.0)) is None:
            logger.warning(
                "the draft at %s has not answered in %.0f s; serving without it until it does",
                address,
                config.draft_wait,
            )
    return links


def infos_of(links: Sequence[DraftLink]) -> list[draft_pb2.GetDraftInfoResponse]:
    """What those drafts said that they are that have answered."""
    return [info for link in links if (info := link.client.info) is not None]


def tree_limits_of(links: Sequence[DraftLink], config: VerifyConfig) -> tuple[int, int, int]:
    """(steps, topk, draft tokens): the largest of each draft's."""
    if not links:
        return config.tree_limits
    return largest_limits([link.config.tree_limits for link in links])


def followed_levels(configs: Sequence[VerifyConfig]) -> int:
    """Levels of the trees of drafts that can follow on the device: the deepest of those that have a model, if there is one."""
    levels = [one.tree_limits[0] for one in configs]
    models = [
        num for one, num in zip(configs, levels, strict=True) if one.speculative_algorithm in MODELS
    ]
    return max(models or levels)
