"""DDP and FSDP2 around a module that uses onchip, on two processes of this machine, with and without torch.compile."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from onchip import nn

WORLD = 2


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        nn.SelfAttention(16, 2), torch.nn.LayerNorm(16), nn.SelfAttention(16, 4, heads_k=2)
    )


def batch(rank=None):
    torch.manual_seed(1)
    x = torch.randn(2 * WORLD, 7, 16)
    return x if rank is None else x[2 * rank : 2 * rank + 2]


def loss(net, x):
    return net(x).square().mean()


def wrap(kind, net):
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (WORLD,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def work(rank, path, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    for kind, compiled in (("ddp", False), ("fsdp2", False), ("ddp", True)):
        net = wrap(kind, model())
        run = torch.compile(net, backend="aot_eager") if compiled else net
        loss(run, batch(rank)).backward()
        grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters()]
        if rank == 0:
            torch.save(grads, f"{results}/{kind}-{compiled}.pt")
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (str(folder / "meeting"), str(folder)), nprocs=WORLD)
    return folder


@pytest.mark.parametrize("name", ["ddp-False", "fsdp2-False", "ddp-True"])
def test_gradients_equal_one_process(name, results):
    net = model()
    loss(net, batch()).backward()
    for ours, p in zip(torch.load(results / f"{name}.pt"), net.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, rtol=1e-4, atol=1e-6)
