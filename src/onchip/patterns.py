"""Block maps for `block_sparse`: each function returns a bool tensor (blocks_q, blocks_k), on torch's default device
unless another is given."""

import torch
from torch import Tensor

__all__ = ["butterfly", "local_global", "strided"]

Device = torch.device | str | None


def local_global(nq: int, nk: int, *, local: int, global_: int, device: Device = None) -> Tensor:
    """Blocks within ``local`` of the diagonal, and the first ``global_`` block rows and columns (Longformer, BigBird).

    >>> local_global(4, 4, local=1, global_=1).int().tolist()
    [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]]
    """
    _check(nq=nq, nk=nk)
    _check(least=0, local=local, global_=global_)
    q, k = torch.arange(nq, device=device)[:, None], torch.arange(nk, device=device)
    return ((q + nk - nq - k).abs() <= local) | (q < global_) | (k < global_)


def strided(nq: int, nk: int, *, stride: int, local: int, device: Device = None) -> Tensor:
    """The ``local`` blocks up to the diagonal, and every block a multiple of ``stride`` before it (Sparse Transformer).

    Causal block by block: nothing above the block diagonal. Combine with `causal` for the diagonal blocks.

    >>> strided(4, 4, stride=3, local=1).int().tolist()
    [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]]
    """
    _check(nq=nq, nk=nk, stride=stride)
    _check(least=0, local=local)
    distance = torch.arange(nq, device=device)[:, None] + nk - nq - torch.arange(nk, device=device)
    return (distance >= 0) & ((distance < local) | (distance % stride == 0))


def butterfly(n: int, *, device: Device = None) -> Tensor:
    """Fixed butterfly of n x n blocks, n a power of two: i sees j where their numbers differ in at most one bit.

    The union of a butterfly network's stages: (1 + log2 n) / n of the blocks. The pattern that block-sparse
    FlashAttention uses (Dao et al. 2022, arXiv 2205.14135, section 3.3, from Pixelated Butterfly, 2112.00029).

    >>> butterfly(4).int().tolist()
    [[1, 1, 1, 0], [1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 1]]
    """
    _check(n=n)
    if n & (n - 1):
        raise ValueError(f"butterfly: n is {n}, expected a power of two")
    flips = torch.arange(n, device=device)[:, None] ^ torch.arange(n, device=device)
    return (flips & (flips - 1)) == 0


def _check(least: int = 1, **counts: int) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {type(value).__name__} {value!r}, expected an int")
        if value < least:
            raise ValueError(f"{name} is {value}, expected at least {least}")
