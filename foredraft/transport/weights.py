"""Maps weights of the target into its draft, which then need not load them. torch's own allocations
are shared as they lie.
"""

from collections.abc import Iterable, Mapping

import torch

from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.transport import codec, cuda, layout
from foredraft.transport.cuda_ipc import map_block
from foredraft.transport.rows import ArenaError


def export(weights: Mapping[str, torch.Tensor], epoch: int) -> list[tensor_pb2.Arena]:
    """Describes weights on a GPU, one arena for each allocation; the weights must stay where they
    are.

    Raises:
        ArenaError: An allocation cannot be shared.
    """
    arenas: dict[int, tensor_pb2.Arena] = {}
    for name, weight in weights.items():
        if not weight.is_contiguous():
            raise ArenaError("tensors", f"{name} is not contiguous")
        try:
            start, size = cuda.allocation_of(weight.data_ptr())
            if start not in arenas:
                arenas[start] = tensor_pb2.Arena(
                    transport=tensor_pb2.TRANSPORT_CUDA_IPC,
                    handle=cuda.handle_of(start),
                    size=size,
                    device_uuid=cuda.uuid_of(weight.device),
                    epoch=epoch,
                )
        except cuda.CudaError as error:
            raise ArenaError("handle", f"{name} cannot be shared: {error}") from error
        arenas[start].tensors.add(
            name=name,
            offset=weight.data_ptr() - start,
            dtype=codec.to_message(weight.dtype),
            shape=weight.shape,
        )
    return list(arenas.values())


class MappedWeights:
    """Maps a verifier's weights into this process.

    Args:
        arenas: The verifier's descriptions of the weights.

    Attributes:
        tensors: Weights by name. They must only be read: the verifier computes with the same bytes.

    Raises:
        ArenaError: A description contradicts itself, or an allocation cannot be mapped.
    """

    def __init__(self, arenas: Iterable[tensor_pb2.Arena]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._mappings: list[cuda.Mapping] = []
        try:
            for arena in arenas:
                self._map(arena)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmaps the weights; nothing may compute with them."""
        self.tensors.clear()
        while self._mappings:
            mapping = self._mappings.pop()
            torch.cuda.synchronize(mapping.device)
            mapping.close()

    def _map(self, arena: tensor_pb2.Arena) -> None:
        device = cuda.device_of(arena.device_uuid)
        if device is None:
            raise ArenaError("device_uuid", f"this process does not see GPU {arena.device_uuid}")
        mapping = map_block(arena, device)
        self._mappings.append(mapping)
        for tensor in arena.tensors:
            self.tensors[tensor.name] = layout.view(mapping.bytes, tensor)
