"""The transports that tests run over, and what a rank needs in its environment for each."""

from __future__ import annotations

import pytest

from tests.fakes.stand_ins import environment, stand_ins

TRANSPORTS = ("shm", "nccl")
TRANSPORTS_OVER_TORCH = ("group", "hierarchical")
EVERY_TRANSPORT = (*TRANSPORTS, *TRANSPORTS_OVER_TORCH)


def over(*world_sizes: int, **others: tuple[int, ...]) -> pytest.MarkDecorator:
    """Runs a test over every transport with each of the world sizes, or with `others` of a
    transport: `over(2, 3, shm=(2, 3, 4), nccl=())`. For modules that use the fixture `transport`.
    """
    assert set(others) <= set(EVERY_TRANSPORT), others
    cases = [
        (transport, world_size)
        for transport in EVERY_TRANSPORT
        for world_size in others.get(transport, world_sizes)
    ]
    return pytest.mark.parametrize("transport, world_size", cases, indirect=["transport"])


def environment_of(transport: str, rank: int) -> dict[str, str]:
    """The variables a rank needs so that fastcomm.init(transport) works where the tests run."""
    import torch

    if transport in TRANSPORTS_OVER_TORCH:
        # The name of this host may not resolve where the tests run. Even and odd ranks take each
        # other for ranks of two hosts.
        return {"GLOO_SOCKET_IFNAME": "lo"} | (
            {"FASTCOMM_HOST_ID": f"host {rank % 2}"} if transport == "hierarchical" else {}
        )
    if transport != "nccl":
        return {}
    if not torch.cuda.is_available():
        return environment(stand_ins())
    # Several ranks on one GPU. NCCL before 2.30 must take them for ranks of different hosts; later
    # ones want to be told.
    sharing = {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }
    # Kernels of different ranks wait for each other on the same multiprocessors: few blocks,
    # nothing that is loaded or chosen late.
    return sharing | {
        "NCCL_MAX_CTAS": "1",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_WIN_ENABLE": "0",
        "CUDA_MODULE_LOADING": "EAGER",
    }
