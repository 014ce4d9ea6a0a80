"""Projects hidden states for a draft in the verifier's process, so that fewer bytes are sent for
each token.

The draft provides the weights. They are checked when they arrive and used outside of the target's
graphs, so that a fault in them costs only the draft.
"""

import logging
import time
from collections.abc import Callable, Iterator

import grpc
import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.draft.v1.draft_pb2_grpc import DraftServiceStub
from foredraft.errors import AttachRefused, InvalidRequest
from foredraft.layers.fusion import Fusion
from foredraft.rpc.channel import channel
from foredraft.rpc.errors import from_rpc_error
from foredraft.rpc.tls import Identity
from foredraft.transport import codec
from foredraft.transport.fusion import fill, shape_of

FETCH_SECONDS = 120.0

logger = logging.getLogger(__name__)


class FusionSource:
    """Fetches the weights of a draft's fusion, once for each checksum.

    Args:
        address: Address of the draft.
        identity: Certificate for TLS over TCP.
        device: Device that the target runs on.
    """

    def __init__(self, address: str, identity: Identity | None, device: torch.device) -> None:
        self._address, self._identity, self._device = address, identity, device
        self._fetched: tuple[str, Fusion] | None = None

    def get(
        self, info: draft_pb2.GetDraftInfoResponse, may_cancel: Callable[[grpc.Future], None]
    ) -> Fusion:
        """Returns the fusion that the draft offers; runs in the client's thread.

        Args:
            info: The draft's info.
            may_cancel: See `DraftClient.may_cancel`.

        Raises:
            AttachRefused: The weights do not match the draft's info, or there is no memory for
                them.
            ForedraftError: They could not be fetched.
        """
        if self._fetched is not None and info.checksum and self._fetched[0] == info.checksum:
            return self._fetched[1]
        self._fetched = None
        started = time.monotonic()
        try:
            fusion = Fusion(shape_of(info), codec.to_torch(info.hidden.dtype), self._device)
            fill(fusion.tensors(), self._parts(may_cancel))
        except InvalidRequest as error:
            raise AttachRefused("hidden.dtype", error.message) from error
        except RuntimeError as error:
            raise AttachRefused("fusion", f"no memory for its weights: {error}") from error
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        num_bytes = sum(weight.nbytes for weight in fusion.tensors().values())
        logger.info(
            "hidden states are projected here for the draft: %d elements to %d, %.1f MiB of its"
            " weights, fetched in %.1f s",
            info.hidden.width,
            info.fusion.width,
            num_bytes / 2**20,
            time.monotonic() - started,
        )
        self._fetched = info.checksum, fusion
        return fusion

    def _parts(
        self, may_cancel: Callable[[grpc.Future], None]
    ) -> Iterator[draft_pb2.GetFusionResponse]:
        with channel(self._address, identity=self._identity) as connection:
            request = draft_pb2.GetFusionRequest()
            call = DraftServiceStub(connection).GetFusion(request, timeout=FETCH_SECONDS)
            may_cancel(call)
            yield from call
