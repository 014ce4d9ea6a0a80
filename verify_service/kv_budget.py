"""Computes the memory that is left for KV pages beside weights, steps and drafts."""

import logging
from collections.abc import Sequence

import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.services import VerifyConfig
from foredraft.models.loader import available_host_bytes
from foredraft.transport import cuda
from verify_service.attach.links import DraftLink, captured_layers, infos_of
from verify_service.executor.ranks import messages
from verify_service.memory import CPU_FRACTION, GPU_FRACTION, GpuBudget, least_free_bytes
from verify_service.sizes import arena_bytes, chunk_size
from verify_service.target import Target
from verify_service.workspace import StepLimits, workspace_of

logger = logging.getLogger(__name__)


def step_limits(
    config: VerifyConfig,
    target: Target,
    links: Sequence[DraftLink],
    tree_limits: tuple[int, int, int],
    context_length: int,
    page_size: int,
) -> StepLimits:
    """Returns the limits of the target's steps.

    Args:
        tree_limits: Levels, nodes kept at each, and tokens of the largest tree, the root included.
        context_length: Maximum number of tokens of a sequence.
        page_size: Number of tokens of a page.
    """
    num_sequences = config.max_running_requests
    graph_batch = min(config.cuda_graph_max_bs or num_sequences, num_sequences)
    readers = [link for link in links if link.capabilities.layers is not None]
    return StepLimits(
        chunk=chunk_size(config, target.device),
        num_sequences=num_sequences,
        max_rows=tree_limits[2] if links else 1,
        num_keys=context_length,
        page_size=page_size,
        graph_batch=0 if config.disable_cuda_graph else graph_batch,
        num_captured=len(captured_layers(links)),
        widths=tuple(_width(link) for link in readers),
        projected=tuple(_width(link) for link in readers if link.projection_bytes),
        is_lossy=min(
            config.speculative_accept_threshold_single, config.speculative_accept_threshold_acc
        )
        < 1.0,
    )


def kv_budget(
    config: VerifyConfig, target: Target, links: Sequence[DraftLink], limits: StepLimits
) -> int:
    """Returns the bytes for KV pages of target and drafts together; logs what is counted on a GPU.

    Args:
        limits: Limits of the target's steps.
    """
    if target.device.type == "cpu":
        return int(host_bytes_per_rank(config) * (config.mem_fraction_static or CPU_FRACTION))
    free, total = torch.cuda.mem_get_info(target.device)
    if target.ranks is not None:
        target.ranks.board.write(messages.header(messages.Kind.MEMORY))
        free = least_free_bytes(target.device, target.ranks.group)
    fraction = config.mem_fraction_static or GPU_FRACTION
    workspace = workspace_of(target.model, target.attention, limits)
    # A draft that has answered has loaded its weights; the rest it allocates when it is attached.
    here = [info for info in neighbours(config, target, links) if info.device_uuid]
    readers = [info for info in infos_of(links) if info.device_uuid and info.HasField("hidden")]
    arena = arena_bytes(config, target.device)
    budget = GpuBudget(
        total=total,
        used=total - free,
        kept_free=int(total * (1 - fraction)),
        workspace=workspace.total,
        arena=arena * len(readers),
        projection=sum(link.projection_bytes for link in links),
        draft=sum(
            info.workspace_bytes
            # A rank has parts of the weights that a draft shares with one card alone.
            + (info.shared_weight_bytes if target.ranks is not None else 0)
            + info.bytes_per_sequence * config.max_running_requests
            for info in here
        ),
    )
    logger.info("GPU memory in MiB: %s", budget)
    logger.info("workspace in MiB: %s", workspace)
    return budget.kv


def host_bytes_per_rank(config: VerifyConfig) -> int:
    """Returns the memory that is free on this host for each of its ranks."""
    return available_host_bytes() // config.ranks_per_host()


def neighbours(
    config: VerifyConfig, target: Target, links: Sequence[DraftLink]
) -> list[draft_pb2.GetDraftInfoResponse]:
    """Returns the info of the drafts that have answered and share the target's memory: all but
    those on a GPU that no rank has.
    """
    cards: set[str] = set()
    if target.device.type == "cuda":
        num_local = config.ranks_per_host()
        ranks = [torch.device("cuda", number) for number in range(num_local)]
        cards = {cuda.uuid_of(card) for card in (ranks if num_local > 1 else [target.device])}
    return [info for info in infos_of(links) if not info.device_uuid or info.device_uuid in cards]


def _width(link: DraftLink) -> int:
    return max(1, len(link.capabilities.layers or ()))
