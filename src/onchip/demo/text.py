"""The demo's text: the language reference that every Python carries for `help()`."""

from __future__ import annotations

from pydoc_data.topics import topics


def corpus() -> bytes:
    """All topics, one after the other."""
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def passages(limit: int = 450, per_topic: int = 5) -> list[tuple[str, str]]:
    """(topic, passage): the first `per_topic` runs of whole paragraphs of each topic, about `limit` characters each."""
    found = []
    for topic in sorted(topics):
        runs = [""]
        for paragraph in topics[topic].split("\n\n"):
            paragraph = " ".join(paragraph.split())
            if runs[-1] and len(runs[-1]) + len(paragraph) > limit:
                runs.append("")
            runs[-1] = f"{runs[-1]} {paragraph}".strip()
        found += [(topic, run) for run in runs[:per_topic] if run]
    return found
