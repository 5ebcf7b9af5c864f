"""FlashAttention-2's `flash_attn.modules.mha`: its two attention modules without parameters."""

from torch import nn

from onchip.compat.flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)


class FlashSelfAttention(nn.Module):
    """Attention of qkv (batch, seqlen, 3, heads, dim), or packed (total, 3, heads, dim) with cu_seqlens."""

    def __init__(
        self, causal=False, softmax_scale=None, attention_dropout=0.0, window_size=(-1, -1), alibi_slopes=None,
        deterministic=False,
    ):  # fmt: skip
        super().__init__()
        self.causal, self.softmax_scale, self.window_size = causal, softmax_scale, window_size
        self.drop, self.deterministic = nn.Dropout(attention_dropout), deterministic
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def forward(self, qkv, causal=None, cu_seqlens=None, max_seqlen=None):
        options = _options(self, causal)
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **options)
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **options)


class FlashCrossAttention(nn.Module):
    """Attention of q (batch, seqlen_q, heads_q, dim) to kv (batch, seqlen_k, 2, heads_k, dim), or both packed."""

    def __init__(
        self, causal=False, softmax_scale=None, attention_dropout=0.0, alibi_slopes=None, window_size=(-1, -1),
        deterministic=False,
    ):  # fmt: skip
        super().__init__()
        self.causal, self.softmax_scale, self.window_size = causal, softmax_scale, window_size
        self.drop, self.deterministic = nn.Dropout(attention_dropout), deterministic
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def forward(
        self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, cu_seqlens_k=None, max_seqlen_k=None
    ):
        options = _options(self, causal)
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **options)
        return flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **options
        )


def _options(module, causal):
    return {
        "dropout_p": module.drop.p if module.training else 0.0,
        "softmax_scale": module.softmax_scale,
        "causal": module.causal if causal is None else causal,
        "window_size": module.window_size,
        "alibi_slopes": module.alibi_slopes,
        "deterministic": module.deterministic,
    }
