"""Flags of the ranks that share the target: their number, their hosts, and checks that a model
can be shared.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from foredraft.config.options import option
from foredraft.errors import ConfigError

# Port at which hosts meet, if nothing names one.
DEFAULT_PORT = 50054
# Where hosts meet, how many there are, and the number of this one: by our flags, by what
# LeaderWorkerSet sets in each pod, and by what torch's launchers set for each process.
_FLAGS = ("--dist-init-addr", "--nnodes", "--node-rank")
_LWS = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
_TORCH = ("MASTER_ADDR", "WORLD_SIZE", "RANK")


@dataclass(frozen=True, slots=True)
class Nodes:
    """The hosts whose processes share a target.

    Attributes:
        count: Number of hosts.
        rank: Number of this host; 0 has the verifier.
        host: Name or address of host 0; empty where there is only one host.
        port: Port at which the hosts meet.
    """

    count: int = 1
    rank: int = 0
    host: str = ""
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """The ranks of a verifier's target."""

    tensor_parallel_size: int = option(
        1,
        "Ranks that share the target: one on each GPU, or processes on CPUs. Each holds"
        " some of the attention heads, of the MLPs and of the vocabulary.",
        aliases=("--tp-size", "--tp"),
        least=1,
    )
    nnodes: int = option(
        1,
        "Hosts that the ranks are on, each with equally many. LWS_GROUP_SIZE or WORLD_SIZE when"
        " absent.",
        least=1,
    )
    node_rank: int = option(
        0,
        "Number of this host; host 0 has the verifier. LWS_WORKER_INDEX or RANK when absent.",
        least=0,
    )
    dist_init_addr: str = option(
        "",
        "host:port of host 0, where the hosts meet. LWS_LEADER_ADDRESS or MASTER_ADDR and"
        " MASTER_PORT when empty.",
    )

    def nodes(self, environ: Mapping[str, str] = os.environ) -> Nodes:
        """Returns the hosts, by flags or by the variables of LeaderWorkerSet or
        torch.distributed.

        Raises:
            ConfigError: They contradict each other or --tensor-parallel-size.
        """
        size = self.tensor_parallel_size
        if size == 1 and self.nnodes == 1:
            return Nodes()
        names, (address, count, rank) = _FLAGS, (self.dist_init_addr, self.nnodes, self.node_rank)
        is_silent = count == 1 and not address
        if is_silent and environ.get(_LWS[1], "1") != "1":
            names, (address, count, rank) = _LWS, _from_variables(_LWS, environ)
        elif is_silent and _TORCH[0] in environ and environ.get(_TORCH[1], "1") != "1":
            names, (address, count, rank) = _TORCH, _from_variables(_TORCH, environ)
            if environ.get("LOCAL_WORLD_SIZE", "1") != "1":
                raise ConfigError("LOCAL_WORLD_SIZE: start one process on each host, not more")
        elif count > 1 and not address:
            address = environ.get(_TORCH[0], "")
        address_name, count_name, rank_name = names
        if rank >= count:
            raise ConfigError(f"{rank_name} {rank} must be below {count_name}, which is {count}")
        if count == 1:
            return Nodes()
        if not address:
            raise ConfigError(f"{count_name} {count} needs {address_name} HOST:PORT of host 0")
        if size % count:
            raise ConfigError(
                f"--tensor-parallel-size {size} does not go with {count_name} {count}: each host"
                f" has equally many ranks; give a multiple of {count}"
            )
        if address == environ.get(_TORCH[0]) and address != self.dist_init_addr:
            address += f":{environ.get('MASTER_PORT', DEFAULT_PORT)}"
        host, separator, port = address.rpartition(":")
        if not separator:
            host, port = address, str(DEFAULT_PORT)
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"{address_name} {address}: must be HOST:PORT")
        return Nodes(count, rank, host.strip("[]"), int(port))

    def ranks_per_host(self) -> int:
        """Returns the number of ranks on each host.

        Raises:
            ConfigError: See `nodes`.
        """
        return self.tensor_parallel_size // self.nodes().count

    def check_shares(self, sizes: Mapping[str, int], why_not: Callable[[int], str]) -> None:
        """Raises ConfigError, with the numbers that do work, where this number of ranks cannot
        share a model.

        Args:
            sizes: Numbers of a model by their names, see `ModelConfig.shared_sizes`.
            why_not: Returns why a number of ranks that divides them cannot share the model all the
                same; empty where it can.
        """
        size = self.tensor_parallel_size
        if not (why := _why_not_shared(sizes, why_not, size)):
            return
        fitting = [
            str(other)
            for other in range(1, min(max(sizes.values()), 2 * size) + 1)
            if not _why_not_shared(sizes, why_not, other)
        ]
        raise ConfigError(
            f"--tensor-parallel-size {size} does not go with this model: {why};"
            f" give {_any_of(fitting)}"
        )

    def check_gpus(self, num_gpus: int | None) -> None:
        """Raises ConfigError where ranks cannot run on GPUs.

        Args:
            num_gpus: Number of GPUs that ranks of this host see; None where it is not known yet.
        """
        size, num_local = self.tensor_parallel_size, self.ranks_per_host()
        if size == 1 or num_gpus is None or num_local <= num_gpus:
            return
        needed = "as many GPUs" if num_local == size else f"{num_local} GPUs on each host"
        raise ConfigError(
            f"--tensor-parallel-size {size} needs {needed}, one for each rank, and there are"
            f" {num_gpus}: give fewer ranks, or name more in CUDA_VISIBLE_DEVICES"
        )


def _why_not_shared(sizes: Mapping[str, int], why_not: Callable[[int], str], size: int) -> str:
    for what, number in sizes.items():
        if not _can_share(what, number, size):
            return f"its {number} {what} cannot be shared equally"
    return why_not(size)


def _can_share(what: str, number: int, size: int) -> bool:
    # Of few key and value heads several ranks hold the same.
    return number % size == 0 or (what.startswith("key") and size % number == 0)


def _from_variables(
    names: tuple[str, str, str], environ: Mapping[str, str]
) -> tuple[str, int, int]:
    """Returns address, number of hosts and number of this host."""
    for name in names:
        if not environ.get(name):
            raise ConfigError(f"{name} is missing beside {names[1]}: set it, or unset {names[1]}")
    for name in names[1:]:
        if not environ[name].isdigit():
            raise ConfigError(f"{name}: {environ[name]!r} is no number")
    return environ[names[0]], int(environ[names[1]]), int(environ[names[2]])


def _any_of(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
