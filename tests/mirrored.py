"""The public interfaces that onchip.compat mirrors: module -> name -> parameters with their defaults."""

MIRRORED = {
    "flash_attn.flash_attn_interface": {
        "maybe_contiguous": "x",
        "_get_block_size_n": "device, head_dim, is_dropout, is_causal",
        "round_multiple": "x, m",
        "_flash_attn_forward": (
            "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, "
            "alibi_slopes, return_softmax"
        ),
        "_flash_attn_varlen_forward": (
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, "
            "causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, "
            "return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, "
            "num_splits=0"
        ),
        "_flash_attn_backward": (
            "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, "
            "window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None"
        ),
        "_flash_attn_varlen_backward": (
            "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, "
            "max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, "
            "softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False"
        ),
        "FlashAttnQKVPackedFunc.forward": (
            "ctx, qkv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, "
            "deterministic, return_softmax, is_grad_enabled"
        ),
        "FlashAttnVarlenQKVPackedFunc.forward": (
            "ctx, qkv, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap, "
            "alibi_slopes, deterministic, return_softmax, is_grad_enabled"
        ),
        "FlashAttnKVPackedFunc.forward": (
            "ctx, q, kv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, "
            "deterministic, return_softmax, is_grad_enabled"
        ),
        "FlashAttnVarlenKVPackedFunc.forward": (
            "ctx, q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
            "softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_softmax, "
            "is_grad_enabled"
        ),
        "FlashAttnFunc.forward": (
            "ctx, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, "
            "deterministic, return_softmax, is_grad_enabled"
        ),
        "FlashAttnVarlenFunc.forward": (
            "ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
            "softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_softmax, "
            "block_table, is_grad_enabled"
        ),
        "flash_attn_qkvpacked_func": (
            "qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "alibi_slopes=None, deterministic=False, return_attn_probs=False"
        ),
        "flash_attn_kvpacked_func": (
            "q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "alibi_slopes=None, deterministic=False, return_attn_probs=False"
        ),
        "flash_attn_func": (
            "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "alibi_slopes=None, deterministic=False, return_attn_probs=False"
        ),
        "flash_attn_varlen_qkvpacked_func": (
            "qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, "
            "window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
            "return_attn_probs=False"
        ),
        "flash_attn_varlen_kvpacked_func": (
            "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
            "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
            "deterministic=False, return_attn_probs=False"
        ),
        "flash_attn_varlen_func": (
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
            "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
            "deterministic=False, return_attn_probs=False, block_table=None"
        ),
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
            "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
            "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, "
            "num_splits=0, return_softmax_lse=False"
        ),
    },
    "flash_attn.bert_padding": {
        "IndexFirstAxis.forward": "ctx, input, indices",
        "IndexPutFirstAxis.forward": "ctx, values, indices, first_axis_dim",
        "IndexFirstAxisResidual.forward": "ctx, input, indices",
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
        "pad_input": "hidden_states, indices, batch, seqlen",
    },
    "flash_attn.layers.rotary": {
        "rotate_half": "x, interleaved=False",
        "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
        "ApplyRotaryEmb.forward": (
            "ctx, x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
            "max_seqlen=None"
        ),
        "apply_rotary_emb": (
            "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
            "max_seqlen=None"
        ),
        "_apply_rotary_emb_qkv": (
            "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, inplace=False, conjugate=False, "
            "seqlen_offsets=0, num_heads_q=None"
        ),
        "ApplyRotaryEmbQKV_.forward": (
            "ctx, qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
            "num_heads_q=None"
        ),
        "apply_rotary_emb_qkv_": (
            "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None"
        ),
        "ApplyRotaryEmbKV_.forward": "ctx, kv, cos, sin, interleaved=False, seqlen_offsets=0",
        "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
        "RotaryEmbedding.__init__": (
            "self, dim, base=10000.0, interleaved=False, scale_base=None, device=None"
        ),
        "RotaryEmbedding.forward": "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None",
    },
    "flash_attn.ops.triton.rotary": {
        "rotary_kernel": (
            "OUT, X, COS, SIN, CU_SEQLENS, SEQLEN_OFFSETS, seqlen, nheads, seqlen_ro, stride_out_batch, "
            "stride_out_seqlen, stride_out_nheads, stride_out_headdim, stride_x_batch, stride_x_seqlen, "
            "stride_x_nheads, stride_x_headdim, ROTARY_DIM, IS_SEQLEN_OFFSETS_TENSOR, IS_VARLEN, "
            "INTERLEAVED, CONJUGATE, BLOCK_H, BLOCK_M"
        ),
        "apply_rotary": (
            "x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, "
            "inplace=False, conjugate=False"
        ),
    },
    "flash_attn_interface": {
        "maybe_contiguous": "x",
        "round_multiple": "x, m",
        "round_up_headdim": "head_size",
        "_flash_attn_forward": (
            "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, "
            "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
            "page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, "
            "seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, "
            "causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, "
            "rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0"
        ),
        "_flash_attn_backward": (
            "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, "
            "sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, "
            "softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, "
            "deterministic=False, sm_margin=0"
        ),
        "setup_context": "ctx, inputs, output",
        "_backward": "ctx, dout, *grads",
        "FlashAttnQKVPackedFunc.forward": (
            "ctx, qkv, softmax_scale, causal, q_descale=None, k_descale=None, v_descale=None, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, "
            "sm_margin=0, return_softmax=False"
        ),
        "FlashAttnFunc.forward": (
            "ctx, q, k, v, softmax_scale, causal, qv=None, q_descale=None, k_descale=None, "
            "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, "
            "pack_gqa=None, deterministic=False, sm_margin=0, return_softmax=False"
        ),
        "FlashAttnVarlenFunc.forward": (
            "ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, "
            "softmax_scale, causal, qv=None, q_descale=None, k_descale=None, v_descale=None, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
            "deterministic=False, sm_margin=0, return_softmax=False"
        ),
        "flash_attn_qkvpacked_func": (
            "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, "
            "sm_margin=0, return_attn_probs=False"
        ),
        "flash_attn_func": (
            "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
            "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, "
            "pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
        ),
        "flash_attn_varlen_func": (
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
            "seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
            "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, "
            "pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
        ),
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
            "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
            "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
            "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
            "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"
        ),
        "get_scheduler_metadata": (
            "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
            "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
            "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), "
            "attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
        ),
    },
    "flash_attn.cute.interface": {
        "_flash_attn_fwd": (
            "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, "
            "softmax_scale=None, causal=False, softcap=None, window_size_left=None, "
            "window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, "
            "intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, "
            "score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, "
            "lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None, "
            "v_descale=None, gather_kv_indices=None, scheduler_metadata=None, seqlen_k_per_split=None, "
            "disable_scheduler_metadata=False"
        ),
        "_flash_attn_bwd": (
            "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, "
            "window_size_left=None, window_size_right=None, m_block_size=64, n_block_size=128, "
            "num_threads=256, pack_gqa=False, num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, "
            "dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, "
            "V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, "
            "score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, "
            "block_sparse_tensors=None, dlse=None, learnable_sink=None"
        ),
        "flash_attn_func": (
            "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, "
            "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
            "deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, "
            "aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False"
        ),
        "flash_attn_varlen_func": (
            "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
            "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, "
            "gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False, "
            "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
            "deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
            "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
            "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False"
        ),
        "flash_attn_combine": (
            "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
            "virtual_batch_idx=None, return_lse=True"
        ),
        "get_scheduler_metadata": (
            "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, "
            "pack_gqa=None, causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, "
            "cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, "
            "leftpad_k=None, seqlen_k_per_split=None, _arch=None"
        ),
    },
    "flash_attn.cute.block_sparsity": {
        "ceildiv": "a, b",
        "_ordered_to_dense_simple": "num_blocks, indices, num_cols",
        "compute_dq_write_order": (
            "fwd_mask_cnt, fwd_mask_idx, fwd_full_cnt, fwd_full_idx, bwd_mask_cnt, bwd_mask_idx, "
            "bwd_full_cnt, bwd_full_idx, spt=False"
        ),
        "compute_dq_write_order_from_block_mask": "block_mask, spt=False",
        "get_sparse_q_block_size": "tensors, seqlen_q",
        "get_kv_subtile_factor": "block_sparse_tensors, n_block_size",
        "block_sparse_bwd_supports_2cta": "block_sparse_tensors, n_block_size",
        "_expand_sparsity_tensor": "tensor, expected_shape, tensor_name, context, hint",
        "_check_and_expand_block": (
            "name, cnt, idx, expected_count_shape, expected_index_shape, context, hint"
        ),
        "_check_and_expand_metadata_tensor": "name, tensor, expected_shape, context, hint, device",
        "get_block_sparse_expected_shapes": (
            "batch_size, num_head, seqlen_q, seqlen_k, m_block_size, n_block_size, q_stage"
        ),
        "infer_block_sparse_expected_shapes": (
            "tensors, *, batch_size, num_head, seqlen_q, seqlen_k, m_block_size, n_block_size, q_stage, "
            "context, sparse_block_size_q=None, sparse_block_size_kv=None"
        ),
        "get_block_sparse_expected_shapes_bwd": (
            "batch_size, num_head, seqlen_q, seqlen_k, m_block_size, n_block_size, q_subtile_factor, "
            "kv_subtile_factor=1"
        ),
        "normalize_block_sparse_tensors": (
            "tensors, *, expected_count_shape, expected_index_shape, context=None, hint=None"
        ),
        "is_block_sparsity_enabled": "tensors",
        "get_block_sparse_broadcast_pattern": "tensors",
        "normalize_block_sparse_config": (
            "tensors, *, batch_size, num_head, seqlen_q, seqlen_k, block_size, q_stage, "
            "allow_kv_subtile=False"
        ),
        "normalize_block_sparse_config_bwd": (
            "tensors, *, batch_size, num_head, seqlen_q, seqlen_k, block_size, q_subtile_factor, "
            "kv_subtile_factor=1"
        ),
        "to_cute_block_sparse_tensors": "tensors, enable_tvm_ffi=True",
        "fast_sampling": "mask_mod",
    },
    "flash_attn.modules.mha": {
        "FlashSelfAttention.__init__": (
            "self, causal=False, softmax_scale=None, attention_dropout=0.0, window_size=(-1, -1), "
            "alibi_slopes=None, deterministic=False"
        ),
        "FlashSelfAttention.forward": "self, qkv, causal=None, cu_seqlens=None, max_seqlen=None",
        "FlashCrossAttention.__init__": (
            "self, causal=False, softmax_scale=None, attention_dropout=0.0, alibi_slopes=None, "
            "window_size=(-1, -1), deterministic=False"
        ),
        "FlashCrossAttention.forward": (
            "self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, cu_seqlens_k=None, max_seqlen_k=None"
        ),
    },
}

