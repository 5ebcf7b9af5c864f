"""`watch` and `record`: what they see of a running model, that they find faults, and that they leave no trace."""

import importlib.util
import logging
import re
import sys
import threading

import pytest
import torch
from prometheus_client import REGISTRY
from torch.utils._python_dispatch import TorchDispatchMode

import onchip
from checks import ON_CPU, qkv
from onchip import autograd, observe, select, watching
from onchip.bench.cases import Case
from onchip.bench.files import load
from onchip.recording import record
from onchip.watching import watch


def test_what_is_counted():
    q, k, v = qkv(2, 33, 70, 4, 2)
    with watch(every=2) as seen:
        for _ in range(5):
            onchip.attention(q, k, v, mask=onchip.causal())
        packed = torch.randn(20, 4, 16)
        cu = torch.tensor([0, 5, 20])
        onchip.attention_varlen(
            packed, packed, packed, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=onchip.causal()
        )
        onchip.attention_with_cache(q[:, :1], k, v, cache_seqlens=torch.tensor([70, 3]))
    assert (seen.calls, seen.tokens, seen.checks, seen.failures) == (7, 5 * 66 + 20 + 2, 4, 0)
    assert seen.backends == {ON_CPU: 7} and seen.seconds > 0 and 0 < seen.worst < 16 and not seen.bad
    refused = [f"{name}: the tensors are on cpu; it runs on cuda" for name in ("hopper", "triton")]
    assert set(refused) <= set(seen.refusals) and all(reason in str(seen) for reason in refused)
    assert f"7 calls ({ON_CPU} 7)" in str(seen) and "4 checks, 0 failed" in str(seen)


