"""What a call would do, without doing it: backend and reasons, tiles, FLOPs, bytes, memory, and the least time."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onchip import problem as problems, schedule, select
from onchip.inputs import varlen_layout
from onchip.layout import Layout
from onchip.mask import Mask
from onchip.problem import Problem, check_types
from onchip.schedule import EMPTY, FULL, PARTIAL, Tiles
from onchip.score import Score

# The model and the devices are imported where a plan is made: `import onchip` is a quarter quicker without them.
if TYPE_CHECKING:
    from onchip.devices import Device
    from onchip.traffic import Floor, Traffic

Shape = tuple[int, ...] | Tensor
PICTURE = (12, 32)  # rows and columns at most: a terminal's letters are twice as high as wide
_SHADES = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}


@dataclass(frozen=True)
class Plan:
    """A problem's cost and its backend. Tiles and pairs are counted over every sequence and query head."""

    problem: Problem
    backend: str
    refusals: dict[str, str]  # backend -> reason
    tiles: Tiles
    empty: int
    partial: int
    full: int
    pairs: int  # visible (query, key) pairs
    flops: int  # of the forward pass: two matrix products over the visible pairs
    extra_memory: int  # bytes beyond inputs, outputs and gradients, forward and backward
    copies: tuple[str, ...]  # the tensors that the backend copies whole before it reads them
    device_name: str | None  # of a known device, which the times are stated for; None: this machine
    elsewhere: (
        str | None
    )  # the same where it is not this machine's GPU: tiles and refusals are then that one's
    layout: Layout = field(compare=False, repr=False)
    mask: Mask = field(compare=False, repr=False)
    _found: dict[str, dict[str, Traffic]] = field(default_factory=dict, compare=False, repr=False)

    def passes(self, algorithm: str = "onchip") -> dict[str, Traffic]:
        """{"forward", "backward": Traffic} of onchip, or of another of `onchip.traffic.ALGORITHMS` on this problem."""
        from onchip import traffic

        if algorithm not in self._found:
            backend = self.backend if algorithm == "onchip" else None
            stated = (_counted(self.problem, self.mask), self.layout, self.mask, (algorithm,))
            self._found.update(traffic.compare(*stated, backend=backend, device=self.elsewhere))
        return self._found[algorithm]

    @property
    def traffic(self) -> dict[str, dict[str, Traffic]]:
        """The passes of every algorithm."""
        from onchip import traffic

        return {name: self.passes(name) for name in traffic.ALGORITHMS}

    @cached_property
    def device(self) -> Device:
        """The device that times are stated for; "cpu" is measured when first asked for, which takes seconds.

        Raises ValueError where the plan is for a GPU that is neither named nor here, or here but not a known one.
        """
        from onchip import devices

        if self.device_name is None and self.problem.device == "cpu":
            return devices.this_cpu()
        if self.device_name is None and not torch.cuda.is_available():
            raise ValueError(f"device: there is no GPU here; name one of {', '.join(devices.NAMES)}")
        return devices.device(self.device_name)

    def floor(self, step: str = "forward") -> Floor:
        """The least time of a pass on the device: its FLOPs at peak, and every input and output moved once."""
        return self.passes("minimum")[step].floor(self.device)

    @cached_property
    def dense_memory(self) -> int:
        """Peak bytes that standard attention takes beyond inputs, outputs and gradients, forward and backward."""
        return max(part.extra_memory for part in self.passes("standard").values())

    def picture(self, rows: int = PICTURE[0], columns: int = PICTURE[1]) -> list[str]:
        """The mask of the first sequence and head, a letter for each block: · empty, ▒ partial, █ full."""
        from onchip import steps, traffic

        q_len, k_len = traffic.lengths(self.layout)[0] if self.problem.batch else (0, 0)
        if not q_len or not k_len or not self.problem.heads_q:
            return []
        cells = Tiles(-(-q_len // rows), -(-k_len // columns))
        problem = replace(_counted(self.problem, self.mask), heads_k=self.problem.heads_q)
        if cells.tile_m <= self.tiles.tile_m or cells.tile_n <= self.tiles.tile_n:
            kinds = steps.kinds(problem, self.layout, self.mask, cells)
        else:  # of whole tiles: to look at every element of cells would take minutes at 131,072 tokens
            group = schedule.build(problem, self.layout, self.mask, self.tiles).groups[0]
            kinds = _shrunk(group.kinds, rows, columns)
        return ["".join(_SHADES[kind] for kind in row) for row in kinds]

    def __str__(self) -> str:
        """All but the times, which would have to measure this CPU: `report` adds them."""
        return "\n".join(self._lines())

    def report(self) -> str:
        """The plan, with the least time on the device."""
        return "\n".join([*self._lines(), *self._times()])

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings; without a floor where the device is not known."""
        passes = {name: {s: t.to_json() for s, t in p.items()} for name, p in self.traffic.items()}
        facts = {**vars(self.problem), "dtype": _name(self.problem.dtype)}
        counts = ("empty", "partial", "full", "pairs", "flops", "extra_memory", "copies")
        try:
            device, floors = self.device.name, {step: self.floor(step) for step in self.passes("minimum")}
        except ValueError:  # no known device
            device, floors = None, {}
        return {
            "problem": facts,
            "mask": repr(self.mask),
            "backend": self.backend,
            "refusals": self.refusals,
            "tiles": [self.tiles.tile_m, self.tiles.tile_n],
            **{name: getattr(self, name) for name in counts},
            "dense_memory": self.dense_memory,
            "device": device,
            "floor": {s: {"seconds": f.seconds, "bound": f.bound} for s, f in floors.items()},
            "traffic": passes,
        }

    def _lines(self) -> list[str]:
        p, total = self.problem, max(self.empty + self.partial + self.full, 1)
        own, standard = self.passes(), self.passes("standard")
        backward = own.get("backward")
        work = f"work       {self.pairs:,} visible pairs, {operations(self.flops)} forward"
        if backward is not None:
            work += f", {operations(backward.flops)} backward"
        copied = ", ".join(self.copies)
        batch = f"{p.batch} packed, longest" if p.layout == "varlen" else f"batch {p.batch}, seqlen"
        return [
            f"attention  {batch} {p.seqlen_q} x {p.seqlen_k}, heads {p.heads_q}/{p.heads_k}, "
            f"dim {p.dim}/{p.dim_v}, {_name(p.dtype)} on {self.device_name or p.device}",
            f"backend    {_kind(self.backend)}, tiles of {self.tiles.tile_m} x {self.tiles.tile_n}",
            *(
                f"           not {name}: {reason}"
                for name, reason in self.refusals.items()
                if name != self.backend
            ),
            *(
                [f"copies     {copied}: made contiguous before the call, since their strides do not fit"]
                if copied
                else []
            ),
            f"tiles      {self.empty} empty (skipped), {self.partial} partial, {self.full} full: "
            f"{100 * (self.partial + self.full) / total:.1f} % visited",
            *(f"           {row}" for row in self.picture()),
            work,
            *(_moved(step, part, standard[step]) for step, part in own.items()),
            f"memory     {size(self.extra_memory)} beyond inputs, outputs and gradients; "
            f"standard attention {size(self.dense_memory)}",
        ]

    def _times(self) -> list[str]:
        try:
            floors = {step: self.floor(step) for step in self.passes("minimum")}
        except ValueError as error:  # a GPU that is not a known one
            return [f"floor      {error}"]
        return [
            f"floor      {step}: {duration(floor.seconds)} on {floor.device}, {floor.bound}-bound "
            f"(arithmetic {duration(floor.compute)}, memory {duration(floor.memory)})"
            for step, floor in floors.items()
        ]


def _moved(step: str, own: Traffic, standard: Traffic) -> str:
    ratio = standard.bytes / own.bytes if own.bytes else 1.0
    moved = f"{size(own.read_bytes)} read, {size(own.write_bytes)} written"
    return (
        f"traffic    {step}: {moved}, {own.intensity:.1f} FLOP/byte ({size(own.least)} past a cache); "
        f"standard attention {size(standard.bytes)}, {ratio:.1f} times as much"
    )


def _kind(backend: str) -> str:
    """The backend's name; of the CPU's two, which loop it is."""
    if backend == "native":
        from onchip.backends.cpu import status

        return f"native ({status()})"
    return "cpu (the tiled loop of torch operations)" if backend == "cpu" else backend


def _shrunk(kinds: Tensor, rows: int, columns: int) -> list[list[int]]:
    """The kinds of tiles, so many of them to a cell that at most rows x columns are left."""
    low, high = kinds, kinds
    for dim, count in ((0, rows), (1, columns)):
        parts = [x.split(-(-x.shape[dim] // count), dim) for x in (low, high)]
        low = torch.stack([part.amin(dim) for part in parts[0]], dim)
        high = torch.stack([part.amax(dim) for part in parts[1]], dim)
    return torch.where(low == high, low, PARTIAL).tolist()


def size(count: float) -> str:
    """Bytes in MiB; in KiB below a tenth of one, and in GiB from 10 of them on."""
    if count >= 10 * 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.1f} MiB" if not 0 < count < 0.1 * 2**20 else f"{count / 2**10:.1f} KiB"


def operations(count: float) -> str:
    """FLOPs in three digits and a fit unit."""
    for scale, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count / 1e3:.4g} kFLOP"


def duration(seconds: float) -> str:
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plan(
    q: Shape,
    k: Shape,
    v: Shape,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    layout: str = "bshd",
    backend: str | None = None,
    deterministic: bool = True,
    seed: int | None = None,
    return_lse: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Plan:
    """The `Plan` of ``attention(q, k, v, ...)`` with the same keywords; nothing is computed.

    With cu_seqlens_q and cu_seqlens_k, of ``attention_varlen``, whose q, k and v are (total, heads, dim). A call over a
    cache has no plan: one with as many keys stands for it.

    q, k, v: the tensors, or their shapes alone, then of this dtype on this device: torch's name for one, or one of
    `onchip.devices.NAMES`, which need not be here.

    >>> print(plan((1, 4096, 8, 64), (1, 4096, 8, 64), (1, 4096, 8, 64), mask=causal()))

    Raises what the call would raise, NotImplementedError where no backend serves the problem included.
    """
    from onchip import another, orders, traffic

    options: dict[str, Any] = {"scale": scale, "dropout": dropout, "deterministic": deterministic}
    q_like, k_like, v_like = _stand_ins(q, k, v, layout, dtype)
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    where, known = (q.device.type, None) if isinstance(q, Tensor) else _where(device)
    place: Layout = (
        _packed((q_like, k_like, v_like), cu_seqlens_q, cu_seqlens_k)
        if packed
        else problems.dense_layout(q_like, k_like, v_like)
    )
    whole, _ = check_types(mask, score)
    # A mask for a device that is not here has its tensors elsewhere.
    options["device"] = where if known is None else _home(whole)
    kind = "varlen" if packed else "dense"
    problem = problems.state(q_like, k_like, v_like, place, kind, mask, score, **options)
    problem = replace(problem, device=where)
    elsewhere = None if known == another.this_gpu() else known
    name, refusals = another.choose(problem, backend, elsewhere)
    module = select.load(name)
    tiles = orders.chosen_tiles(problem, name, elsewhere)
    # A copy has room of its own for the schedules of other algorithms: the mask keeps those of its calls.
    whole = copy.copy(whole)
    tile_map = schedule.build(_counted(problem, whole), place, whole, tiles)
    pairs = traffic.visible_pairs(_counted(problem, whole), place, whole, tiles)
    return Plan(
        problem=problem,
        backend=name,
        refusals={n: reason for n, reason in refusals.items() if n != name},
        tiles=tiles,
        empty=tile_map.count(EMPTY),
        partial=tile_map.count(PARTIAL),
        full=tile_map.count(FULL),
        pairs=pairs,
        flops=2 * pairs * (problem.dim + problem.dim_v),
        extra_memory=module.extra_memory(problem, tiles),
        copies=_copies(module, (q_like, k_like, v_like)),
        device_name=known,
        elsewhere=elsewhere,
        layout=place,
        mask=whole,
    )


def _packed(tensors: tuple[Tensor, Tensor, Tensor], cu_q: Tensor | None, cu_k: Tensor | None) -> Layout:
    """The packed layout of stand-ins: its boundaries are read, so they are brought to the CPU."""
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if not isinstance(cu, Tensor):
            raise TypeError(f"{name}: got {type(cu).__name__}, expected a tensor, as for the other one")
    like = [torch.empty((), dtype=x.dtype).expand(x.shape) for x in tensors]
    return varlen_layout(*like, cu_q.cpu(), cu_k.cpu(), None, None, None, None)  # type: ignore[union-attr]


def _copies(module: Any, tensors: tuple[Tensor, ...]) -> tuple[str, ...]:
    """The tensors that a backend cannot address as they lie, by its own `copies(tensor without storage) -> bool`."""
    copies = getattr(module, "copies", None)
    return () if copies is None else tuple(n for n, x in zip("qkv", tensors, strict=True) if copies(x))


def _home(mask: Mask) -> str:
    """The device of a mask's tensors."""
    return next((t.device.type for t in mask.tensors()), "cpu")


def _counted(problem: Problem, mask: Mask) -> Problem:
    """The problem where its mask lies: tiles are counted there, whatever device is meant to run it."""
    return replace(problem, device=_home(mask))


def _where(device: str) -> tuple[str, str | None]:
    """torch's device type, and the name of a known device."""
    from onchip import devices

    if isinstance(device, str) and device.lower() != "cpu":
        try:
            return "cuda", devices.device(device).name
        except ValueError:
            pass
    try:
        return torch.device(device).type, None
    except RuntimeError:
        names = ", ".join(devices.NAMES)
        raise ValueError(f"device: got {device!r}, expected one of {names}, or torch's name of one") from None


def _stand_ins(q: Any, k: Any, v: Any, layout: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v without storage, as (batch, seqlen, heads, dim)."""
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout: got {layout!r}, expected 'bshd' or 'bhsd'")
    found = [_stand_in(name, x, dtype) for name, x in (("q", q), ("k", k), ("v", v))]
    return [x.transpose(1, 2) if layout == "bhsd" and x.dim() == 4 else x for x in found]


def _stand_in(name: str, x: Any, dtype: torch.dtype) -> Tensor:
    """A tensor without storage of the same shape, strides and dtype."""
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if not isinstance(x, tuple | list) or not all(type(n) is int and n >= 0 for n in x):
        raise TypeError(f"{name}: got {x!r}, expected a tensor or a shape (batch, seqlen, heads, dim)")
    return torch.empty(tuple(x), dtype=dtype, device="meta")
