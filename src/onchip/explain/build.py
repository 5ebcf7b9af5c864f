"""Numbers and templates -> one HTML document."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

from onchip.explain import figures, tiling

HERE = Path(__file__).parent
SCRIPTS = (
    "dom",
    "memory",
    "softmax",
    "stage",
    "tiling",
    "charts",
    "main",
)  # in this order: each uses those before it
LIMIT = 2**20
BACKEND = "triton"  # stands for onchip on the page; its numbers are arithmetic, and need no triton


def page(
    seqlen: int | None = None, dim: int | None = None, mask: str | None = None, *, cpu: bool = True
) -> str:
    """The page. seqlen, dim and mask (an expression of `onchip bench --mask`) are offered besides its own choices.

    seqlen: 64 to 8192, dim: at most 512. cpu: list this machine's CPU among the devices (two seconds to measure).
    Raises ValueError for sizes out of range and masks that cannot be read or do not fit a length.
    """
    lengths, dims, masks = tiling.SEQLENS, tiling.DIMS, tiling.MASKS
    if seqlen is not None:
        if not tiling.SHORTEST <= seqlen <= tiling.LONGEST:
            raise ValueError(f"seqlen: got {seqlen}, expected {tiling.SHORTEST} to {tiling.LONGEST}")
        lengths = tuple(sorted({*lengths, seqlen}))
    if dim is not None:
        if not 1 <= dim <= 512:
            raise ValueError(f"dim: got {dim}, expected 1 to 512")
        dims = tuple(sorted({*dims, dim}))
    if mask:
        masks = (*masks, ("yours", mask, "given on the command line"))
        for n in lengths:  # before the work: it may fit some of them alone
            tiling.make_problem(n, 64, tiling.make_mask("yours", mask, n)[1])
    index, data = tiling.grid(BACKEND, lengths, dims, masks)
    index["chosen"] = {"seqlen": seqlen or 1024, "dim": dim or 64, "mask": len(masks) - 1 if mask else 0}
    return document({**figures.figures(BACKEND, cpu), "grid": index}, data)


def write(path: Path, **options: Any) -> int:
    """Write `page(**options)` and return its size in bytes; RuntimeError where that is over 1 MiB."""
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a directory, expected a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = page(**options).encode()
    if len(text) > LIMIT:
        raise RuntimeError(
            f"the page has {len(text)} bytes, expected at most {LIMIT}: fewer choices of your own"
        )
    path.write_bytes(text)
    return len(text)


def document(numbers: dict[str, Any], data: bytes) -> str:
    """The template with style, scripts and numbers in their places."""
    licence = "uPlot, https://github.com/leeoniya/uPlot\n" + (HERE / "uplot" / "LICENSE").read_text()
    parts = {
        "style": (HERE / "uplot" / "uPlot.min.css").read_text() + _template("page.css"),
        "library": f"/*!\n{licence}*/\n" + (HERE / "uplot" / "uPlot.iife.min.js").read_text(),
        "script": "\n".join(_template(f"{name}.js") for name in SCRIPTS),
        "data": pack(numbers, data),
    }
    text = _template("page.html")
    for name, part in parts.items():
        text = text.replace(f"{{{{{name}}}}}", part)
    return text


def _template(name: str) -> str:
    return (HERE / "page" / name).read_text(encoding="utf-8")


def pack(numbers: dict[str, Any], data: bytes) -> str:
    """Four bytes with the length of the JSON, the JSON, the bytes; deflated, in base64."""
    text = json.dumps(numbers, separators=(",", ":"), allow_nan=False).encode()
    return base64.b64encode(zlib.compress(len(text).to_bytes(4, "little") + text + data, 9)).decode()


def unpack(html: str) -> tuple[dict[str, Any], bytes]:
    """What `pack` put into a page."""
    start = html.index(">", html.index('id="numbers"')) + 1
    plain = zlib.decompress(base64.b64decode(html[start : html.index("</script>", start)]))
    length = 4 + int.from_bytes(plain[:4], "little")
    return json.loads(plain[4:length]), plain[length:]
