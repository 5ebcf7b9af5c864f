"""What a call would do, without doing it: backend and reasons, tiles, FLOPs, bytes, memory, and the least time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onchip import plan_report, problem as problems, schedule, select, stand_ins, stored
from onchip.layout import Cache, Layout
from onchip.mask import Mask
from onchip.problem import Problem, check_types
from onchip.schedule import EMPTY, FULL, PARTIAL
from onchip.score import Score
from onchip.tiles import Tiles
from onchip.units import dtype_name

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
    copies: tuple[str, ...]  # the tensors that the backend copies whole before it reads them
    cast_from: torch.dtype | None  # what autocast casts to the problem's dtype before the call
    held: int  # bytes of tensors of the mask and the score that its traffic leaves out: vectors, tables, block maps
    appended: int  # bytes of new keys and values that the call reads, and writes to its cache
    slots: int  # for keys in the cache, used or not
    device_name: str | None  # of a known device, which the times are stated for; None: this machine
    elsewhere: (
        str | None
    )  # the same where it is not this machine's GPU: tiles and refusals are then that one's
    layout: Layout = field(compare=False, repr=False)
    mask: Mask = field(compare=False, repr=False)
    score: Score = field(compare=False, repr=False)
    _found: dict[str, dict[str, Traffic]] = field(default_factory=dict, compare=False, repr=False)

    def passes(self, algorithm: str = "onchip") -> dict[str, Traffic]:
        """{"forward", "backward": Traffic} of onchip, or of another of `onchip.traffic.ALGORITHMS` on this problem.

        The backward pass makes the gradients of q, k and v, and of those tensors of the score that require one.
        """
        from onchip import traffic

        if algorithm not in self._found:
            backend = self.backend if algorithm == "onchip" else None
            stated = (_counted(self.problem, self.mask), self.layout, self.mask, (algorithm,))
            needs = ("q", "k", "v", *_learned(self.score))
            options: dict[str, Any] = {"score": self.score, "backend": backend, "needs": needs}
            self._found.update(traffic.compare(*stated, **options, device=self.elsewhere))
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
        """The least time of a pass on the device: its FLOPs at peak, and every input and output moved once.

        What its traffic leaves out of the mask and the score is read once on top; what is appended to a cache is read
        and written.
        """
        passes = self.passes("minimum")
        if step not in passes:
            raise ValueError(f"step: got {step!r}, expected {' or '.join(map(repr, passes))}")
        found = passes[step].floor(self.device)
        return replace(found, memory=found.memory + (self.held + 2 * self.appended) / self.device.bandwidth)

    @property
    def extra_memory(self) -> dict[str, int]:
        """Peak bytes that each pass takes beyond its inputs and results: see `Traffic.extra_memory`."""
        return {step: part.extra_memory for step, part in self.passes().items()}

    @cached_property
    def dense_memory(self) -> int:
        """Peak bytes that standard attention takes beyond inputs and results, in the pass that takes more."""
        return max(part.extra_memory for part in self.passes("standard").values())

    @property
    def lower_bound(self) -> float:
        """Numbers that the forward pass of no exact algorithm undercuts, up to a constant: `traffic.lower_bound`."""
        from onchip import traffic

        return traffic.lower_bound(self.problem, self.pairs)

    def picture(self, rows: int = PICTURE[0], columns: int = PICTURE[1]) -> list[str]:
        """The mask of the first sequence and head, a letter for each block: · empty, ▒ partial, █ full."""
        from onchip import amounts, steps

        q_len, k_len = amounts.lengths(self.layout)[0] if self.problem.batch else (0, 0)
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
        return "\n".join(plan_report.lines(self))

    def report(self) -> str:
        """The plan, with the least time on the device."""
        return "\n".join([*plan_report.lines(self), *plan_report.times(self)])

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings; without a floor where the device is not known."""
        passes = {name: {s: t.to_json() for s, t in p.items()} for name, p in self.traffic.items()}
        facts = {f.name: getattr(self.problem, f.name) for f in fields(self.problem)}
        facts["dtype"] = dtype_name(self.problem.dtype)
        counts = ("empty", "partial", "full", "pairs", "flops", "extra_memory", "held", "copies")
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
            "lead": self.tiles.lead,
            **{name: getattr(self, name) for name in counts},
            "dense_memory": self.dense_memory,
            "lower_bound": self.lower_bound,
            "cast_from": None if self.cast_from is None else dtype_name(self.cast_from),
            "cache": self._cache_json(),
            "device": device,
            "floor": {s: {"seconds": f.seconds, "bound": f.bound} for s, f in floors.items()},
            "traffic": passes,
        }

    def _cache_json(self) -> dict[str, Any] | None:
        if not isinstance(self.layout, Cache):
            return None
        page = self.layout.page_size or None
        return {
            "lengths": self.layout.k_lens,
            "new": self.layout.new,
            "appended": self.appended,
            "slots": self.slots,
            "page_size": page,
        }


