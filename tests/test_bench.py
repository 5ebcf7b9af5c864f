"""`onchip.bench`: cases as text and files, implementations checked and measured in turn, tables, files and plots."""

import json
import math
import sys
import types

import pytest
import torch

import onchip
from checks import ON_CPU
from contract_masks import MASKS, Shape, full_truth
from onchip import select
from onchip.bench import command, paper, peers, report, run, timing
from onchip.bench.cases import Case, mask_text, parse_mask
from onchip.bench.files import load, save
from onchip.bench.timing import Regime
from onchip.mask import Region
from onchip.tiles import Tiles

FAST = Regime(repeats=2, least=0.0)
SMALL = {"seqlen_q": 40, "heads_q": 2, "dim": 8}


def visible(mask, m, n):
    mask = onchip.Mask() if mask is None else mask
    return mask.allow(Region(torch.arange(1), 0, 1, 0, m, 0, n, m, n)).expand(1, 1, m, n)[0, 0]


# Cases.


@pytest.mark.parametrize(
    "text, built",
    [
        ("", lambda: None),
        ("full", lambda: None),
        ("causal", lambda: onchip.causal()),
        ('causal("top_left")', lambda: onchip.causal(align="top_left")),
        (
            "causal & (window(9, 0) | sinks(3))",
            lambda: onchip.causal() & (onchip.window(9, 0) | onchip.sinks(3)),
        ),
        ("window(None, 4) & chunked(size=7)", lambda: onchip.window(None, 4) & onchip.chunked(7)),
        ("prefix(5) | padding(2)", lambda: onchip.prefix(5) | onchip.padding(2)),
        ("documents(4)", lambda: onchip.documents(cu_seqlens=torch.tensor([0, 15, 30, 45, 60]))),
        ("documents(7, 50, 3)", lambda: onchip.documents(cu_seqlens=torch.tensor([0, 7, 57, 60]))),
    ],
)
def test_masks_from_text(text, built):
    assert torch.equal(visible(parse_mask(text, 50, 60), 50, 60), visible(built(), 50, 60))


@pytest.mark.parametrize("density", [0.25, 0.5, 1.0])
def test_random_blocks(density):
    """As dense as asked in every row of blocks, and the same each time."""
    seen = visible(parse_mask(f"blocks({density}, 8)", 64, 64), 64, 64)
    blocks = seen.view(8, 8, 8, 8).permute(0, 2, 1, 3).flatten(2)
    assert (blocks.all(2) == blocks.any(2)).all() and (blocks.all(2).sum(1) == round(8 * density)).all()
    assert torch.equal(seen, visible(parse_mask(f"blocks({density}, 8)", 64, 64), 64, 64))
    for name in ("local_global(8)", "butterfly(8)"):
        assert 0 < visible(parse_mask(name, 60, 50), 60, 50).float().mean() < 1


@pytest.mark.parametrize(
    "text, match",
    [
        ("causl", "cannot read 'causl'"),
        ("causal &", "cannot read"),
        ("causal + causal", "cannot read"),
        ("__import__('os')", "cannot read"),
        ("window(1 + 1, 0)", "not a number"),
        ("window(x, 0)", "not a number"),
        ("window(3)", "window in"),
        ("window(-1, 0)", "window: left"),
        ("blocks(2.0)", "density.*2.0"),
        ("documents(0)", "documents.*0"),
        ("documents(99)", "documents.*99"),
        ("documents()", r"documents: got \[\]"),
        ("documents(20, 31)", "documents.*20, 31.*add up"),
        ("documents(20, 30.0)", "documents.*30.0.*ints"),
        ("documents(count=2)", "documents in .* got an unexpected keyword"),
        ("blocks()", "blocks in 'blocks\\(\\)': missing 1 required"),
        ("blocks(0.5, 0)", "tile.*0"),
        ("blocks(0.5, -3)", "tile.*-3"),
        ("blocks(0.5, 2.5)", "tile.*2.5"),
        ("butterfly(0)", "tile.*0"),
        ("local_global(0)", "tile.*0"),
    ],
)
def test_wrong_masks(text, match):
    with pytest.raises(ValueError, match=match):
        Case(mask=text, seqlen_q=50)


