"""The arena: weights that the draft shares, and an exchange region for every attach of a draft that
reads hidden states or whose steps can stay on the GPU.

The draft client's thread creates and frees it; the engine's thread writes to it, and decides which
rows go through.
"""

import logging
import mmap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import AttachRefused, ForedraftError, InvalidRequest, Overloaded
from foredraft.layers.fusion import Fusion
from foredraft.rpc import address
from foredraft.transport import choice, cuda, shared_memory, weights
from foredraft.transport.base import HiddenWriter, Region
from foredraft.transport.device_exchange import DeviceExchange, StepSizes
from foredraft.transport.process import Peer
from foredraft.transport.rows import ArenaError, RowFormat
from verify_service import metrics

logger = logging.getLogger(__name__)

# A transport that is refused this often in a row is not offered until a draft has attached without
# it, unless all others were refused too. One refusal may be an accident, such as a draft short of
# descriptors or a damaged message.
MAX_REFUSALS = 2


@dataclass(frozen=True, slots=True)
class Exchange:
    """The exchange region of one attach, and the hidden states that its draft reads.

    Attributes:
        epoch: Number of the attach.
        layers: Layers whose input residual stream the draft reads; empty for the state after the
            final norm, None for a draft that reads no hidden states.
        region: The shared memory.
        peer: The draft's process.
        fusion: Projects hidden states to the features that the draft reads; None where it reads the
            hidden states themselves.
    """

    epoch: int
    layers: tuple[int, ...] | None
    region: Region
    peer: Peer
    fusion: Fusion | None = None

    @property
    def writer(self) -> HiddenWriter | None:
        """Returns the writer of hidden states; None for a draft that reads none."""
        return self.region if isinstance(self.region, HiddenWriter) else None

    @property
    def device(self) -> DeviceExchange | None:
        """Returns the buffers of steps that stay on the GPU; None where there are no such steps."""
        return self.region.device