def _shrunk(kinds: Tensor, rows: int, columns: int) -> list[list[int]]:
    """The kinds of tiles, so many of them to a cell that at most rows x columns are left."""
    low, high = kinds, kinds
    for dim, count in ((0, rows), (1, columns)):
        parts = [x.split(-(-x.shape[dim] // count), dim) for x in (low, high)]
        low = torch.stack([part.amin(dim) for part in parts[0]], dim)
        high = torch.stack([part.amax(dim) for part in parts[1]], dim)
    return torch.where(low == high, low, PARTIAL).tolist()


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
    cache_seqlens: int | Sequence[int] | Tensor | None = None,
    new: int = 0,
    page_table: Tensor | Sequence[int] | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    num_splits: int = 0,
) -> Plan:
    """The `Plan` of ``attention(q, k, v, ...)`` with the same keywords; nothing is computed.

    With cu_seqlens_q and cu_seqlens_k, of ``attention_varlen``, whose q, k and v are (total, heads, dim). With
    cache_seqlens, of ``attention_with_cache``, whose k and v are the caches, rows or pages; new: the keys that it
    appends to each sequence; page_table may be its shape (batch, pages) alone. Rotary embedding is not counted.

    q, k, v: the tensors, or their shapes alone, then of this dtype on this device: torch's name for one, or one of
    `onchip.devices.NAMES`, which need not be here. Where torch.autocast is on for the device, the plan is that of a
    call under it: in autocast's dtype, and it says what is cast. Else it speaks of the tensors' own dtype.

    >>> print(plan((1, 4096, 8, 64), (1, 4096, 8, 64), (1, 4096, 8, 64), mask=causal()))
    >>> print(plan((8, 1, 32, 128), *[(1024, 16, 8, 128)] * 2, cache_seqlens=[900] * 8, page_table=(8, 64)))

    Raises what the call would raise, NotImplementedError where no backend serves the problem included.
    """
    from onchip import devices, orders, traffic

    options: dict[str, Any] = {"scale": scale, "dropout": dropout, "deterministic": deterministic}
    over_cache = cache_seqlens is not None
    slots = {"page_table": page_table, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    packing = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _check_kind(over_cache, packing, {**slots, "new": new or None, "num_splits": num_splits or None})
    if over_cache:
        _check_cached(layout, dropout)
        options["num_splits"] = num_splits
    where, known = (q.device.type, None) if isinstance(q, Tensor) else stand_ins.where(device)
    given = stand_ins.tensors(q, k, v, layout, dtype)
    q_like, k_like, v_like = stand_ins.autocast(given, where, over_cache)
    three = (q_like, k_like, v_like)
    if over_cache:
        place: Layout = stand_ins.cached(three, cache_seqlens, new, *slots.values(), bounded=where != "cpu")
        kind = "cache" if page_table is None else "paged"
    elif any(x is not None for x in packing.values()):
        place, kind = stand_ins.packed(three, cu_seqlens_q, cu_seqlens_k), "varlen"
    else:
        place, kind = problems.dense_layout(*three), "dense"
    whole, score = check_types(mask, score)
    # A mask for a device that is not here has its tensors elsewhere.
    options["device"] = where if known is None else _home(whole)
    problem = problems.state(*three, place, kind, mask, score, **options)
    problem = replace(problem, device=where, k_bounded=over_cache and where != "cpu")
    elsewhere = None if known == devices.this_gpu() else known
    name, refusals = select.choose(problem, backend, elsewhere), select.refusals(problem, elsewhere)
    module = select.load(name)
    tiles = orders.sweeps(_counted(problem, whole), backend=name, mask=whole, device=elsewhere)[0].tiles
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
        copies=_copies(module, three),
        cast_from=given[0].dtype if q_like.dtype is not given[0].dtype else None,
        held=stored.left_out(whole, score),
        appended=new
        * problem.batch
        * problem.heads_k
        * (problem.dim + problem.dim_v)
        * q_like.dtype.itemsize,
        slots=k_like.shape[0] * k_like.shape[1] if over_cache else 0,
        device_name=known,
        elsewhere=elsewhere,
        layout=place,
        mask=whole,
        score=score,
    )


def _learned(score: Score) -> tuple[str, ...]:
    """Which of its tensors get a gradient."""
    tensors = {name: getattr(score, name) for name in ("bias", "alibi", "sink")}
    return tuple(name for name, x in tensors.items() if x is not None and x.requires_grad)


def _check_kind(over_cache: bool, packing: dict[str, Any], of_cache: dict[str, Any]) -> None:
    """Raise where arguments of two kinds of calls are mixed."""
    for name, value in (packing if over_cache else of_cache).items():
        if value is not None:
            what = (
                "given with cache_seqlens, expected one kind of call" if over_cache else "needs cache_seqlens"
            )
            raise ValueError(f"{name}: {what}")


def _check_cached(layout: str, dropout: float) -> None:
    if layout != "bshd":
        raise ValueError(f"layout: got {layout!r} with cache_seqlens, expected 'bshd'")
    if dropout:
        raise ValueError(f"dropout: got {dropout} with cache_seqlens, expected 0: a cache is for inference")


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
