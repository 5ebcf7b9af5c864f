"""`onchip explain`: the numbers in the page are the traffic model's, and the committed copy is current."""

import json
import random
import re
from pathlib import Path

import pytest
import torch

import onchip
from onchip import cli, devices, orders, steps, traffic
from onchip.backends.triton import planning
from onchip.explain import build, figures, tiling
from onchip.layout import Dense
from onchip.tiles import Tiles

ROOT = Path(__file__).parent.parent
COPY = ROOT / "docs" / "explain.html"
AGAIN = "rebuild it: onchip explain --no-cpu --no-open --out docs/explain.html"


@pytest.fixture(scope="module")
def copy():
    """(index of the committed page's grid, its bytes, its other numbers)."""
    numbers, data = build.unpack(COPY.read_text(encoding="utf-8"))
    return numbers.pop("grid"), data, numbers


@pytest.fixture
def small(monkeypatch):
    """A page of few settings, built in a second."""
    monkeypatch.setattr(tiling, "SEQLENS", (128,))
    monkeypatch.setattr(tiling, "DIMS", (64,))
    monkeypatch.setattr(tiling, "MASKS", tiling.MASKS[:2])
    monkeypatch.setattr(figures, "LENGTHS", (256, 512))


def decoded(index, data, key, dim):
    """A run as the page reads it: [(phase, m | None, n | None, loads, stores)], with its totals."""
    order, moves, totals = index["runs"][key]
    d = index["dims"].index(dim)
    start, length = index["orders"][order]
    found, m, n = [], 0, 0
    for i in range(start, start + length, 3):
        m, n = (m + data[i]) % 256, (n + data[i + 1]) % 256
        phase, loads, stores = index["moves"][moves[d]][data[i + 2]]
        found.append((phase, m - 1 if m else None, n - 1 if n else None, dict(loads), dict(stores)))
    return found, totals[d]


def settings(index, count):
    """Some of the page's settings, drawn afresh: (key, seqlen, mask number, tiles, algorithm, pass)."""
    keys = random.Random(torch.initial_seed()).sample(sorted(index["runs"]), count)
    return [(key, *map(int, key.split(","))) for key in keys]


def assert_as_walked(index, data, backend, count):
    names = {name: template for name, template, _ in tiling.MASKS}
    for key, seqlen, number, m, n, a, p in settings(index, count):
        mask_name, _, texts = index["masks"][number]
        text, mask = tiling.make_mask(mask_name, names[mask_name], seqlen)
        assert texts.get(str(seqlen), texts.get(seqlen)) == text
        dim = index["dims"][len(key) % len(index["dims"])]
        problem, place = tiling.make_problem(seqlen, dim, mask), Dense(1, seqlen, seqlen)
        algorithm, stands = tiling.model(index["algorithms"][a], backend)
        which, options = (algorithm, index["passes"][p]), {"tiles": Tiles(m, n), "backend": stands}
        found, totals = decoded(index, data, key, dim)
        walked = list(steps.walk(problem, place, mask, *which, **options))
        assert found == [(s.phase, s.m_block, s.n_block, s.load, s.store) for s in walked], (key, dim, AGAIN)
        model = traffic.count(problem, place, mask, *which, **options)
        assert totals == [model.reads, model.writes, model.pairs], (key, dim, AGAIN)
        assert (walked[-1].read, walked[-1].written) == tuple(totals[:2])
        start, length = index["maps"][index["kinds"][f"{seqlen},{number},{m},{n}"]]
        kinds = steps.kinds(problem, place, mask, Tiles(m, n))
        assert list(data[start : start + length]) == [kind for row in kinds for kind in row], (key, AGAIN)


def test_the_copy_is_of_this_code(copy):
    """Its steps, kinds and totals are those of the algorithms as they are now."""
    index, data, numbers = copy
    assert index["masks"] == [
        [name, about, {str(n): tiling.make_mask(name, template, n)[0] for n in tiling.SEQLENS}]
        for name, template, about in tiling.MASKS
    ], AGAIN
    assert len(index["runs"]) == len(tiling.MASKS) * 5 * 2 * sum(
        len(tiling.tile_sizes(n)) ** 2 for n in tiling.SEQLENS
    )
    assert_as_walked(index, data, numbers["backend"], 60)


