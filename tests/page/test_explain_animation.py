"""The animation of the committed page in headless Chromium: its counters, colours, player and sliders."""

import pytest
from explain_browser import number, slide, until

import onchip
from onchip import devices, orders, steps, traffic
from onchip.explain import build, figures, tiling
from onchip.layout import Dense
from onchip.tiles import Tiles

pytest_plugins = ["explain_browser"]
COLOURS = {"tile": (229, 72, 77), "scores": (217, 119, 6), "weights": (139, 92, 246), "out": (46, 158, 91)}


def choose(page, algorithm="standard", step="forward", seqlen=1024, dim=64, mask="full", tile=(64, 64)):
    page.locator(f"input[name=mode][value='{tiling.ALGORITHMS.index(algorithm)}']").check()
    page.select_option("#pass", label=step)
    page.select_option("#seqlen", str(seqlen))
    page.select_option("#dim", str(dim))
    page.select_option("#mask", label=mask)
    sizes = tiling.tile_sizes(seqlen)
    for selector in ("#tile-m", "#tile-n"):
        slide(page, selector, 0)  # so that the other side may grow
    for selector, size in zip(("#tile-m", "#tile-n"), tile):
        slide(page, selector, sizes.index(size))


def walked(algorithm="standard", step="forward", seqlen=1024, dim=64, mask="full", tile=(64, 64)):
    """(steps, totals) by the Python model, of the settings that `choose` takes."""
    template = next(template for name, template, _ in tiling.MASKS if name == mask)
    _, made = tiling.make_mask(mask, template, seqlen)
    problem, place = tiling.make_problem(seqlen, dim, made), Dense(1, seqlen, seqlen)
    algorithm, backend = tiling.model(algorithm, build.BACKEND)
    options = {"tiles": Tiles(*tile), "backend": backend}
    model = traffic.count(problem, place, made, algorithm, step, **options)
    return list(steps.walk(problem, place, made, algorithm, step, **options)), model


SETTINGS = [
    {},
    {"algorithm": "standard", "step": "backward", "mask": "causal", "tile": (128, 256)},
    {"algorithm": "flash1", "mask": "window and sinks", "tile": (32, 64)},
    {"algorithm": "flash1", "step": "backward", "dim": 128, "mask": "butterfly"},
    {"algorithm": "flash2", "mask": "dense", "seqlen": 512, "tile": (128, 32)},
    {"algorithm": "flash2", "step": "backward", "mask": "documents", "seqlen": 2048},
    {"algorithm": "onchip", "mask": "padding", "dim": 128, "seqlen": 2048, "tile": (128, 64)},
    {"algorithm": "onchip", "step": "backward", "mask": "where", "tile": (64, 128)},
    {"algorithm": "hopper", "mask": "causal window", "tile": (128, 128)},
    {"algorithm": "hopper", "step": "backward", "mask": "prefix", "seqlen": 512},
]


def test_counters_end_at_the_model(visit):
    page = visit()
    for chosen in SETTINGS:
        choose(page, **chosen)
        found, model = walked(**chosen)
        assert number(page, "#read") == number(page, "#written") == 0, chosen
        page.click("#last")
        assert (number(page, "#read"), number(page, "#written")) == (model.reads, model.writes), chosen
        assert f"{model.reads:,} read, {model.writes:,} written" in page.inner_text("#model")
        assert page.inner_text("#scrub-said") == f"{len(found):,} of {len(found):,}"
        rows = page.locator("#tensors .count").all_inner_texts()
        assert len(rows) == len([t for t in model.tensors.values() if t.loads or t.stores]), chosen


def test_counters_on_the_way(visit):
    page = visit()
    chosen = {"algorithm": "flash1", "mask": "causal"}
    choose(page, **chosen)
    found, _ = walked(**chosen)

    def at(step):
        expected = (0, 0) if step == 0 else (found[step - 1].read, found[step - 1].written)
        assert (number(page, "#read"), number(page, "#written")) == expected, step
        assert page.inner_text("#scrub-said") == f"{step} of {len(found)}"

    for selector, step in (
        ("#next", 1),
        ("#next", 2),
        ("#next", 3),
        ("#back", 2),
        ("#first", 0),
        ("#back", 0),
    ):
        page.click(selector)
        at(step)
    for step in (50, 7, len(found), 0, 33):
        slide(page, "#scrub", step)
        at(step)
    said = page.inner_text("#step-said")
    step = found[32]
    assert f"tile row {step.m_block + 1}, column {step.n_block + 1}: reads" in said and " Q 4,096," in said
    page.focus("#scrub")
    page.keyboard.press("ArrowRight")
    at(34)
    page.click("#last")
    page.click("#next")
    at(len(found))


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_play_pause_and_speed(visit, motion):
    page = visit(reduced_motion=motion)
    choose(page, algorithm="flash2", mask="butterfly")
    page.select_option("#speed", "8")
    assert page.inner_text("#play") == "Play"
    page.click("#play")
    assert page.inner_text("#play") == "Pause" and page.get_attribute("#step-said", "aria-live") == "off"
    until(page, "Number(document.getElementById('scrub').value) >= 2")
    page.click("#play")
    assert page.inner_text("#play") == "Play" and page.get_attribute("#step-said", "aria-live") == "polite"
    stopped = page.input_value("#scrub")
    page.wait_for_timeout(400)
    assert page.input_value("#scrub") == stopped
    page.select_option("#speed", label="all in 6 s")
    slide(page, "#scrub", int(page.get_attribute("#scrub", "max")) - 3)
    page.click("#play")
    until(page, "document.getElementById('play').textContent === 'Play'")
    assert page.input_value("#scrub") == page.get_attribute("#scrub", "max")
    page.click("#play")  # again from the start
    until(page, "Number(document.getElementById('scrub').value) < 20")
    page.click("#play")