# The functions of torch that onchip stands in for, and where.
TORCH = {
    "torch.nn.functional": {
        "scaled_dot_product_attention": (
            "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
        ),
    },
    "torch.nn.attention.flex_attention": {
        "flex_attention": (
            "query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, "
            "return_lse=False, kernel_options=None, *, return_aux=None"
        ),
    },
    "torch.nn": {
        "MultiheadAttention.__init__": (
            "self, embed_dim, num_heads, dropout=0.0, bias=True, add_bias_kv=False, add_zero_attn=False, "
            "kdim=None, vdim=None, batch_first=False, device=None, dtype=None"
        ),
        "MultiheadAttention.forward": (
            "self, query, key, value, key_padding_mask=None, need_weights=False, attn_mask=None, "
            "average_attn_weights=True, is_causal=False"
        ),
    },
}
OURS = {
    "torch.nn.functional.scaled_dot_product_attention": "onchip.integrations.sdpa.sdpa",
    "torch.nn.attention.flex_attention.flex_attention": "onchip.integrations.flex.flex_attention",
    "torch.nn.MultiheadAttention.__init__": "onchip.nn.MultiheadAttention.__init__",
    "torch.nn.MultiheadAttention.forward": "onchip.nn.MultiheadAttention.forward",
}

# Other names that code imports, which the list of interfaces leaves out: second names, and functions of autograd.
FA2 = "flash_attn.flash_attn_interface"
OTHERS = {
    FA2: {
        f"_wrapped_flash_attn_{name}": MIRRORED[FA2][f"_flash_attn_{name}"]
        for name in ("forward", "varlen_forward", "backward", "varlen_backward")
    },
    "flash_attn.bert_padding": {
        "index_first_axis": "input, indices",
        "index_put_first_axis": "values, indices, first_axis_dim",
        "index_first_axis_residual": "input, indices",
    },
    "flash_attn.layers.rotary": {
        "apply_rotary_emb_func": MIRRORED["flash_attn.layers.rotary"]["apply_rotary_emb"],
    },
    "flash_attn.cute.block_sparsity": {
        "BlockSparseTensorsTorch": (
            "mask_block_cnt, mask_block_idx, full_block_cnt=None, full_block_idx=None, cu_total_m_blocks=None, "
            "cu_block_idx_offsets=None, block_size=None, dq_write_order=None, dq_write_order_full=None, spt=None"
        ),
    },
}
