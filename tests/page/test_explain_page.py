"""The committed page in headless Chromium: every control does what it says, offline, at any width."""

import re

import pytest
import torch
from explain_browser import COPY, until, wide

from onchip import devices, online_softmax, orders
from onchip.explain import build

pytest_plugins = ["explain_browser"]


@pytest.mark.parametrize(
    "options",
    [
        {"color_scheme": "light"},
        {"color_scheme": "dark", "reduced_motion": "reduce"},
        {"width": 360, "device_scale_factor": 2, "has_touch": True},
    ],
)
def test_it_loads_and_fits(visit, options):
    page = visit(**options)
    assert wide(page) == 0 and page.is_hidden("#failed")
    for section in page.query_selector_all("details"):
        section.evaluate("e => { e.open = true; }")
    page.set_viewport_size({"width": 360, "height": 700})
    until(page, "[...document.querySelectorAll('.uplot')].every((chart) => chart.clientWidth < 360)")
    until(page, "document.documentElement.scrollWidth <= innerWidth")
    for chart in ("length", "memory", "roof", "sparse", "run"):
        assert page.locator(f"#{chart}-chart .uplot").count() == 1


def test_a_link_to_a_part_leads_there(visit):
    page = visit()
    page.goto("about:blank")
    page.goto(COPY.as_uri() + "#backward")
    page.wait_for_selector("html[data-ready]")
    until(page, "Math.abs(document.getElementById('backward').getBoundingClientRect().top) < 120")


def test_dark_is_dark(visit):
    light, dark = (visit(color_scheme=scheme) for scheme in ("light", "dark"))
    ground = [p.evaluate("getComputedStyle(document.body).backgroundColor") for p in (light, dark)]
    levels = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in ground]
    assert levels[0] > 700 > 150 > levels[1]
    dark.emulate_media(color_scheme="light")
    assert dark.evaluate("getComputedStyle(document.body).backgroundColor") == ground[0]


def test_the_device_changes_its_parts(visit):
    page = visit()
    seen = set()
    for name in devices.NAMES[:-1]:
        page.select_option("#device", name)
        parts = page.inner_text("#levels"), page.inner_text("#ratio"), page.inner_text("#costs")
        assert f"Least time on {name}" in parts[2]
        known = devices.device(name)
        flops = int(2 * known.rate(torch.float16) / known.bandwidth + 0.5)
        assert f"{flops:,} FLOPs" in parts[1]
        label = page.get_attribute("#roof-chart .uplot", "aria-label")
        assert name in label and str(round(known.rate(torch.float16) / known.bandwidth)) in label
        seen.add(parts)
    assert len(seen) == len(devices.NAMES) - 1
    page.select_option("#device", "A100")
    assert "onchip, Hopper kernel" not in page.locator("#roof-chart + details").text_content()
    page.select_option("#device", "H200")
    assert "onchip, Hopper kernel" in page.locator("#roof-chart + details").text_content()


def blocks(page):
    """The scores of each block, as the page has them."""
    return page.evaluate(
        """[...document.querySelectorAll('.block')].map(b => [...b.querySelectorAll('.score')]
        .map(s => Number(s.firstChild.textContent.replace('−', '-'))))"""
    )


def assert_summaries(page, texts=("own", "so-far")):
    """m and l in the page are those of onchip.online_softmax; the total is the whole row's."""
    so_far = online_softmax.summary([])
    for i, scores in enumerate(blocks(page)):
        own = online_softmax.summary([float(s) for s in scores])
        so_far = online_softmax.merge(so_far, own)
        for kind, (m, total) in zip(texts, (own, so_far)):
            shown = page.locator(f".block[data-block='{i}'] .{kind}").inner_text()
            greatest = "−∞" if m == -torch.inf else f"{float(m):g}".replace("-", "−")
            assert shown == f"m = {greatest}, ℓ = {float(total):.4f}", (i, scores)
    whole = online_softmax.summary([float(s) for scores in blocks(page) for s in scores])
    assert page.inner_text("#softmax-total").count(f"ℓ = {float(whole[1]):.4f}") == 2


def test_softmax_by_keyboard(visit):
    page = visit()
    start = blocks(page)
    assert_summaries(page)
    page.focus(".score >> nth=1")
    page.keyboard.press("ArrowRight")
    assert blocks(page) == [[1, 2], [5, 0, 3], [2, 4, 1]]
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("score 3 in block 2")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert blocks(page) == [[1, 2], [5, 0], [2, 4, 1, -1]]
    assert_summaries(page)
    assert "Score -1, block 3" in page.inner_text("#softmax-live")
    for _ in range(2):  # an empty block changes nothing
        page.focus(".block[data-block='1'] .score >> nth=0")
        page.keyboard.press("ArrowLeft")
    assert blocks(page)[1] == []
    assert_summaries(page)
    page.click("#softmax-mix")
    assert sorted(s for scores in blocks(page) for s in scores) == [-1, 0, 1, 1, 2, 2, 4, 5]
    assert_summaries(page)
    page.click("#softmax-reset")
    assert blocks(page) == start