def pixel(page, x, y):
    """The colour at a share of the matrix's canvas."""
    return tuple(
        page.evaluate(
            """([x, y]) => { const from = document.getElementById('matrix'), to = document.createElement('canvas');
            to.width = to.height = 1;
            const c = to.getContext('2d', {willReadFrequently: true});
            c.drawImage(from, Math.floor(x * from.width), Math.floor(y * from.height), 1, 1, 0, 0, 1, 1);
            return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3); }""",
            [x, y],
        )
    )


def in_tile(page, m, n, tiles=16, edge=0.0):
    """A point in tile (m, n), in its middle or near its border."""
    margin = 0.09
    across = 1 - margin - 0.004
    return pixel(page, *(margin + across * (i + 0.5 + edge) / tiles for i in (n, m)))


def test_colours(visit):
    page = visit(color_scheme="light")
    choose(page)
    slide(page, "#scrub", 20)
    assert in_tile(page, 1, 3, edge=0.33) == COLOURS["tile"] and in_tile(page, 1, 3) == COLOURS["scores"]
    assert in_tile(page, 0, 5) == COLOURS["scores"] and in_tile(page, 8, 8) == (255, 255, 255)
    slide(page, "#scrub", 256 + 40)
    assert in_tile(page, 0, 5) == COLOURS["weights"] and in_tile(page, 9, 5) == COLOURS["scores"]
    page.click("#last")
    assert in_tile(page, 0, 5) == COLOURS["weights"]
    assert COLOURS["out"] in [pixel(page, x / 1000, 0.5) for x in range(20, 90)]
    choose(page, algorithm="onchip", mask="causal")
    page.click("#last")
    colours = {in_tile(page, m, n) for m in range(15) for n in range(15)}
    assert not colours & {COLOURS["scores"], COLOURS["weights"]}  # no score was ever written


def test_sliders_end_where_sram_is_full(visit):
    page = visit()
    for name, dim, seqlen in (
        ("MI300X", 128, 1024),
        ("RTX 4090", 64, 1024),
        ("A100", 128, 512),
        ("B200", 64, 2048),
    ):
        page.select_option("#device", name)
        choose(page, seqlen=seqlen, dim=dim, tile=(tiling.tile_sizes(seqlen)[0],) * 2)
        sizes, room = tiling.tile_sizes(seqlen), devices.device(name).unit_sram
        for other, mover, label in (
            ("#tile-m", "#tile-n", "#tile-n-said"),
            ("#tile-n", "#tile-m", "#tile-m-said"),
        ):
            slide(page, other, 0)
            slide(page, mover, 99)
            fits = [t for t in sizes if 2 * orders.tile_numbers(Tiles(sizes[0], t), dim, dim) <= room]
            assert number(page, label) == fits[-1], (name, mover)
            assert page.get_attribute(mover, "max") == str(len(fits) - 1), (name, mover)
            slide(page, mover, 0)
    page.select_option("#device", "B200")
    choose(page, tile=(256, 256))
    page.select_option("#device", "MI300X")
    tile = Tiles(number(page, "#tile-m-said"), number(page, "#tile-n-said"))
    assert 2 * orders.tile_numbers(tile, 64, 64) <= devices.device("MI300X").unit_sram
    assert "MI300X" in page.inner_text("#fits")


def test_a_page_of_ones_own_opens_on_the_problem(visit, tmp_path, monkeypatch):
    monkeypatch.setattr(tiling, "SEQLENS", (128,))
    monkeypatch.setattr(tiling, "MASKS", tiling.MASKS[:1])
    monkeypatch.setattr(figures, "LENGTHS", (256, 512))
    out = tmp_path / "page.html"
    build.write(out, seqlen=200, dim=80, mask="causal & window(20, 0)", cpu=False)
    page = visit(out)
    assert [page.input_value(f"#{name}") for name in ("seqlen", "dim", "mask")] == ["200", "80", "1"]
    assert "causal & window(20, 0)" in page.inner_text("#about-mask")
    page.click("#last")
    made = onchip.causal() & onchip.window(20, 0)
    model = traffic.count(
        tiling.make_problem(200, 80, made), Dense(1, 200, 200), made, "standard", tiles=Tiles(64, 64)
    )
    assert (number(page, "#read"), number(page, "#written")) == (model.reads, model.writes)
