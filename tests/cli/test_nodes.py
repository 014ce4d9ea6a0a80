"""Hosts that share a target: flags, and the variables of LeaderWorkerSet and torch.distributed."""

import pytest

from foredraft.config.ranks import DEFAULT_PORT, Nodes, RanksConfig
from foredraft.errors import ConfigError

LWS = {"LWS_LEADER_ADDRESS": "a-0.a", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
TORCH = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}


@pytest.mark.parametrize(
    ("flags", "environ", "nodes"),
    [
        ({}, {}, Nodes()),
        ({"tensor_parallel_size": 4}, {}, Nodes()),
        ({"tensor_parallel_size": 4}, {"WORLD_SIZE": "2"}, Nodes()),
        ({}, LWS | TORCH, Nodes()),
        (
            {"tensor_parallel_size": 4, "nnodes": 2, "node_rank": 1, "dist_init_addr": "h:5000"},
            LWS,
            Nodes(2, 1, "h", 5000),
        ),
        ({"tensor_parallel_size": 2}, LWS | TORCH, Nodes(2, 1, "a-0.a", DEFAULT_PORT)),
        ({"tensor_parallel_size": 8}, TORCH, Nodes(4, 3, "10.0.0.1", 29500)),
        ({"tensor_parallel_size": 8}, LWS | {"LWS_GROUP_SIZE": "1"}, Nodes()),
        ({"tensor_parallel_size": 2, "nnodes": 2}, TORCH, Nodes(2, 0, "10.0.0.1", 29500)),
        (
            {"tensor_parallel_size": 2, "nnodes": 2, "dist_init_addr": "[::1]:7"},
            {},
            Nodes(2, 0, "::1", 7),
        ),
    ],
)
def test_hosts_are_found(flags: dict[str, object], environ: dict[str, str], nodes: Nodes) -> None:
    assert RanksConfig(**flags).nodes(environ) == nodes


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"nnodes": 2}, {}, "--nnodes 2 needs --dist-init-addr HOST:PORT"),
        ({"tensor_parallel_size": 2, "node_rank": 1}, {}, "--node-rank 1 must be below --nnodes"),
        (
            {"tensor_parallel_size": 3, "nnodes": 2, "dist_init_addr": "h:1"},
            {},
            "--tensor-parallel-size 3 does not go with --nnodes 2.*a multiple of 2",
        ),
        (
            {"tensor_parallel_size": 2, "nnodes": 2, "dist_init_addr": "h:port"},
            {},
            "--dist-init-addr h:port: must be HOST:PORT",
        ),
        ({"tensor_parallel_size": 3}, LWS, "does not go with LWS_GROUP_SIZE 2"),
        ({"tensor_parallel_size": 2}, LWS | {"LWS_WORKER_INDEX": "x"}, "LWS_WORKER_INDEX: 'x'"),
        (
            {"tensor_parallel_size": 2},
            {"MASTER_ADDR": "h", "WORLD_SIZE": "2"},
            "RANK is missing beside WORLD_SIZE: set it, or unset WORLD_SIZE",
        ),
        ({"tensor_parallel_size": 4}, TORCH | {"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE"),
        ({"tensor_parallel_size": 4}, TORCH | {"RANK": "4"}, "RANK 4 must be below WORLD_SIZE"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(
    flags: dict[str, object], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RanksConfig(**flags).nodes(environ)
