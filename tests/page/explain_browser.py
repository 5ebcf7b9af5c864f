"""The committed page in headless Chromium: fixtures of `test_explain_page.py` and `test_explain_animation.py`.

Those import helpers from here before pytest loads the fixtures: PYTEST_DONT_REWRITE.
"""

import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

COPY = Path(__file__).parent.parent.parent / "docs" / "explain.html"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser():
    path = os.environ.get("ONCHIP_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.fail("no Chromium found: apt-get install chromium, or set ONCHIP_CHROMIUM to its path")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser):
    """Opens the page; afterwards nothing was complained about, and nothing but the file was asked for."""
    troubles, contexts = [], []

    def open_page(path=COPY, width=1200, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        here = (path.as_uri(), "about:blank")
        page.on("request", lambda request: request.url.split("#")[0] in here or troubles.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    if troubles:
        pytest.fail("\n".join(troubles))


def number(page, selector):
    return int(page.inner_text(selector).replace(",", ""))


def until(page, expression):
    """Waits for a JavaScript expression to hold; the page's own policy forbids `wait_for_function`'s eval."""
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never came true: {expression}")


def wide(page):
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def slide(page, selector, value):
    page.locator(selector).evaluate(
        "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }", str(value)
    )