def test_wrong_cases():
    for wrong, match in (
        ({"seqlen_q": 0}, "seqlen_q.*0"),
        ({"heads_k": 1.5}, "heads_k.*1.5"),
        ({"dtype": "int8"}, "dtype.*int8"),
        ({"what": "sideways"}, "what.*sideways"),
        ({"lengths": (3, -1)}, r"lengths.*3, -1"),
        ({"lengths": (0, 0)}, "lengths.*0, 0"),
        ({"lengths": 5}, "lengths.*5"),
        ({"lengths": (3, 4), "lengths_k": (5,)}, "lengths_k.*1.*2"),
        ({"softcap": -1.0}, "softcap.*-1"),
        ({"dropout": 2}, "dropout.*2"),
        ({"dropout": "x"}, "dropout.*x"),
        ({"mask": 5}, "mask.*5"),
        ({"cache": True, "what": "both"}, "cache"),
    ):
        with pytest.raises(ValueError, match=match):
            Case(**wrong)


def test_a_mask_s_text_is_the_mask():
    """Every mask without tensors goes through a file; the others are refused with their reason."""
    shape = Shape((45,), (70,))
    written = set()
    for name, build in MASKS.items():
        masked = build(shape)
        mask = onchip.Mask() if masked.mask is None else masked.mask
        if mask.tensors() or "where" in repr(mask):
            with pytest.raises(ValueError, match="holds a tensor"):
                mask_text(mask)
            continue
        written.add(name)
        assert torch.equal(
            visible(parse_mask(mask_text(mask), 45, 70), 45, 70), full_truth(masked, shape)[0][0]
        )
    assert written >= {
        "none",
        "causal",
        "top_left",
        "window_both",
        "chunked",
        "prefix_int",
        "streaming",
        "or_of_bands",
    }


def test_cases_of_files(tmp_path):
    cases = [
        Case(name="a", mask="causal & window(9, None)", dtype="bf16", what="both", softcap=3.0),
        Case(lengths=(3, 5), dropout=0.1, dim_v=8),
        Case(seqlen_q=1, seqlen_k=99, cache=True, heads_k=2, calls=7),
    ]
    save(cases, tmp_path / "cases.json")
    assert load(tmp_path / "cases.json") == cases
    (tmp_path / "named.yaml").write_text("first: {seqlen_q: 64, mask: causal}\nsecond:\n  dtype: fp16\n")
    assert load(tmp_path / "named.yaml") == [
        Case(name="first", seqlen_q=64, mask="causal"),
        Case(name="second", dtype="float16"),
    ]
    (tmp_path / "named.yaml").write_text("first: &a {dim: 32}\nsecond: {<<: *a, dim: 8}\nthird: {<<: *a}\n")
    assert [(case.name, case.dim) for case in load(tmp_path / "named.yaml")] == [
        ("first", 32),
        ("second", 8),
        ("third", 32),
    ]


@pytest.mark.parametrize(
    "name, text, match",
    [
        ("a.json", "{", "a.json"),
        ("a.json", "3", "list of cases"),
        ("a.json", "[]", "list of cases"),
        ("a.json", '[{"seqlen": 3}]', "case 0 has seqlen, expected of .*seqlen_q"),
        ("a.json", '[{}, {"mask": "x"}]', "case 1: mask"),
        ("a.yaml", "a: [", "a.yaml"),
        ("a.yaml", "a: {seqlen_q: 8}\nb: 3", "list of cases, or names"),
        ("a.json", '{"one": {}, "two": {}, "one": {"dim": 8}}', "a.json: 'one' is given twice"),
        ("a.json", '[{"dim": 8, "dim": 16}]', "a.json: 'dim' is given twice"),
        ("a.yaml", "one: {dim: 8}\ntwo:\none:\n  dim: 16\n", "a.yaml: 'one' is given twice"),
        ("a.yml", "- dim: 8\n  dim: 16\n", "a.yml: 'dim' is given twice"),
    ],
)
def test_wrong_files(tmp_path, name, text, match):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=match):
        load(tmp_path / name)


