"""`extra_memory` of a plan against what the Triton backend's passes hold at once, tensor by tensor."""

import dataclasses
import gc
import itertools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import onchip
from onchip import problem as problems, traffic
from onchip.backends import triton as backend
from onchip.backends.compiled import arguments, intervals
from onchip.backends.compiled.launch import Step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Held(TorchDispatchMode):
    """Notes after each operation which storages that it saw being made are still there, and their bytes."""

    def __init__(self):
        super().__init__()
        self.alive, self.notes, self.looks, self.sees = {}, [], True, True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        if self.looks and self.sees:
            gc.collect()  # the interpreter leaves cycles
        for x in tree_leaves(out):
            if self.sees and isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                self.alive[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        self.note()
        return out

    def note(self):
        self.alive = {ref: size for ref, size in self.alive.items() if not ref.expired()}
        if self.looks and self.sees:
            self.notes.append(dict(self.alive))

    def most(self, results) -> int:
        """Bytes that were there at once and were no result."""
        kept = {StorageWeakRef(x.untyped_storage()) for x in results if x is not None}
        return max((sum(n for ref, n in note.items() if ref not in kept) for note in self.notes), default=0)


def without(what, function, held):
    """The function, while which Held looks at nothing, or does not even see it."""

    def run(*args, **options):
        held.note()
        before = getattr(held, what)
        setattr(held, what, False)
        try:
            return function(*args, **options)
        finally:
            setattr(held, what, before)

    return run


def kept(mask) -> int:
    """Bytes of the lists and intervals that stay with a mask, which its own tensors are not."""
    own = {x.untyped_storage()._cdata for x in mask.tensors()}
    known = tree_leaves([[x, getattr(x, "attend", None)] for x in mask.cache.values()])
    found = tree_leaves([x.rest if isinstance(x, Step) else x for x in known])
    storages = {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in found if isinstance(x, torch.Tensor)
    }
    return sum(size for address, size in storages.items() if address not in own)


def held_by(run, results, mask, monkeypatch):
    """(bytes that a pass holds at once, its results); what stays with the mask is made before."""
    mask.cache.clear()
    run()
    staying, held = kept(mask), Held()
    gc.freeze()  # what is there already needs no look after each operation: a collection takes a tenth
    try:
        with monkeypatch.context() as patch:
            on_the_way_to_intervals = (intervals, "rows"), (arguments, "mask_function")
            for module, name in on_the_way_to_intervals:
                patch.setattr(module, name, without("looks", getattr(module, name), held))
            patch.setattr(Step, "run", without("sees", Step.run, held))  # the interpreter's own copies
            with held:
                found = run()
    finally:
        gc.unfreeze()
    return held.most(results(found)) + staying, found


def half(*shape):
    return torch.randn(shape, device=DEVICE).half()


def dense(m, n, heads, heads_k, dim, batch=1, learned=(), **options):
    q, k, v = half(batch, m, heads, dim), half(batch, n, heads_k, dim), half(batch, n, heads_k, dim)
    return (q, k, v), options, learned


def scored(names, m=40, n=70, batch=2):
    tensors = {
        "bias": half(2, m, n),
        "alibi": torch.rand(2, device=DEVICE),
        "sink": torch.randn(2, device=DEVICE),
    }
    return dense(m, n, 2, 1, 16, batch, names, score=onchip.Score(**{name: tensors[name] for name in names}))


def cache(page):
    rows = (8, 64) if page else (2, 256)
    k = half(*rows, 2, 16)
    lengths = torch.tensor([250, 100], device=DEVICE)
    table = {"page_table": torch.arange(8, device=DEVICE, dtype=torch.int32).view(2, 4)} if page else {}
    return (half(2, 1, 4, 16), k, k), {"cache_seqlens": lengths, "num_splits": 3, **table}, ()


def packed(score=None, learned=()):
    cu = torch.tensor([0, 30, 30, 75], device=DEVICE, dtype=torch.int32)
    q, k = half(75, 2, 16), half(75, 1, 16)
    return (q, k, k), {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "score": score}, learned


def blocks():
    return onchip.block_sparse(torch.rand(2, 4, 3, 5, device=DEVICE) < 0.6, tile=(16, 16))


CASES = {
    "plain": lambda: dense(40, 70, 4, 4, 16, 2),
    "shared keys": lambda: dense(40, 70, 4, 2, 16, 2),
    "wide": lambda: dense(20, 30, 2, 1, 144),
    "wide blocks": lambda: dense(48, 80, 4, 2, 144, 2, mask=blocks()),
    "splits": lambda: cache(False),
    "splits of pages": lambda: cache(True),
    "a softcap": lambda: dense(40, 70, 4, 2, 16, score=onchip.Score(softcap=2.0)),
    "a bias": lambda: scored(("bias",)),
    "slopes": lambda: scored(("alibi",)),
    "a sink": lambda: scored(("sink",)),
    "a sink of one": lambda: scored(("sink",), batch=1),
    "all": lambda: scored(("bias", "alibi", "sink")),
    "blocks": lambda: dense(48, 80, 4, 2, 16, 2, mask=blocks()),
    "intervals": lambda: dense(
        48, 80, 4, 2, 16, 2, mask=onchip.padding(torch.tensor([9, 80], device=DEVICE))
    ),
    "alternatives": lambda: dense(48, 80, 4, 2, 16, 2, mask=onchip.causal() | onchip.prefix(7)),
    "packed": lambda: packed(),
    "packed slopes": lambda: packed(onchip.Score(alibi=torch.rand(2, device=DEVICE)), ("alibi",)),
    "packed sink": lambda: packed(onchip.Score(sink=torch.rand(2, device=DEVICE)), ("sink",)),
}


def here(layout):
    """A plan's layout, whose lengths are on the CPU, on the device."""
    fields = [getattr(layout, field.name) for field in dataclasses.fields(layout)]
    return type(layout)(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in fields))


@pytest.mark.parametrize("name", CASES)
def test_triton_s_passes_hold_what_is_counted(name, monkeypatch):
    tensors, options, learned = CASES[name]()
    plan = onchip.plan(*tensors, **options, backend="triton")
    mask, score, layout = dataclasses.replace(plan.mask), plan.score, here(plan.layout)
    operands = problems.Operands(*tensors, layout, mask, score)

    def counted(step, needs=("q", "k", "v")):
        stated = plan.problem, plan.layout, mask, "onchip", step
        return traffic.count(*stated, score=score, needs=needs, backend="triton").extra_memory

    held, output = held_by(
        lambda: backend.forward(plan.problem, operands, plan.tiles), lambda out: out[:2], mask, monkeypatch
    )
    assert held == counted("forward")
    if plan.problem.layout in ("cache", "paged"):
        return
    out, lse, rest = output
    dout = torch.randn_like(out)
    lost = 0 if rest is None else rest.numel() * 4
    wanted = itertools.chain([("q", "k", "v", *learned), ("v",)], ((name,) for name in learned))
    for needs in wanted:
        saved = problems.Saved(out, lse, rest, frozenset(needs))
        run = lambda saved=saved: backend.backward(plan.problem, operands, saved, dout, None, plan.tiles)  # noqa: E731
        held, _ = held_by(run, lambda grads: grads, mask, monkeypatch)
        assert held + lost == counted("backward", needs), needs
