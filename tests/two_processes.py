"""Two processes that train with rmsnorm_raw.nn under DDP, then under FSDP2.

    python tests/two_processes.py gloo|nccl FILE

FILE is where they meet; it must not exist. Each holds its gradients, averaged over the processes,
against those of one process on both halves of the batch, and process 0 prints what has held.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rmsnorm_raw as rr

WIDTH, ROWS, PROCESSES = 64, 6, 2


def model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        rr.nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), rr.nn.RMSNorm(WIDTH, eps=1e-5),
    ).to(device)  # fmt: skip


def gradients(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """By name, of the mean over x's elements; whole where they are sharded."""
    module(x).square().mean().backward()
    found: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        gradient: Any = parameter.grad
        found[name.removeprefix("module.")] = getattr(
            gradient, "full_tensor", lambda g=gradient: g
        )()
    return found


def run(rank: int, backend: str, meet: str) -> None:
    device = "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=PROCESSES)
    x = torch.randn(PROCESSES * ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    mine = x[rank * ROWS : (rank + 1) * ROWS]
    expected = gradients(model(device), x)

    def hold(name: str, module: nn.Module) -> None:
        got = gradients(module, mine)
        assert got.keys() == expected.keys()
        for key, gradient in got.items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6)
        dist.barrier()
        if rank == 0:
            print(name, flush=True)

    hold("DDP", DistributedDataParallel(model(device)))
    sharded = model(device)
    mesh = init_device_mesh("cpu" if device == "cpu" else "cuda", (PROCESSES,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    hold("FSDP2", fully_shard(sharded, mesh=mesh))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, args=(sys.argv[1], sys.argv[2]), nprocs=PROCESSES)