def test_sizes_from_flags():
    sizes = {"heads_q": 2, "dim": 8}
    found = command.cases(None, seqlens="16,32", masks=["causal", "full"], what="both", **sizes)
    assert [(c.seqlen_q, c.mask) for c in found] == [
        (16, "causal"),
        (32, "causal"),
        (16, "full"),
        (32, "full"),
    ]
    (decode,) = command.cases(None, seqlens="64", masks=[], what="decode", **sizes)
    assert (decode.seqlen_q, decode.k_len, decode.cache) == (1, 64, True)
    with pytest.raises(ValueError, match="--seqlen.*many"):
        command.cases(None, seqlens="many", masks=[], what="both", **sizes)
    with pytest.raises(ValueError, match="--pass.*sideways"):
        command.cases(None, seqlens="8", masks=[], what="sideways", **sizes)


# Timing.


def test_every_call_has_its_turn(monkeypatch):
    order = []
    clock = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: order.append(seconds))
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    rounds = []
    times = timing.measure(calls, "cpu", Regime(repeats=3, pause=0.5, least=0.0), rounds.append)
    assert order[:6] == list("aabbcc")  # warm up, and how many calls to measure at once
    assert [x for x in order[6:] if x != 0.5] == list(
        "aabbccbbccaaccaabb"
    )  # a pause, one to wake, one measured
    assert order[6:].count(0.5) == 9 and rounds == [1, 2, 3]
    assert all(t.samples == [1.0] * 3 and t.median == 1.0 and t.spread == 0.0 for t in times.values())
    assert timing.Times([1.0, 2.0, 3.0, 4.0, 5.0]).median == 3.0
    assert timing.Times([2.0, 4.0]).spread == pytest.approx(1 / 3)
    assert timing.measure({}, "cpu", FAST) == {}


# Runs.

