"""FlashAttention-2's subpackage `flash_attn.layers`."""
