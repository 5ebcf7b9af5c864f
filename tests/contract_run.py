"""One case of attention, run on one backend and held to the oracle: `check(target, Case(...))`.

A case is plain data and all its tensors follow from its seed, so one line repeats a failure:

    cd tests && python -c "from contract_run import *; reproduce(backend='cpu', mask='causal', layout='varlen', seed=3)"
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from math import inf, nan  # noqa: F401  (as a case's poison prints)
from unittest import mock

import torch
from torch import Tensor

import onchip
import oracle
from contract_cache import run_cache
from contract_masks import MASKS, Masked, Shape, full_truth
from contract_numerics import rooms
from contract_scores import SCORES, Scored
from onchip import select
from onchip.tiles import Tiles


@dataclass(frozen=True)
class Case:
    """What is computed. Lengths hold one entry a sequence: dense layouts need equal ones, caches equal q_lens."""

    mask: str = "none"
    score: str = "none"
    layout: str = "bshd"
    dtype: str = "float32"
    q_lens: tuple[int, ...] = (37, 37)
    k_lens: tuple[int, ...] = (71, 71)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    scale: float | None = None
    dropout: float = 0.0
    logits: float = 1.0  # q is multiplied by it
    poison: float | None = None  # what stands where nothing may be read; None leaves random numbers
    score_dtype: str | None = None  # of bias, alibi and sink; None is float32, or float64 beside it
    upstream: str = "both"  # gradients that come in: of "out", "lse" or "both"
    wanted: str | None = None  # the one tensor that requires grad; None is all
    backward: bool = True
    # Layout "cache" alone:
    append: int = 0  # keys of k_lens that the call appends
    page_size: int | None = None
    leftpad: bool = False
    batch_idx: bool = False
    rotary: str | None = None  # "half" or "interleaved"
    seed: int = 0

    def __str__(self) -> str:
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in changed)


@dataclass(frozen=True)
class Target:
    """A backend and what the contract asks of it.

    tile: around whose multiples lengths are chosen. forced: the backend is made to use this tile.
    refusals: reason (a pattern) -> a case that must be refused for it; no other refusal is accepted.
    """

    backend: str
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16", "float64")
    tile: tuple[int, int] = (16, 32)
    forced: bool = False
    dims: tuple[tuple[int, int], ...] = (
        (1, 1),
        (5, 5),
        (16, 16),
        (63, 63),
        (64, 64),
        (72, 72),
        (128, 128),
        (256, 256),
        (64, 128),
        (40, 3),
        (192, 128),
    )
    refusals: dict[str, Case] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[int, int]:
        """Of queries and keys: over two tiles and a tail."""
        return 2 * self.tile[0] + 5, 2 * self.tile[1] + 7

    @contextlib.contextmanager
    def in_use(self) -> Iterator[list[str | None]]:
        """Forces the tile, and yields the list of what the backend answers when asked whether it refuses."""
        module, answers = select.load(self.backend), []
        refuse = module.refuse

        def listen(problem):
            answers.append(refuse(problem))
            return answers[-1]

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(module, "refuse", listen))
            if self.forced:
                stack.enter_context(mock.patch.object(module, "tiles", return_value=Tiles(*self.tile)))
            yield answers


def check(target: Target, case: Case) -> dict[str, Tensor] | None:
    """Out, lse and gradients of the case agree with the oracle; or the backend refuses it for a reason that it lists.

    Returns what the backend gave, as `oracle.outputs_and_grads` names it; None where it refused.
    """
    line = f"reproduce(backend={target.backend!r}, "
    line += f"tile={target.tile}, " if target.forced else ""
    line += f"device={target.device!r}, " if target.device != "cpu" else ""
    try:
        with target.in_use() as answers:
            try:
                return run(target, case)
            except NotImplementedError as raised:
                error = raised
            reason = answers[-1] if answers else None
            assert reason, f"raised {error!r}, where its refuse() gives no reason"
            assert reason in str(error), f"the error {error} does not give the reason, {reason}"
            known = any(re.search(pattern, reason) for pattern in target.refusals)
            assert known, f"refused for a reason that the target does not list: {reason}"
            return None
    except Exception as error:
        raise AssertionError(f"{error}\nrepeat with: {line}{case})") from error


def reproduce(*, backend: str, device: str = "cpu", tile: tuple[int, int] | None = None, **case) -> None:
    """Repeat a failing case by the line that it printed."""
    target = Target(backend, device, tile=tile or (16, 32), forced=tile is not None)
    check(target, Case(**case))
    print("passed")


def run(target: Target, case: Case) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        shape = Shape(case.q_lens, case.k_lens, case.heads[0], target.device)
        masked, scored = MASKS[case.mask](shape), SCORES[case.score].make(shape)
        if case.layout == "cache":
            return run_cache(target, case, shape, masked, scored)
        packed = case.layout in ("varlen", "varlen_used")
        sequences = [sequence(case, shape, b, masked) for b in range(shape.batch)]
        if packed:
            return _run_varlen(target, case, shape, masked, scored, sequences)
        return _run_dense(target, case, shape, masked, scored, sequences)


def sequence(case: Case, shape: Shape, b: int, masked: Masked) -> dict[str, Tensor]:
    """q, k, v (length, heads, dim) of one sequence, poisoned where no visible pair reads them."""
    (heads_q, heads_k), (dim, dim_v) = case.heads, case.dims
    m, n = shape.q_lens[b], shape.k_lens[b]
    dtype = getattr(torch, case.dtype)
    q = case.logits * torch.randn(m, heads_q, dim, device=shape.device)
    k, v = (
        torch.randn(n, heads_k, dim, device=shape.device),
        torch.randn(n, heads_k, dim_v, device=shape.device),
    )
    q, k = (SCORES[case.score].apart(x) for x in (q, k))
    if case.poison is not None:
        seen = full_truth(masked, shape)[b]  # [heads_q, m, n]
        q[~seen.any(2).t()] = case.poison
        unused = ~seen.any(1).unflatten(0, (heads_k, -1)).any(1).t()
        k[unused] = v[unused] = case.poison
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}


def sequence_options(
    case: Case, masked: Masked, scored: Scored, keep: Tensor | None, extra: dict, probes: list | None = None
) -> Callable:
    """The oracle's keywords of each sequence: (b, q_len, k_len) -> dict.

    With `probes`, a zero leaf of its own is added to each sequence's scores and appended there.
    """

    def options(b, q_len, k_len):
        found = {"visible": masked.visible(b, q_len, k_len), "scale": case.scale, "dropout": case.dropout}
        found["keep"] = None if keep is None else keep[b : b + 1, :, :q_len, :k_len]
        found |= scored.truth(extra, b, q_len, k_len)
        if probes is not None:
            size = (1, case.heads[0], q_len, k_len)
            probes.append(
                torch.zeros(size, dtype=torch.float64, device=scored.table.device, requires_grad=True)
            )
            found["add"] = probes[-1] if found["add"] is None else found["add"] + probes[-1]
        return found

    return options


def survivors(case: Case, shape: Shape, backend: str = "reference") -> Tensor | None:
    """The dropout keep mask (batch, heads_q, seqlen_q, seqlen_k) that a backend draws, read off with v = identity."""
    if case.dropout == 0:
        return None
    q = torch.zeros(shape.batch, shape.seqlen_q, shape.heads_q, 4, device=shape.device)
    k = torch.zeros(shape.batch, shape.seqlen_k, shape.heads_q, 4, device=shape.device)
    v = torch.eye(shape.seqlen_k, device=shape.device)[None, :, None].expand(
        shape.batch, -1, shape.heads_q, -1
    )
    out = onchip.attention(q, k, v, dropout=case.dropout, seed=case.seed, backend=backend)
    return out.transpose(1, 2) != 0


# How dense tensors may lie in memory: each maps (batch, seqlen, heads, dim) to a view of the same values.
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "bshd": lambda x: x,
    "bhsd": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.stack([x, x + 1, x - 1], dim=-1).flatten(-2)[..., ::3],
    "last_stride_first": lambda x: x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0),
    "offset": lambda x: torch.nn.functional.pad(x, (1, 2, 1, 0, 3, 1))[:, 3:-1, 1:, 1:-2],
    "expanded": lambda x: x[:1, :, :1].expand(x.shape[0], -1, x.shape[2], -1),
}


def _run_dense(
    target: Target, case: Case, shape: Shape, masked: Masked, scored: Scored, sequences: list
) -> dict:
    inputs = {name: torch.stack([s[name] for s in sequences]) for name in "qkv"}
    view, keep = STRIDES[case.layout], survivors(case, shape)
    options = {"scale": case.scale, "dropout": case.dropout, "seed": case.seed if case.dropout else None}

    def call(q, k, v, **extra):
        q, k, v = (view(x) for x in (q, k, v))
        if case.layout == "bhsd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            options["layout"] = "bhsd"
        score = scored.score(extra)
        out, lse = onchip.attention(
            q, k, v, mask=masked.mask, score=score, return_lse=True, backend=target.backend, **options
        )
        return (out.transpose(1, 2) if case.layout == "bhsd" else out), lse

    def truth(q, k, v, probes=None, **extra):
        found = []
        own = sequence_options(case, masked, scored, keep, extra, probes)
        for b in range(shape.batch):
            rows = (view(x)[b : b + 1] for x in (q, k, v))
            found.append(oracle.attention(*rows, **own(b, shape.seqlen_q, shape.seqlen_k)))
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    return compare(case, call, truth, inputs, scored)


def _run_varlen(
    target: Target, case: Case, shape: Shape, masked: Masked, scored: Scored, sequences: list
) -> dict:
    used = case.layout == "varlen_used"
    lengths, inputs = pack(case, shape, sequences, used)
    keep = survivors(case, shape)
    options = {"scale": case.scale, "dropout": case.dropout, "seed": case.seed if case.dropout else None}

    def call(q, k, v, **extra):
        score = scored.score(extra)
        return onchip.attention_varlen(
            q,
            k,
            v,
            **lengths,
            mask=masked.mask,
            score=score,
            return_lse=True,
            backend=target.backend,
            **options,
        )

    def truth(q, k, v, probes=None, **extra):
        own = sequence_options(case, masked, scored, keep, extra, probes)
        return oracle.varlen(q, k, v, **lengths, options=own)

    unused = None
    if used and case.poison is not None:
        at = torch.arange(inputs["q"].shape[0], device=shape.device)
        ends = lengths["cu_seqlens_q"][:-1] + lengths["seqused_q"]
        unused = ~((at >= lengths["cu_seqlens_q"][:-1, None]) & (at < ends[:, None])).any(0)
    return compare(case, call, truth, inputs, scored, unused)


def pack(case: Case, shape: Shape, sequences: list, used: bool) -> tuple[dict, dict]:
    """Lengths and packed q, k, v; with `used`, unused rows follow each sequence."""
    lengths, inputs = {}, {}
    for side, lens, names in (("q", shape.q_lens, "q"), ("k", shape.k_lens, "kv")):
        spare = torch.randint(0, 4, (len(lens),)) if used else torch.zeros(len(lens), dtype=torch.int64)
        count = torch.tensor(lens, dtype=torch.int64)
        ends = torch.nn.functional.pad((count + spare).cumsum(0), (1, 0))
        lengths[f"cu_seqlens_{side}"] = ends.to(torch.int32).to(shape.device)
        lengths[f"seqused_{side}"] = count.to(torch.int32).to(shape.device) if used else None
        for name in names:
            rows = [
                torch.nn.functional.pad(s[name], (0, 0, 0, 0, 0, int(n))) for s, n in zip(sequences, spare)
            ]
            for row, n in zip(rows, spare):
                row[row.shape[0] - int(n) :] = 7.0 if case.poison is None else case.poison
            inputs[name] = torch.cat(rows)
    return lengths, inputs


def compare(
    case: Case, call: Callable, truth: Callable, inputs: dict, scored: Scored, unused: Tensor | None = None
) -> dict:
    """`call` is as good as torch in the same dtype, both held to float64; and changes none of its inputs.

    The upstream gradients of the `unused` rows of q are poisoned.
    """
    dtype = inputs["q"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    kind = wide if case.score_dtype is None else getattr(torch, case.score_dtype)
    tensors = inputs | {name: t.to(kind) for name, t in scored.tensors.items()}
    before = {name: t.clone() for name, t in tensors.items()}
    upstream = _upstream(case, inputs["q"])
    if unused is not None:
        for rows in upstream:
            if rows is not None:
                (rows if rows.dim() == 3 else rows.mT)[unused] = case.poison

    def apply(fn, to):
        held = {n: to(t) for n, t in tensors.items() if case.wanted not in (None, n)}
        leaves = {n: to(t) for n, t in tensors.items() if n not in held}
        return oracle.outputs_and_grads(lambda **t: fn(**held, **t), leaves, *upstream)

    exact, actual = apply(truth, torch.Tensor.double), apply(call, lambda t: t)
    plain = apply(truth, lambda t: t.to(wide) if t.dtype is torch.float64 else t)
    assert actual.keys() == exact.keys()
    doubles = {name: t.double() for name, t in tensors.items()}
    room = rooms(truth, doubles, upstream, exact, scored, case, dtype)
    for name, value in actual.items():
        expected = {"out": dtype, "lse": wide}.get(name) or tensors[name[1:]].dtype
        assert value.dtype == expected, f"{name}: {value.dtype}, expected {expected}"
        coarser = max(dtype, value.dtype, key=lambda d: torch.finfo(d).eps)
        oracle.assert_within(value, exact[name], plain[name], coarser, name, room.get(name, 0.0))
    for name, t in tensors.items():
        torch.testing.assert_close(
            t, before[name], rtol=0, atol=0, equal_nan=True, msg=f"the call changed {name}"
        )
    return actual


def _upstream(case: Case, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """dout and dlse. lse does not depend on v, so that v alone gets none of it."""
    kinds = {"both": ("out", "lse")}.get(case.upstream, (case.upstream,)) if case.backward else ()
    kinds = ("out",) if case.wanted == "v" else kinds
    dout = torch.randn(*q.shape[:-1], case.dims[1], device=q.device) if "out" in kinds else None
    dlse = torch.randn(q.shape[:-1], device=q.device).transpose(-1, -2) if "lse" in kinds else None
    return dout, dlse