WORKLOADS = {
    "causal": Case(**SMALL, mask="causal", what="both"),
    "grouped": Case(**SMALL, heads_k=1, dim_v=16, dtype="bf16", mask="window(9, 2)", what="backward"),
    "longer keys": Case(**SMALL, seqlen_k=70, mask="causal"),
    "packed": Case(lengths=(20, 3, 40), heads_q=2, dim=8, mask="causal", what="both"),
    "decode": Case(batch=2, seqlen_q=1, seqlen_k=60, heads_q=4, heads_k=2, dim=8, cache=True),
    "dropout": Case(**SMALL, dropout=0.2, what="both"),
    "softcap": Case(**SMALL, softcap=4.0, mask="blocks(0.5, 8)"),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_run_checks_and_times_every_implementation(name):
    """All that are on a CPU but flex, which compiles; those that cannot run the case say why."""
    case = WORKLOADS[name]
    impls = ["onchip", "onchip-reference", "sdpa-flash", "sdpa-math", "standard"]
    rounds = []
    rows = run.run([case], impls, "cpu", FAST, lambda *told: rounds.append(told))
    steps = ["forward", "backward"] if case.what == "both" else [case.what]
    for impl in impls:
        own = [row for row in rows if row.impl == impl]
        if own[0].note:
            assert not impl.startswith("onchip"), own[0].note
            continue
        assert [row.step for row in own] == steps
        for row in own:
            assert row.seconds > 0 and row.spread >= 0 and row.ok and row.tflops > 0 and row.floor > 0
            if case.dropout and not impl.startswith("onchip"):
                assert row.error is None and row.checked == "other random bits"
            else:
                assert 0 < row.error < 16 and "8 rows" in row.checked
                assert ("gradients" in row.checked) == (case.what != "forward")
    timed = {row.impl for row in rows if row.seconds}
    assert timed >= {"onchip", "onchip-reference"} | (set() if case.lengths else {"standard"})
    assert rounds[-1][1:] == (FAST.repeats, FAST.repeats)


def test_implementations_agree_with_each_other():
    """The same tensors in, the same numbers out, in the same order of dims."""
    case = Case(batch=2, seqlen_q=20, seqlen_k=33, heads_q=4, heads_k=2, dim=8, dim_v=8, mask="causal")
    given = peers.inputs(case, "cpu")
    outs = [
        peers.peer(name).forward(given)(given.q, given.k, given.v)
        for name in ("onchip", "sdpa-flash", "sdpa-math", "standard")
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=1e-5, rtol=1e-5)


def test_a_wrong_result_is_seen(monkeypatch):
    module = select.load(ON_CPU)
    plain = module.forward

    def broken(*args):
        found = plain(*args)
        found.out[..., 0] *= 1.01
        return found

    monkeypatch.setattr(module, "forward", broken)
    rows = run.run([WORKLOADS["longer keys"]], ["onchip", "sdpa-math"], "cpu", FAST)
    assert {row.impl: row.ok for row in rows} == {"onchip": False, "sdpa-math": True}
    assert "WRONG" in text_of(report.table(rows))


def test_memory_of_standard_attention_is_quadratic():
    """Scores, scaled scores and weights, where a tiled loop takes a few tiles; the output comes on top."""
    case = Case(seqlen_q=1024, heads_q=1, dim=8)
    found = {row.impl: row.peak_memory for row in run.run([case], ["onchip", "standard"], "cpu", FAST)}
    matrix, out = 4 * 1024 * 1024, 4 * 1024 * 8
    assert 2 * matrix <= found["standard"] <= 3 * matrix + 2 * out
    assert out <= found["onchip"]


@pytest.mark.parametrize("name", ["longer keys", "packed", "decode", "softcap"])
def test_memory_has_the_native_kernels_buffers(name):
    """They are none of torch's allocator's, whose count alone would leave out most of what the others show."""
    case = WORKLOADS[name]
    rows = run.run([case], ["onchip-native", "onchip-reference"], "cpu", FAST)
    if any(row.impl == "onchip-native" and row.note for row in rows):
        pytest.skip("no native kernels here")
    cached = {"cache_seqlens": case.k_len} if case.cache else {}
    score = None if case.softcap is None else onchip.Score(softcap=case.softcap)
    planned = onchip.plan(*case.shapes, mask=case.make_mask(), score=score, **case.packing(), **cached)
    q, k, v = (math.prod(shape) for shape in case.shapes)
    rows_q = q // case.dim
    results = {"forward": rows_q * (case.value_dim + 1), "backward": q + k + v}
    for row in rows:
        if row.impl == "onchip-native":
            assert row.peak_memory >= 4 * results[row.step] + planned.extra_memory[row.step] > 2**16


def test_a_failing_implementation_is_a_note(monkeypatch):
    def fail(given):
        raise RuntimeError("no such luck\nwith details")

    monkeypatch.setattr(peers, "PEERS", (*peers.PEERS, peers.Peer("luckless", lambda device: None, fail)))
    rows = run.run([WORKLOADS["longer keys"]] * 1, ["onchip", "luckless", "fa2"], "cpu", FAST)
    notes = report.notes(rows)
    assert "not luckless: RuntimeError: no such luck" in notes
    assert any(note.startswith("not fa2") for note in notes)
    with pytest.raises(ValueError, match="impl.*'fa9'.*onchip"):
        run.run([WORKLOADS["causal"]], ["fa9"], "cpu", FAST)


def test_flash_attn_is_called_as_it_wants_to_be(monkeypatch):
    """Windows, softcap and packed sequences in its own words; a stand-in module answers with our result."""
    seen = {}

    def flash_attn_func(q, k, v, **options):
        seen.update(options)
        return onchip.attention(q, k, v, mask=onchip.window(5, 0)), None

    def flash_attn_varlen_func(q, k, v, **options):
        seen.update(options)
        cu = options["cu_seqlens_q"]
        return onchip.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=onchip.causal())

    module = types.ModuleType("flash_attn")
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    given = peers.inputs(Case(**SMALL, dtype="bf16", mask="window(5, 0)"), "cpu")
    out = peers.peer("fa2").forward(given)(given.q, given.k, given.v)
    assert seen == {"window_size": (5, 0), "softcap": 0.0, "dropout_p": 0.0} and out.shape == given.q.shape
    given = peers.inputs(Case(lengths=(5, 9), heads_q=2, dim=8, dtype="bf16", mask="causal"), "cpu")
    out = peers.peer("fa2").forward(given)(given.q, given.k, given.v)
    assert seen["window_size"] == (-1, 0) and seen["max_seqlen_q"] == 9 and out.shape == given.q.shape
    for case in (
        Case(**SMALL),
        Case(**SMALL, dtype="fp16", mask="sinks(3)"),
        Case(**SMALL, dtype="fp16", mask='causal("top_left")'),
    ):
        with pytest.raises(peers.Unsupported):
            peers.peer("fa2").forward(peers.inputs(case, "cpu"))