class Arena:
    """Holds the exchange region of the current attach, or of the one that is being made.

    Args:
        draft: Address of the draft.
        hidden_size: Hidden size of the target.
        num_layers: Number of layers of the target.
        max_bytes: Maximum bytes of a region.
        useful_rows: Maximum number of rows that are in flight at a time.
        required: Name of the only transport to use; "any" for the best that both ends support.
        device: Device that the target runs on.
        shared: The target's weights that a draft may use, by name.
        steps: Sizes of steps that stay on the GPU; None where there are no such steps.
    """

    def __init__(
        self,
        draft: str,
        hidden_size: int,
        num_layers: int,
        max_bytes: int,
        useful_rows: int,
        required: str,
        device: torch.device = choice.CPU,
        shared: Mapping[str, torch.Tensor] | None = None,
        steps: StepSizes | None = None,
    ) -> None:
        supported = choice.supported(address.parse(draft).is_local, device)
        self._supported = supported
        self._required = required
        self._device = device
        self._uuid = ""
        if tensor_pb2.TRANSPORT_CUDA_IPC in supported:
            self._uuid = cuda.uuid_of(device)
        self._shared = dict(shared or {})
        self._left: list[Exchange] = []  # ended, but their drafts may still read them
        self._was_answered = self._is_counted = False
        self._hidden_size = hidden_size
        self._num_layers = num_layers
        self._max_bytes = max_bytes
        self._useful_rows = useful_rows
        self._steps = steps
        self._exchange: Exchange | None = None
        self._refusals: Counter[tensor_pb2.Transport] = Counter()  # since the last attach
        removed = shared_memory.remove_leftovers()
        if removed:
            logger.info("removed %d shared-memory segments of dead processes", removed)

    def open(
        self, info: draft_pb2.GetDraftInfoResponse, epoch: int, fusion: Fusion | None = None
    ) -> tensor_pb2.Arena | None:
        """Creates the region of a new attach; returns None for a draft that needs none.

        Args:
            info: The draft's info.
            epoch: Number of the attach.
            fusion: Projects hidden states for the draft; None where it does that itself.

        Raises:
            AttachRefused: The target lacks the hidden states, or no transport can be used.
        """
        self._free_left()
        offered, why = list(info.transports), ""
        if tensor_pb2.TRANSPORT_CUDA_IPC in offered and not self._is_reached_from(info):
            offered.remove(tensor_pb2.TRANSPORT_CUDA_IPC)
            why = ", which cannot read this GPU's memory"
        usable = [
            t
            for t in self._supported
            if t in offered and self._required in ("any", choice.NAMES[t])
        ]
        steps = self._steps if info.device_steps else None
        layers: tuple[int, ...] | None = None
        region: Region | None = None
        if info.HasField("hidden"):
            row, layers = self._row(info.hidden), tuple(info.hidden.layers)
            if fusion is not None:
                row = RowFormat(fusion.shape.num_outputs, row.dtype)
            if not usable:
                raise AttachRefused(
                    "transports",
                    f"--require-transport {self._required}: the verifier offers"
                    f" {choice.described(self._supported)}, the draft"
                    f" {choice.described(info.transports)}{why}",
                )
            try:
                region = self._open(self._accepted(usable) or usable, row, epoch, steps)
            except ArenaError as error:
                raise AttachRefused("transports", error.message) from error
        elif steps is not None:
            region = choice.open_region(self._accepted(usable), epoch, self._device, steps)
        if region is None:
            return None
        self._exchange = Exchange(epoch, layers, region, Peer(info.process), fusion)
        self._was_answered = False
        return region.arena

    def weights(self, info: draft_pb2.GetDraftInfoResponse, epoch: int) -> list[tensor_pb2.Arena]:
        """Exports the target's weights to a draft on the same GPU.

        Returns none where the draft has to load its own.
        """
        names = [name for name in info.shared_weights if name in self._shared]
        if not names or len(names) < len(info.shared_weights) or not self.is_on_same_gpu(info):
            return []
        try:
            return weights.export({name: self._shared[name] for name in names}, epoch)
        except ArenaError as error:
            logger.warning("the draft has to load the target's %s: %s", " and ".join(names), error)
            return []

    def attached(self, epoch: int) -> None:
        """Puts the region into service once the draft has mapped it.

        Raises:
            AttachRefused: The draft has mapped something else.
        """
        exchange = self.exchange(epoch)
        if exchange is None:
            self._refusals.clear()
            return
        self._was_answered = True
        region, writer = exchange.region, exchange.writer
        try:
            region.attached()
        except ArenaError as error:
            raise AttachRefused(f"arena.{error.field}", error.message) from error
        self._refusals.clear()
        self._free_left(exchange.peer)
        arena = region.arena
        name = choice.NAMES[arena.transport]
        if self._device.type == "cuda" and arena.transport != tensor_pb2.TRANSPORT_CUDA_IPC:
            logger.warning("hidden states leave the GPU: the draft cannot map its memory")
        metrics.TRANSPORT.labels(name).inc()
        metrics.ARENA_BYTES.inc(arena.size)
        self._is_counted = True
        if writer is not None:
            logger.info(
                "hidden states of %d x %s through %s, %d rows",
                writer.row.width,
                str(writer.row.dtype).removeprefix("torch."),
                name,
                writer.capacity,
            )
        if region.device is not None:
            logger.info("steps of the draft can stay on the GPU")

    def ended(self, epoch: int, error: ForedraftError | None) -> None:
        """Removes the region of an attach that has ended or was refused.

        A draft that is still alive may go on reading its own mapping; the memory is not used again.
        GPU memory stays until the draft is known to have ended or unmapped it.

        Args:
            epoch: Number of the attach.
            error: Reason for which the draft refused the attach; None where it did not.
        """
        exchange = self.exchange(epoch)
        if exchange is None:
            return
        transport = exchange.region.arena.transport
        if isinstance(error, AttachRefused) and error.field.startswith("arena"):
            # The draft cannot map this host's memory, such as another container's /dev/shm.
            self._refusals[transport] += 1
        self._exchange = None
        exchange.region.close()
        self._left.append(exchange)
        was_refused = isinstance(error, AttachRefused | Overloaded) and not self._was_answered
        if was_refused or transport != tensor_pb2.TRANSPORT_CUDA_IPC:
            # A draft that refuses has no mapping any more; a mapping of host memory is the draft's
            # own.
            self._free(exchange)
        else:
            self._free_left()
        if self._is_counted:
            metrics.TRANSPORT.labels(choice.NAMES[transport]).dec()
            metrics.ARENA_BYTES.dec(exchange.region.arena.size)
        self._is_counted = False

    def exchange(self, epoch: int) -> Exchange | None:
        """Returns the region of an attach; None once it has ended."""
        exchange = self._exchange
        return exchange if exchange is not None and exchange.epoch == epoch else None

    def is_on_same_gpu(self, info: draft_pb2.GetDraftInfoResponse) -> bool:
        """Returns whether the draft runs on the target's GPU, on this host."""
        return bool(self._uuid) and info.device_uuid == self._uuid

    def _accepted(self, transports: Sequence[tensor_pb2.Transport]) -> list[tensor_pb2.Transport]:
        """Returns the transports that were not refused too often."""
        return [t for t in transports if self._refusals[t] < MAX_REFUSALS]

    def _is_reached_from(self, info: draft_pb2.GetDraftInfoResponse) -> bool:
        """Returns whether the draft's GPU can use memory of the target's."""
        if self.is_on_same_gpu(info):
            return True
        theirs = cuda.device_of(info.device_uuid) if self._uuid else None
        return theirs is not None and cuda.reaches(theirs, self._device)

    def _free_left(self, attached: Peer | None = None) -> None:
        """Frees regions whose drafts have ended or attached again.

        A draft serves one verifier, so one that attaches again has unmapped its previous region.
        """
        for exchange in list(self._left):
            came_back = attached is not None and attached.identity == exchange.peer.identity
            if exchange.peer.is_gone or (came_back and exchange.peer.identity.pid):
                self._free(exchange)

    def _free(self, exchange: Exchange) -> None:
        self._left.remove(exchange)
        exchange.region.free()
        exchange.peer.close()

    def _row(self, needs: draft_pb2.HiddenNeeds) -> RowFormat:
        try:
            row = RowFormat.of(needs)
        except InvalidRequest as error:
            raise AttachRefused("hidden", error.message) from error
        if any(layer > self._num_layers for layer in needs.layers):
            raise AttachRefused(
                "hidden.layers",
                f"the draft reads layers {list(needs.layers)}; the target has {self._num_layers}",
            )
        width = self._hidden_size * max(1, len(needs.layers))
        if needs.width != width:
            raise AttachRefused(
                "hidden.width", f"the draft's is {needs.width}, the target gives {width}"
            )
        return row

    def _open(
        self,
        transports: Sequence[tensor_pb2.Transport],
        row: RowFormat,
        epoch: int,
        steps: StepSizes | None,
    ) -> HiddenWriter:
        # The first page of the region holds the header.
        room = self._max_bytes - mmap.PAGESIZE
        capacity = min(room // row.num_bytes, self._useful_rows)
        if capacity < 1:
            raise AttachRefused(
                "hidden.width", f"a row of {row.num_bytes} bytes does not fit --arena-mb"
            )
        return choice.open_writer(transports, row, capacity, epoch, self._device, steps)