def test_softmax_by_dragging(visit):
    page = visit()
    score, target = page.locator(".score >> nth=3"), page.locator(".block[data-block='2']")
    score.scroll_into_view_if_needed()
    at, to = score.bounding_box(), target.bounding_box()
    page.mouse.move(at["x"] + 9, at["y"] + 9)
    page.mouse.down()
    page.mouse.move(to["x"] + 30, to["y"] + 30, steps=4)
    assert "over" in target.get_attribute("class")
    page.mouse.up()
    assert blocks(page) == [[1, 3, 2], [0], [2, 4, 1, 5]]
    assert_summaries(page)
    at = page.locator(".score >> nth=0").bounding_box()  # dropped outside: it goes back
    page.mouse.move(at["x"] + 9, at["y"] + 9)
    page.mouse.down()
    page.mouse.move(2, at["y"] - 60, steps=3)
    page.mouse.up()
    assert blocks(page) == [[1, 3, 2], [0], [2, 4, 1, 5]]


def test_softmax_by_touch(visit):
    page = visit(width=360, has_touch=True)
    page.locator(".score >> nth=2").scroll_into_view_if_needed()
    at = page.locator(".score >> nth=2").bounding_box()
    to = page.locator(".block[data-block='1']").bounding_box()
    touch = page.context.new_cdp_session(page)

    def send(kind, *points):
        touch.send(
            "Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y} for x, y in points]}
        )

    start, end = (at["x"] + 9, at["y"] + 9), (to["x"] + 80, to["y"] + 80)
    send("touchStart", start)
    for i in range(1, 6):
        send("touchMove", tuple(a + (b - a) * i / 5 for a, b in zip(start, end)))
    send("touchEnd")
    assert blocks(page) == [[1, 3], [5, 0, 2], [2, 4, 1]]
    assert_summaries(page)


def test_the_other_choices(visit):
    numbers, _ = build.unpack(COPY.read_text(encoding="utf-8"))
    page = visit()
    for n, trips in numbers["trips"].items():
        page.select_option("#trips-n", n)
        total = trips["standard"]["reads"] + trips["standard"]["writes"]
        assert f"Together {total:,} numbers" in page.inner_text("#trips-said")
    shown = set()
    for choice in ("forward", "backward", "both"):
        page.select_option("#backward-pass", choice)
        shown.add(page.inner_text("#costs") + page.inner_text("#costs-said"))
    assert len(shown) == 3
    for step in orders.STEPS:
        page.select_option("#length-pass", step)
        cell = page.locator("#length-chart + details td").first.text_content()
        size = numbers["lengths"][step]["standard"][0]
        assert cell == (f"{size / 1e6:.3g} MB" if size >= 1e6 else f"{size / 1e3:.3g} kB")
    assert page.locator("#patterns figure").count() == len(numbers["sparse"]["patterns"])
    row = numbers["sparse"]["rows"][1]
    assert f"{row['ms']['forward']:.2f}" in page.inner_text("#sparse-table")


def test_the_results(visit):
    numbers, _ = build.unpack(COPY.read_text(encoding="utf-8"))
    page = visit()
    for i, run in enumerate(numbers["runs"]):
        page.select_option("#run", str(i))
        assert run["about"] in page.inner_text("#run-about")
        for key, table in [*run["tables"].items()][:: max(len(run["tables"]) // 3, 1)]:
            for selector, choice in zip(("#run-pass", "#run-dim", "#run-mask"), key.split(",")):
                page.select_option(selector, choice)
            impls = [name for name in numbers["series"] if name in table]
            cells = page.locator("#run-table td").all_inner_texts()
            assert cells == [
                str(int(table[name][j] + 0.5)) for j in range(len(table["seqlen"])) for name in impls
            ]
            bold = page.locator("#run-table td.best").all_inner_texts()
            assert len(bold) >= len(table["seqlen"])


def test_everything_has_a_name(visit):
    page = visit()
    nameless = page.evaluate(
        """[...document.querySelectorAll(
          'button, select, input, canvas:not(.uplot *), [role=img], [role=group], [role=region]')]
        .filter(e => !(e.labels?.length || e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')
          || (e.tagName === 'BUTTON' && e.textContent.trim()))).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert not nameless
    assert page.evaluate(
        "[...document.querySelectorAll('[aria-labelledby], [aria-describedby]')].every(e => "
        "document.getElementById(e.getAttribute('aria-labelledby') ?? e.getAttribute('aria-describedby')))"
    )
    reached = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    wanted = page.evaluate("[...document.querySelectorAll('select, button[id], input[id]')].map(e => e.id)")
    assert len(wanted) > 20 and "score" in reached
    assert not [name for name in wanted if name not in reached]


def test_an_old_browser_is_told_so(browser):
    page = browser.new_page()
    page.add_init_script("delete globalThis.DecompressionStream")
    page.goto(COPY.as_uri())
    page.wait_for_selector("#failed:not([hidden])")
    assert "too old" in page.inner_text("#failed")
    page.close()