def test_the_copy_has_these_templates_and_figures(copy, monkeypatch):
    index, data, numbers = copy
    text = COPY.read_text(encoding="utf-8")
    packed = re.compile(r'(id="numbers"[^>]*>)[^<]*')  # deflated, which another zlib may do in other bytes
    fresh = build.document({**numbers, "grid": index}, data)
    assert packed.sub(r"\1", text) == packed.sub(r"\1", fresh), AGAIN
    # The tiles of a machine without a GPU, wherever this runs.
    monkeypatch.setattr(planning, "device_facts", lambda index: planning.Facts(9, 4, ""))
    now = json.loads(json.dumps(figures.figures(numbers["backend"], cpu=False)))
    assert numbers["backend"] == build.BACKEND and numbers == now, AGAIN
    assert index["sram"]["64"]["128,64"] == orders.tile_numbers(Tiles(128, 64), 64, 64)


def test_the_copy_is_one_small_file():
    text = COPY.read_text(encoding="utf-8")
    assert len(text.encode()) < build.LIMIT
    assert "default-src 'none'" in text
    outside = re.findall(r'(?:src|href|action)\s*=\s*["\'](?!#|data:)[^"\']*', text) + re.findall(
        r"url\(|@import|fetch\(|XMLHttp", text
    )
    assert not outside
    assert "Permission is hereby granted" in text  # uPlot's licence goes where its code goes
    assert not re.search(r"\{\{\w+\}\}", text)


def test_a_problem_of_ones_own(monkeypatch):
    monkeypatch.setattr(tiling, "SEQLENS", (128,))
    monkeypatch.setattr(tiling, "MASKS", (("full", "", "all"), ("yours", "causal & window(20, 0)", "mine")))
    index, data = tiling.grid("cpu", (128, 200), (64, 80), tiling.MASKS)
    assert_as_walked(index, data, "cpu", 20)


def test_hopper_s_kernel_is_played_beside_triton_s(copy):
    """Under a causal mask: as much is moved, from the last keys of a row to its first."""
    index, data, _ = copy
    assert index["algorithms"] == list(tiling.algorithms("triton"))
    number = [name for name, *_ in tiling.MASKS].index("causal")
    triton, hopper = (
        decoded(index, data, f"1024,{number},128,64,{index['algorithms'].index(name)},0", 64)
        for name in ("onchip", "hopper")
    )
    assert triton[1] == hopper[1] and [n for _, m, n, *_ in hopper[0] if m == 7] == list(range(15, -1, -1))
    assert hopper[0][0][1:3] == (7, 15) and triton[0][0][1:3] == (7, 0)
    assert "hopper" not in tiling.algorithms("cpu")


def test_masks_cover_the_library():
    texts = " ".join(tiling.make_mask(name, template, 1024)[0] for name, template, _ in tiling.MASKS)
    names = set(onchip.masks.__all__) - {"block_sparse"} | {"blocks", "local_global", "butterfly"}
    assert not {name for name in names if name not in texts}
    for name, template, _ in tiling.MASKS:
        for seqlen in (tiling.SHORTEST, 1000):
            _, mask = tiling.make_mask(name, template, seqlen)
            assert tiling.share(mask, seqlen, 64) > 0


@pytest.mark.parametrize(
    "n, sizes", [(64, [32, 64]), (1024, [32, 64, 128, 256]), (2048, [64, 128, 256]), (8192, [256])]
)
def test_tiles_to_choose_from(n, sizes):
    assert tiling.tile_sizes(n) == sizes


def test_steps_that_miss_the_model_are_an_error():
    problem, place = tiling.make_problem(128, 64, onchip.Mask()), Dense(1, 128, 128)
    options = {"tiles": Tiles(64, 64), "backend": "cpu"}
    order, table = tiling._walk(problem, place, onchip.Mask(), "flash2", "forward", Tiles(64, 64), "cpu")
    model = traffic.count(problem, place, onchip.Mask(), "flash2", "forward", **options)
    tiling._check(model, order, table)
    with pytest.raises(RuntimeError, match="flash2 forward"):
        tiling._check(model, order[3:], table)


def test_figures_are_the_model(copy):
    _, _, numbers = copy
    table = numbers["paper"]
    both = {name: sum(table[name][step]["bytes"] for step in orders.STEPS) for name in table}
    assert round(both["eager"] / 1e9, 2) == 40.27 and round(both["flash1"] / 1e9, 2) == 4.38
    for device in numbers["devices"]:
        known = devices.device(device["name"])
        model = figures.count(1024, 64, "flash2", "backward", "cpu", None, 64, 16).floor(known)
        assert table["flash2"]["backward"]["floors"][device["name"]] == [model.compute, model.memory]
        assert numbers["rooflines"][device["name"]]["ridge"] == known.rate(torch.float16) / known.bandwidth
    memory = numbers["memory"]
    assert memory["flash1"][0] > memory["standard"][0] > memory["flash1"][-1] > memory["bound"][-1]
    for row in numbers["sparse"]["rows"]:
        for step in orders.STEPS:
            assert row[step]["traffic"] == pytest.approx(row["blocks"], abs=0.02)


