"""FlashAttention-4's `flash_attn.cute.block_sparsity`: lists of the blocks that attention visits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

import onchip
from onchip.compat.missing import refuse

__getattr__ = refuse(
    __name__, "_ordered_to_dense_simple", "compute_dq_write_order", "compute_dq_write_order_from_block_mask",
    "get_sparse_q_block_size", "get_kv_subtile_factor", "block_sparse_bwd_supports_2cta", "_expand_sparsity_tensor",
    "_check_and_expand_block", "_check_and_expand_metadata_tensor", "get_block_sparse_expected_shapes",
    "infer_block_sparse_expected_shapes", "get_block_sparse_expected_shapes_bwd", "normalize_block_sparse_tensors",
    "get_block_sparse_broadcast_pattern", "normalize_block_sparse_config", "normalize_block_sparse_config_bwd",
    "to_cute_block_sparse_tensors",
)  # fmt: skip


class BlockSparseTensorsTorch(NamedTuple):
    """Key blocks of each query block: counts (batch | 1, heads | 1, blocks_q), indices (..., blocks_k), int32.

    Pairs in mask blocks are subject to mask_mod, those in full blocks are visible. block_size: (queries, keys).
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)


def is_block_sparsity_enabled(tensors: BlockSparseTensorsTorch) -> bool:
    """Whether any list of blocks is given."""
    return tensors.mask_block_cnt is not None or tensors.full_block_cnt is not None


def fast_sampling(mask_mod):
    """Marks a mask whose blocks may be told from their corners; onchip looks at every element."""
    mask_mod.use_fast_sampling = True
    return mask_mod


def block_mask(
    tensors: BlockSparseTensorsTorch, seqlen_q: int, seqlen_k: int, inside: onchip.Mask | None
) -> onchip.Mask:
    """The onchip mask of the lists; `inside` is the mask_mod of partial blocks."""
    from onchip.integrations.flex import listed_blocks, lists_to_mask

    if tensors.cu_total_m_blocks is not None:
        raise NotImplementedError("block_sparse_tensors: of packed sequences are not supported")
    if tensors.block_size is None:
        raise NotImplementedError(
            "block_sparse_tensors: without block_size, (queries, keys) of a block, is not supported"
        )
    shape = (ceildiv(seqlen_q, tensors.block_size[0]), ceildiv(seqlen_k, tensors.block_size[1]))
    partial = listed_blocks(tensors.mask_block_cnt, tensors.mask_block_idx, shape)
    full = None
    if tensors.full_block_cnt is not None and tensors.full_block_idx is not None:
        full = listed_blocks(tensors.full_block_cnt, tensors.full_block_idx, shape)
    return lists_to_mask(partial, full, tensors.block_size, inside)
