"""CUDA graphs: whether work is being recorded into one, which may wait for nothing and is replayed on other values."""

from __future__ import annotations

import torch


def capturing(device: str) -> bool:
    """Whether what is asked of this kind of device now is recorded instead of run."""
    return device == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