def test_our_own_stand_in_is_no_peer(monkeypatch):
    module = types.ModuleType("flash_attn")
    module.flash_attn_func = types.FunctionType(
        (lambda q, k, v: q).__code__, {"__name__": "onchip.compat.flash_attn"}
    )
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    with pytest.raises(ImportError, match="onchip under another name"):
        peers.peer("fa2").forward(peers.inputs(Case(**SMALL, dtype="bf16"), "cpu"))


# Reports.


def text_of(renderable):
    from rich.console import Console

    console = Console(width=150)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


@pytest.fixture(scope="module")
def rows():
    cases = [
        Case(seqlen_q=n, heads_q=1, dim=8, mask=m)
        for n in (16, 32)
        for m in ("causal", "blocks(0.5, 8)", "blocks(0.25, 8)")
    ]
    return run.run(cases, ["onchip", "standard", "fa3"], "cpu", FAST)


def test_the_table(rows):
    text = text_of(report.table(rows))
    for part in ("b1 N32 h1 d8 causal", "onchip", "standard", "TFLOP/s", "roundings"):
        assert part in text
    assert len(report.groups(rows)) == 6
    assert report.notes(rows) == ["not fa3: flash_attn_interface is not installed"]


def test_files(rows, tmp_path):
    about = run.about("cpu", FAST)
    report.write_json(rows, about, tmp_path / "results.json")
    found = json.loads((tmp_path / "results.json").read_text())
    assert {"date", "device", "versions", "regime"} <= set(found) and len(found["results"]) == len(rows)
    first = next(r for r in found["results"] if r["seconds"])
    assert first["case"]["seqlen_q"] == 16 and first["tflops"] > 0
    paths = report.write_plots(rows, tmp_path / "plots")
    names = {path.name for path in paths}
    assert {"tflops-forward.png", "tflops-forward.svg", "density-forward.png", "density-forward.svg"} <= names
    for path in paths:
        body = path.read_bytes()
        assert body.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in body
    one = [row for row in rows if row.case.seqlen_q == 16 and row.case.mask == "causal"]
    assert report.write_plots(one, tmp_path / "none") == []


def test_the_paper_s_experiments(tmp_path):
    found = paper.experiments("cpu", FAST, small=True)
    standard, ours = found["table"]
    assert ours["gb"] < standard["gb"] and ours["gflop"] > standard["gflop"]  # it recomputes
    assert standard["ms"] > 0 and ours["ms"] > 0 and ours["error_roundings"] < 16
    traffic = [row["flash1_gb"] for row in found["blocks"]]
    assert traffic == sorted(traffic, reverse=True) and all(row["ms"] > 0 for row in found["blocks"])
    assert [row["density"] for row in found["sparse"]] == list(paper.DENSITIES)
    assert all(row["forward"] > 0 and row["backward"] > 0 for row in found["sparse"])
    assert json.loads(json.dumps(found)) is not None
    assert all("GFLOP" in title or "block" in title for title, _ in paper.tables(found))
    names = {path.name for path in paper.plots(found, tmp_path)}
    assert {"paper-block-traffic.png", "paper-block-time.svg", "paper-sparse.png"} <= names


@pytest.mark.parametrize("refused", [None, "triton is not installed"])
def test_block_sizes_on_a_gpu_are_triton_s(monkeypatch, refused):
    """Times of its kernel's tiles beside the traffic of those tiles; without it the model alone."""
    case = Case(seqlen_q=256, heads_q=1, dim=16)
    given = peers.inputs(case, "cpu")
    times = {64: (Tiles(64, 64), 1e-3), 128: (Tiles(64, 128), 2e-3), 256: (Tiles(32, 256), None)}
    monkeypatch.setattr(peers, "inputs", lambda case, device: given)
    monkeypatch.setattr(paper, "kernel_times", lambda call, sizes, *_: {n: times[n] for n in sizes})
    monkeypatch.setattr(select.load("triton"), "refuse", lambda problem: refused)
    rows = paper.block_sizes(case, "cuda", FAST, None)
    assert [row["block"] for row in rows] == [64, 128, 256]
    assert [row["ms"] for row in rows] == ([1.0, 2.0, None] if refused is None else [None] * 3)
    assert [row["queries"] for row in rows] == ([64, 64, 32] if refused is None else [64, 128, 256])
    ours = [row["onchip_gb"] for row in rows]
    assert (ours[2] > ours[0] == ours[1]) if refused is None else ours == sorted(ours, reverse=True)