def test_the_package_s_records_are_the_benchmarks():
    """Byte by byte; each is shown."""
    names = {path.name for path in figures.MEASURED.iterdir()}
    assert names == {f"{name}.json" for name in (*(name for name, _ in figures.RUNS), "h200-traffic")}
    for name in names:
        recorded = (ROOT / "benchmarks" / "results" / name).read_bytes()
        assert (figures.MEASURED / name).read_bytes() == recorded, (
            f"copy {name} to {figures.MEASURED}; {AGAIN}"
        )


def test_bytes_that_are_called_measured_are_those_of_the_record(copy):
    """Of FlashAttention-2 and standard attention, as benchmarks/traffic.md has them."""
    record = json.loads((ROOT / "benchmarks" / "results" / "h200-traffic.json").read_text())["results"]
    rows = {row["impl"]: row for row in record if (row["case"], row["pass"]) == ("gpt2", "forward")}
    points = {p["label"]: p for p in copy[2]["points"] if p["bytes"] == "measured"}
    assert len(points) == 2
    for impl, label in (("sdpa-flash", "FlashAttention-2"), ("standard", "standard attention, PyTorch")):
        row = rows[impl]
        moved = row["read"] + row["written"]
        point = points[f"{label}, N = 1024, d = 64"]
        assert point["intensity"] == pytest.approx(row["flops"] / moved)
        text = (ROOT / "benchmarks" / "traffic.md").read_text()
        assert re.search(rf"GPT-2 medium \| {label.split(',')[0]} \| forward .*\| {moved / 1e9:.2f} \|", text)


@pytest.mark.parametrize("name", [name for name, _ in figures.RUNS])
def test_recorded_runs_are_the_benchmarks(name):
    recorded = figures.measured(name)
    tables = figures.run(name, "")["tables"]
    for row in recorded["results"]:
        if row["case"] in orders.STEPS:
            table = tables[f"{row['case']},{row['dim']},{'causal' if row['causal'] else 'full'}"]
            at = table["seqlen"].index(row["seqlen"])
            assert all(table[impl][at] == round(rate, 1) for impl, rate in row["tflops"].items())


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(("explain", *map(str, arguments)))
    return ended.value.code


def test_command_writes_and_opens(small, tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    out = tmp_path / "new" / "page.html"
    assert not run("--out", out, "-n", "200", "-d", "32", "-m", "chunked(64)")
    assert opened == [out.as_uri()] and str(out) in capsys.readouterr().out
    numbers, _ = build.unpack(out.read_text(encoding="utf-8"))
    grid = numbers["grid"]
    assert grid["seqlens"] == [128, 200] and grid["dims"] == [32, 64]
    assert grid["chosen"] == {"seqlen": 200, "dim": 32, "mask": 2}
    assert grid["masks"][2][0] == "yours" and grid["masks"][2][2]["200"] == "chunked(64)"
    assert numbers["devices"][-1]["name"] == "cpu"


def test_command_without_a_browser_or_the_cpu(small, tmp_path, monkeypatch):
    monkeypatch.setattr("webbrowser.open", lambda *_: pytest.fail("opened"))
    out = tmp_path / "page.html"
    assert not run("--out", out, "--no-open", "--no-cpu")
    numbers, _ = build.unpack(out.read_text(encoding="utf-8"))
    assert "cpu" not in [device["name"] for device in numbers["devices"]]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("-n", "63"), "seqlen: got 63, expected 64 to 8192"),
        (("-n", "8193"), "8193"),
        (("-d", "0"), "dim: got 0"),
        (("-d", "513"), "dim: got 513"),
        (("-m", "causl"), "causl"),
        (("-m", "window(-1, 0)"), "window"),
        (("-n", "200", "-m", "padding(150)"), "padding: got length 150, expected at most 128"),
    ],
)
def test_wrong_choices_are_one_line(small, tmp_path, capsys, arguments, words):
    assert run("--out", tmp_path / "page.html", "--no-open", "--no-cpu", *arguments) == 2
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_page_over_the_limit_is_refused(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "LIMIT", 1000)
    assert run("--out", tmp_path / "page.html", "--no-open", "--no-cpu") == 2
    assert "expected at most 1000" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
