"""Train a small byte-level transformer; the attention is the only thing that differs between two runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from onchip.demo import fresh, text

LAYERS, HEADS, WIDTH = 3, 4, 128


class Layer(nn.Module):
    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # [batch, seqlen, WIDTH]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        x = x + self.project(self.attention(q, k, v).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Bytes (batch, seqlen) -> logits (batch, seqlen, 256)."""

    def __init__(self, attention: Callable[..., Tensor], context: int) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, WIDTH), nn.Embedding(context, WIDTH)
        self.layers = nn.Sequential(*(Layer(attention) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.byte(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.layers(x)))


def run(attention: str, steps: int, context: int, batch: int = 1) -> Iterator[dict[str, Any]]:
    """Yield {"loss"} (nats per byte) after each step; at the end also the median step's seconds and peak bytes.

    The peak is that of this process above what it held before the first step, weights and text included in the latter.
    """
    torch.manual_seed(0)
    model = Model(fresh.attention_named(attention), context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps + 1)
    data = torch.frombuffer(bytearray(text.corpus()), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - context - 1, (steps, batch), device="cpu")
    before, _ = fresh.resident()
    seconds = []
    for start in starts:
        began = time.perf_counter()
        chunk = torch.stack([data[i : i + context + 1] for i in start.tolist()])  # [batch, context + 1]
        loss = nn.functional.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seconds.append(time.perf_counter() - began)
        yield {"loss": loss.item()}
    yield {"step_seconds": median(seconds), "peak_bytes": fresh.resident()[1] - before}