def test_training_is_as_without_it():
    q, k, v = (x.requires_grad_() for x in qkv(1, 20, 20, 2))
    plain = torch.autograd.grad(onchip.attention(q, k, v, mask=onchip.causal()).sum(), (q, k, v))
    with watch(every=1):
        watched = torch.autograd.grad(onchip.attention(q, k, v, mask=onchip.causal()).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_nothing_is_left_behind():
    assert autograd.apply is observe._plain
    with pytest.raises(RuntimeError, match="inside"), watch(), record():
        assert autograd.apply is not observe._plain
        raise RuntimeError("inside")
    assert autograd.apply is observe._plain
    q, k, v = qkv(1, 8, 8, 1)
    onchip.attention(q, k, v)


def test_nan_is_named_by_its_first_row(caplog):
    q, k, v = qkv(2, 33, 33, 4)
    v[1, :, 2, 3] = float("nan")
    with watch(every=1) as seen, caplog.at_level(logging.ERROR, "onchip.watch"):
        onchip.attention(q, k, v)
        q[0, 5, 1, 0] = float("inf")
        onchip.attention(q, k, v)
        onchip.attention(q, k, v)
    assert seen.bad == {(1, 2, 0): 1, (0, 1, 5): 2}
    assert "(1, 2, 0)" in caplog.text and "(0, 1, 5)" in caplog.text


def test_nan_of_a_packed_sequence_is_named_by_the_sequence(caplog):
    q, k, v = (x[0] for x in qkv(1, 12, 12, 2))
    q[8, 1, 0] = float("nan")
    lengths = {name: torch.tensor([0, 5, 12]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    with watch(every=1) as seen, caplog.at_level(logging.ERROR, "onchip.watch"):
        onchip.attention_varlen(q, k, v, **lengths)
    assert seen.bad == {(1, 1, 3): 1} and "(1, 1, 3)" in caplog.text


@pytest.mark.parametrize("fault", ["out", "nan"])
def test_a_wrong_backend_is_found(monkeypatch, caplog, fault):
    module = select.load(ON_CPU)
    plain = module.forward

    def broken(*args):
        found = plain(*args)
        if fault == "out":
            found.out.mul_(1.001)
        else:
            found.out.fill_(float("nan"))
        return found

    monkeypatch.setattr(module, "forward", broken)
    with watch(every=1) as seen, caplog.at_level(logging.ERROR, "onchip.watch"):
        onchip.attention(*qkv(1, 40, 40, 2))
    assert seen.failures == 4 and "float64" in caplog.text
    assert seen.worst != seen.worst if fault == "nan" else seen.worst > 16


def test_a_change_of_backend_is_told(caplog):
    q, k, v = qkv(1, 8, 8, 1)
    with watch() as seen, caplog.at_level(logging.WARNING, "onchip.watch"):
        onchip.attention(q, k, v)
        onchip.attention(q, k, v)
        onchip.attention(q, k, v, backend="reference")
    assert seen.backends == {ON_CPU: 2, "reference": 1}
    assert re.search(f"changed from {ON_CPU} to reference", caplog.text) and len(caplog.records) == 1


def test_layers_of_two_kinds_do_not_flood_the_log(caplog):
    """Each change is told once, with the reason, however often it comes."""
    q, k, v = qkv(1, 8, 8, 1)
    with watch() as seen, caplog.at_level(logging.WARNING, "onchip.watch"):
        for _ in range(5):
            onchip.attention(q, k, v)
            onchip.attention(q, k, v, backend="reference")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and told[0].startswith(f"backend changed from {ON_CPU} to reference")
    assert told[1].startswith(f"backend changed from reference to {ON_CPU}: it is dense")
    assert seen.backends == {ON_CPU: 5, "reference": 5}


def test_every_nth_call():
    q, k, v = qkv(1, 8, 8, 1)
    with watch(every=3) as seen:
        for _ in range(7):
            onchip.attention(q, k, v)
    assert seen.checks == 3  # calls 1, 4 and 7
    for wrong in ({"every": 0}, {"rows": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*at least 1"), watch(**wrong):
            pass
    with pytest.raises(TypeError, match="every.*float"), watch(every=1.5):
        pass


def test_a_call_costs_little_beside_the_checks():
    """No look at a tensor's numbers, and no work that grows with the tensors, between two checks."""
    q, k, v = qkv(1, 8, 8, 1)
    with watch(every=10**6) as seen:
        onchip.attention(q, k, v)
        looked = []

        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                looked.append(func)
                return func(*args, **(kwargs or {}))

        class Grab:
            def called(self, *args):
                self.args = args

        grab = Grab()
        with observe.observing(grab):
            onchip.attention(q, k, v)
        with Mode():
            seen.called(*grab.args)
    assert {getattr(func, "__name__", "") for func in looked} <= {"__get__"}  # shapes alone


class Counting(TorchDispatchMode):
    """Operations, and the numbers that they write; views write none."""

    def __init__(self):
        super().__init__()
        self.operations = self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.operations += 1
        if isinstance(found, torch.Tensor) and not func.is_view:
            self.numbers += found.numel()
        return found


def of_a_check(batch, n, heads, dim, rows=4):
    """What one check of a call does, and the call's arguments as an observer sees them."""

    class Grab:
        def called(self, *args):
            self.args = args

    q, k, v = qkv(batch, n, n, heads, dim=dim)
    grab = Grab()
    with observe.observing(grab):
        onchip.attention(q, k, v, mask=onchip.causal())
    call, out, lse, _ = grab.args
    with Counting() as counted:
        watching.Watch(rows=rows)._check(call, out, lse)
    return counted, grab.args


def few_numbers(batch, n, heads, dim, rows=4):
    """A bound on what a check writes: a look at out, and of each row its queries, keys and values, and weights."""
    return 2 * batch * n * heads * dim + rows * (8 * n * 2 * dim + 32 * n)


@pytest.mark.parametrize("shape", [(1, 16, 1, 16), (2, 64, 2, 32), (1, 512, 4, 64), (3, 300, 2, 16)])
def test_a_check_is_of_few_rows(shape):
    """As many operations whatever the sizes, on numbers that grow as N x dim, where a call's grow as N x N."""
    counted, _ = of_a_check(*shape)
    assert counted.numbers <= few_numbers(*shape)
    assert counted.operations <= 4 * 180 + 40
    twice, _ = of_a_check(*shape, rows=8)
    assert twice.operations - counted.operations <= 4 * 180


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("n", [16, 128, 1024, 16384])
@pytest.mark.parametrize("heads, dim", [(1, 16), (1, 256), (16, 64)])
def test_checks_at_the_default_are_under_a_hundredth_of_the_calls(batch, n, heads, dim):
    """Numbers written by a check beside the multiplications of EVERY causal calls, whatever the sizes."""
    calls = watching.EVERY * batch * heads * (n * (n + 1) // 2) * 2 * dim
    assert few_numbers(batch, n, heads, dim) < 0.01 * calls


def test_the_default_checks_one_call_of_every(monkeypatch):
    checked = []
    monkeypatch.setattr(watching.Watch, "_check", lambda self, *args: checked.append(self.calls))
    _, args = of_a_check(1, 8, 1, 8)
    checked.clear()
    seen = watching.Watch()
    for _ in range(2 * watching.EVERY + 1):
        seen.called(*args)
    assert checked == [1, watching.EVERY + 1, 2 * watching.EVERY + 1] and watching.EVERY >= 1000


def entered_in(run):
    found = []
    sys.setprofile(lambda frame, event, arg: found.append(event) if "call" in event else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(found)


def test_between_two_checks_a_call_is_a_few_steps():
    """Functions entered, of Python and of C, for a problem that was met before: as many for any sizes."""
    counts = []
    for shape in ((1, 8, 1, 8), (2, 200, 4, 32)):
        _, args = of_a_check(*shape)
        seen = watching.Watch(every=10**9)
        seen.called(*args)
        counts.append(entered_in(lambda seen=seen, args=args: seen.called(*args)))
    assert counts[0] == counts[1] <= 5


def exported(name, **labels):
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_prometheus_counts_the_same():
    """While the block runs and after it, on top of the blocks before it."""

    def now():
        counts = [exported(f"onchip_{name}_total", backend=ON_CPU) for name in ("calls", "tokens", "seconds")]
        refused = exported("onchip_refusals_total", backend="triton")
        return [*counts, refused, exported("onchip_nonfinite_calls_total")]

    q, k, v = qkv(1, 8, 8, 1)
    v[0, 0, 0, 0] = float("inf")
    before = now()
    with watch(every=1) as seen:
        onchip.attention(q, k, v)
        inside = now()
        onchip.attention(q, k, v)
    one, two = ([x - y for x, y in zip(found, before, strict=True)] for found in (inside, now()))
    assert (one[:2], one[3:]) == ([1, 8], [1, 1]) and (two[:2], two[3:]) == ([2, 16], [1, 2])
    assert two[2] == pytest.approx(seen.seconds) and 0 < one[2] < two[2]


def test_prometheus_counts_nested_blocks_and_each_backend():
    names = [("onchip_calls_total", name) for name in (ON_CPU, "reference")]
    before = [exported(name, backend=backend) for name, backend in names]
    q, k, v = qkv(1, 8, 8, 1)
    with watch():
        onchip.attention(q, k, v)
        with watch():  # which counts for itself
            onchip.attention(q, k, v, backend="reference")
        onchip.attention(q, k, v)
    found = [exported(name, backend=backend) for name, backend in names]
    assert [x - y for x, y in zip(found, before, strict=True)] == [2, 2]


@pytest.fixture
def exporter():
    """As in a process that has not watched yet."""
    usual = watching.Exporter.made()
    REGISTRY.unregister(usual)
    watching.Exporter._made = None
    yield
    REGISTRY.unregister(watching.Exporter.made())
    watching.Exporter._made = usual
    REGISTRY.register(usual)


def test_prometheus_tells_the_greatest_error(monkeypatch, exporter):
    q, k, v = qkv(1, 40, 40, 1)
    with watch(every=1) as good:
        onchip.attention(q, k, v)
    assert exported("onchip_worst_roundings") == good.worst > 0
    module = select.load(ON_CPU)
    plain = module.forward
    for factor in (1.01, float("nan"), 1.0):

        def broken(*args, factor=factor):
            found = plain(*args)
            found.out.mul_(factor)
            return found

        monkeypatch.setattr(module, "forward", broken)
        with watch(every=1) as seen:
            onchip.attention(q, k, v)
        if factor == 1.01:
            assert exported("onchip_worst_roundings") == seen.worst > good.worst
    told = REGISTRY.get_sample_value("onchip_worst_roundings")
    assert told != told and seen.worst == seen.worst


class Asking(logging.Handler):
    """Asks for the counters at each line of the log, as one that pushes them would."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.found = []

    def emit(self, record):
        self.found.append(exported("onchip_calls_total", backend=ON_CPU))


@pytest.fixture
def asking():
    handler = Asking()
    watching.log.addHandler(handler)
    watching.log.setLevel(logging.INFO)
    yield handler
    watching.log.removeHandler(handler)
    watching.log.setLevel(logging.NOTSET)


def test_a_log_handler_may_ask_for_the_counters(asking):
    before = exported("onchip_calls_total", backend=ON_CPU)
    with watch(every=1):
        onchip.attention(*qkv(1, 8, 8, 1))
    assert [found - before for found in asking.found] == [1, 1]


def test_asking_and_counting_wait_for_nobody(asking):
    """Blocks within one another, handlers that ask, and threads that ask all the while."""
    q, k, v = qkv(1, 8, 8, 1)
    over = threading.Event()

    def ask():
        while not over.is_set():
            exported("onchip_calls_total", backend=ON_CPU)

    def call():
        with watch(every=1), watch(every=2):
            for _ in range(40):
                onchip.attention(q, k, v)

    threads = [threading.Thread(target=work, daemon=True) for work in (ask, ask, call, call)]
    for thread in threads:
        thread.start()
    for thread in threads[2:]:
        thread.join(60)
    over.set()
    for thread in threads[:2]:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(asking.found) >= 2 * (40 + 20)


def test_what_was_found_before_a_check_failed_is_told(monkeypatch, caplog):
    q, k, v = qkv(1, 8, 8, 1)
    v[0, 0, 0, 0] = float("nan")

    def fails(*args):
        raise MemoryError("no room for float64")

    monkeypatch.setattr(watching.exact, "row", fails)
    with caplog.at_level(logging.ERROR, "onchip.watch"), pytest.raises(MemoryError, match="no room"), watch():
        onchip.attention(q, k, v)
    assert "(0, 0, 0)" in caplog.text


def test_a_handler_that_fails_loses_no_other_line(caplog):
    class Failing(logging.Handler):
        def handle(self, record):
            if "off by one" in record.getMessage():
                raise OSError("full")

    handler = Failing()
    watching.log.addHandler(handler)
    try:
        q, k, v = qkv(1, 8, 8, 1)
        v[0, 0, 0, 0] = float("nan")
        with caplog.at_level(logging.INFO, "onchip.watch"), watch(every=1) as seen:
            seen._told.append((logging.ERROR, "off by one"))
            with pytest.raises(OSError, match="full"):
                onchip.attention(q, k, v)
            onchip.attention(q, k, v)
    finally:
        watching.log.removeHandler(handler)
    assert caplog.text.count("holds NaN or inf") == 2


def test_a_summary_while_others_count():
    """What is counted may grow meanwhile: a new refusal, a new backend."""
    seen, over = watching.Watch(), threading.Event()

    def grow():
        n = 0
        while not over.is_set():
            n += 1
            with seen._lock:
                seen.refusals[f"backend {n % 997}: reason {n}"] += 1
                if n % 997 == 0:
                    seen.refusals.clear()

    was = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(200):
            assert "refused" in str(seen)
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(was)


def test_first_blocks_of_many_threads_share_one_exporter(exporter):
    found = []

    def enter():
        barrier.wait()
        with watch():
            found.append(watching.Exporter._made)

    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len({id(made) for made in found}) == 1


def test_a_sum_of_blocks():
    q, k, v = qkv(1, 8, 8, 1)
    total = watching.Watch()
    for backend in (ON_CPU, "reference", ON_CPU):
        with watch(every=1) as seen:
            onchip.attention(q, k, v, backend=backend)
        total.add(seen)
    assert (total.calls, total.checks, total.tokens) == (3, 3, 24)
    assert total.backends == {ON_CPU: 2, "reference": 1} and total.backends["hopper"] == 0


def test_without_prometheus(monkeypatch):
    monkeypatch.setattr(watching.Exporter, "_made", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with watch(every=1) as seen:
        onchip.attention(*qkv(1, 8, 8, 1))
    assert seen.calls == 1 and watching.Exporter._made is None


def test_calls_of_other_threads_and_transforms():
    q, k, v = qkv(1, 8, 8, 1)
    with watch(every=1) as seen:
        threads = [threading.Thread(target=onchip.attention, args=(q, k, v)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.vmap(lambda x: onchip.attention(x, x, x))(torch.randn(2, 1, 8, 1, 4))
    assert seen.calls == 3


# Recording.


def test_recorded_workloads(tmp_path):
    q, k, v = (x.requires_grad_() for x in qkv(2, 33, 70, 4, 2, dim=8, dim_v=24))
    with record() as seen:
        for _ in range(3):
            onchip.attention(
                q, k, v, mask=onchip.causal() & onchip.window(9, None), score=onchip.Score(softcap=2.0)
            )
        with torch.no_grad():
            onchip.attention(q, k, v, dropout=0.1)
            onchip.attention_with_cache(q[:, :1], k, v, cache_seqlens=60, mask=onchip.causal())
        packed = torch.randn(20, 4, 16)
        cu = torch.tensor([0, 5, 5, 20])
        onchip.attention_varlen(packed, packed, packed, cu_seqlens_q=cu, cu_seqlens_k=cu)
    sizes = {"batch": 2, "seqlen_q": 33, "seqlen_k": 70, "heads_q": 4, "heads_k": 2, "dim": 8, "dim_v": 24}
    first, second, third, fourth = seen.cases
    assert first == Case(
        "call 0: b2 N33x70 h4/2 d8 window(9, 0)",
        **sizes,
        mask="window(9, 0)",
        softcap=2.0,
        what="both",
        calls=3,
    )
    assert second == Case("call 1: b2 N33x70 h4/2 d8 full", **sizes, dropout=0.1)
    assert third.cache and (third.seqlen_q, third.k_len, third.mask) == (1, 60, "window(None, 0)")
    assert fourth.lengths == (5, 0, 15) and not fourth.lengths_k
    seen.save(tmp_path / "cases.json")
    assert load(tmp_path / "cases.json") == seen.cases


def test_a_recording_says_what_it_left_out(tmp_path):
    q, k, v = qkv(1, 8, 8, 2)
    scores = {
        "alibi": torch.rand(2), "bias": torch.rand(1, 2, 8, 8), "sink": torch.rand(2), "mod": lambda s, *at: s * 2
    }  # fmt: skip
    with record() as seen:
        onchip.attention(q, k, v)
        for name, value in scores.items():
            onchip.attention(q, k, v, score=onchip.Score(**{name: value}))
    assert [case.without for case in seen.cases] == [(), *((name,) for name in scores)]
    assert all(f"without {name}" in case.label for case, name in zip(seen.cases[1:], scores, strict=True))
    seen.save(tmp_path / "cases.json")
    assert load(tmp_path / "cases.json") == seen.cases


def test_recorded_lengths_of_keys():
    packed, cache = torch.randn(20, 2, 8), torch.randn(2, 32, 2, 8)
    cu_q, cu_k = torch.tensor([0, 5, 20]), torch.tensor([0, 12, 20])
    with record() as seen:
        onchip.attention_varlen(packed, packed, packed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        onchip.attention_with_cache(cache[:, :1], cache, cache, cache_seqlens=torch.tensor([5, 30]))
        onchip.attention(packed[None, :0], packed[None], packed[None])  # nothing to measure
    first, second = seen.cases
    assert (first.lengths, first.lengths_k) == ((5, 15), (12, 8))
    assert second.cache and (second.lengths_k, second.k_len) == ((5, 30), 30)


def test_no_call_of_many_threads_is_lost():
    q, k, v = qkv(1, 2, 2, 1)
    was = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with watch(every=7) as seen, record() as recorded:
            work = lambda: [onchip.attention(q, k, v) for _ in range(50)]  # noqa: E731
            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(was)
    assert seen.calls == sum(seen.backends.values()) == 400 and seen.tokens == 800 and seen.checks == 58
    assert recorded.cases[0].calls == 400
