"""Slides, handouts and the book in Chromium: nothing is cut off, and nothing is asked of another machine."""

import json
import os
import random
import shutil
import threading
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import nbformat
import pytest
from leftovers import PROJECT, SESSION_VARIABLE
from reading_pages import build_book

from fsdp_helpers.__main__ import main
from fsdp_helpers.cli.lab import handouts, slides

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: `make test-browser` installs it")
Page = sync_api.Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the search path: `apt-get install chromium`"),
]
CHAPTERS = ("02_ddp_baseline", "03_fsdp", "04_fsdp_auto_wrap")
SHOTS = PROJECT / ".pytest_cache" / "browser"
A4_PX = {"width": 673, "height": 986}  # what the margins leave of 210 x 297 mm, at 96 pixels an inch
PHONE = {"width": 400, "height": 800}
RUNS_OFF = """() => [...document.querySelectorAll('main *')].filter(one => {
    if (one.closest('.bd-sidebar-secondary, .svg-inline--fa') || one.getBoundingClientRect().right <= innerWidth + 1) return false;
    for (let outer = one.parentElement; outer.tagName != 'MAIN'; outer = outer.parentElement)
        if (['auto', 'scroll'].includes(getComputedStyle(outer).overflowX)) return false;
    return true; }).map(one => one.tagName + ': ' + one.textContent.slice(0, 60))"""
WITHOUT_WORDS = (
    """() => [...document.querySelectorAll('article img')].map(one => one.alt).filter(words => words.length < 10)"""
)
SQUEEZED = """() => [...document.querySelectorAll('article img')]
    .filter(one => Math.abs(one.width / one.height * one.naturalHeight / one.naturalWidth - 1) > 0.02)
    .map(one => one.alt.slice(0, 60))"""
TOO_LARGE = """() => [...document.querySelectorAll('section.present, section.present *')]
    .filter(one => { const box = one.getBoundingClientRect();
                     return box.right > innerWidth + 1 || box.bottom > innerHeight + 1 || box.left < -1 || box.top < -1; })
    .map(one => one.tagName + ': ' + one.textContent.slice(0, 60))"""
TOO_WIDE = """() => [...document.querySelectorAll('main *')]
    .filter(one => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(one => one.tagName + ': ' + one.textContent.slice(0, 60))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(SESSION_VARIABLE, raising=False)  # the browser lives for several tests
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("browser")))
        with sync_api.sync_playwright() as playwright:
            running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] * (os.getuid() == 0))
            yield running
            running.close()


@pytest.fixture
def opened(browser, tmp_path) -> Iterator[Callable[[str, dict], Page]]:
    """Opens a page from a folder. Until it is closed, after the test, it may ask for nothing but its own file."""
    path, asked = tmp_path / "page.html", []

    def open_one(text: str, viewport: dict) -> Page:
        path.write_text(text)
        page = browser.new_page(viewport=viewport)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_one
    for context in browser.contexts:
        context.close()
    assert asked, "the page itself is asked for"
    others = (url for url in asked if not url.startswith("data:"))
    assert {url.partition("#")[0] for url in others} == {path.as_uri()}


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(PROJECT / "notebooks" / f"{name}.ipynb", as_version=4)


@pytest.mark.parametrize("name", sorted(path.stem for path in (PROJECT / "notebooks").glob("*.ipynb")))
def test_every_slide_fits_and_its_picture_is_large(opened, name):
    page = opened(slides.deck(read(name)), {"width": 1280, "height": 720})
    page.wait_for_function("() => Reveal.isReady()")
    SHOTS.mkdir(parents=True, exist_ok=True)
    for number in range(page.evaluate("() => Reveal.getTotalSlides()")):
        page.evaluate("number => Reveal.slide(number)", number)
        assert page.evaluate(TOO_LARGE) == [], f"slide {number + 1}"
        for height in page.evaluate("() => [...document.querySelectorAll('section.present img')].map(i => i.height)"):
            assert height > 250, f"slide {number + 1}"
        page.screenshot(path=SHOTS / f"slides-{name}-{number + 1:02}.png")


@pytest.mark.parametrize("name", CHAPTERS)
def test_nothing_of_a_handout_is_wider_than_the_paper(opened, name):
    page = opened(handouts.handout(read(name), solutions=True), A4_PX)
    page.emulate_media(media="print")
    assert page.evaluate(TOO_WIDE) == []


@pytest.fixture(scope="module")
def book_folder(tmp_path_factory):
    pytest.importorskip("myst_nb", reason="Sphinx is missing: `make test-browser` installs it")
    folder = tmp_path_factory.mktemp("book")
    build_book(folder, tmp_path_factory.mktemp("doctrees"))
    return folder


def test_nothing_of_the_book_runs_off_a_phone_and_every_picture_has_words(browser, book_folder):
    page, asked = browser.new_page(viewport=PHONE), []
    page.on("request", lambda request: asked.append(request.url))
    SHOTS.mkdir(parents=True, exist_ok=True)
    chapters = [book_folder / "README.html", *sorted((book_folder / "notebooks").glob("*.html"))]
    assert len(chapters) > 15
    for path in chapters:
        page.goto(path.as_uri())
        assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"], path.name
        assert page.evaluate(RUNS_OFF) == [], path.name
        assert page.evaluate(WITHOUT_WORDS) == [], path.name
        title = page.locator("article h1").bounding_box()
        assert title["y"] + title["height"] < PHONE["height"] / 2, "the text begins on the first screen"
        page.screenshot(path=SHOTS / f"book-{path.stem}.png")
    page.close()
    assert [url for url in asked if not url.startswith(("data:", book_folder.as_uri()))] == []


@pytest.mark.parametrize("width", [400, 1366])
def test_no_figure_of_the_book_loses_its_shape(browser, book_folder, width):
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto((book_folder / "notebooks" / "04_fsdp_auto_wrap.html").as_uri())
    assert page.locator("article img").count() > 3 and page.evaluate(SQUEEZED) == []
    page.close()


CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "intermediate_size": 128}
CONFIG |= {"num_attention_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": False}
LEVERS = [
    [],
    ["--activation-checkpointing", "units"],
    ["--strategy", "ddp"],
    ["--precision", "fp32"],
    ["--sharding", "hybrid"],
]
PLANS = [
    ["plan", "--model", model, "--world-size", ranks, "--device", device, *lever]
    for model, ranks in (("llama-8b", "64"), ("llama-70b", "1024"), ("vit-b16", "8"))
    for device in ("h100", "a100")
    for lever in LEVERS
]
RUN = "async words => (await (await import(new URL('../_static/command_line.js', location))).run(words))"


@pytest.fixture(scope="module")
def served(book_folder) -> Iterator[str]:
    """The address of the book behind a static server on this machine."""
    if not (book_folder / "_static" / "pyodide").is_dir():
        pytest.skip("npm was missing when Sphinx was installed, so the book has no pages that run commands")
    handler = partial(QuietHandler, directory=book_folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_the_browser_says_what_the_command_line_says(browser, served, capsys, monkeypatch):
    """Thirty plans and thirty messages, to the letter; and nothing is asked of another machine."""
    monkeypatch.chdir(PROJECT)
    symptoms = tomllib.loads((PROJECT / "tests" / "cli" / "symptoms.toml").read_text("utf-8"))["said"]
    messages = [row["text"] for row in random.Random(61).sample(symptoms, 30)]
    page, asked = browser.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{served}/docs/what-broke.html")
    commands = [*PLANS, *(["explain", "--", message] for message in messages)]
    assert len(commands) == 60
    for words in commands:
        status = main(words)
        assert page.evaluate(RUN, words) == {"status": status, "text": capsys.readouterr().out}, words
    page.close()
    assert [url for url in asked if not url.startswith((served, "data:", "blob:"))] == []


def test_a_plan_from_the_form_fits_a_phone_and_its_link_plans_again(browser, served):
    """A pasted config, with bad input first: one line, as in a terminal."""
    page = browser.new_page(viewport=PHONE, color_scheme="dark")
    page.goto(f"{served}/docs/will-it-fit.html")
    page.wait_for_function("() => document.querySelector('select[name=model]').options.length > 0", timeout=120_000)
    said = "() => document.getElementById('said').textContent"
    for config, begins in (("{", "isn't JSON"), (json.dumps(CONFIG), "config.json")):
        page.fill("textarea[name=config]", config)
        page.press("textarea[name=config]", "Tab")
        page.locator("input[name=world-size]").press("Enter")
        page.wait_for_function(f"begins => ({said})().includes(begins)", arg=begins, timeout=60_000)
    assert page.locator("#bytes div").count() > 4
    assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate(RUNS_OFF) == []
    again = browser.new_page()
    again.goto(page.url)
    again.wait_for_function(f"text => ({said})() === text", arg=page.evaluate(said), timeout=120_000)


def test_an_answer_links_to_the_failures_page(browser, served):
    page = browser.new_page()
    page.goto(f"{served}/docs/what-broke.html")
    page.fill("textarea", "RuntimeError: got mixed torch.Tensor and DTensor")
    page.click("form.command button")
    page.click("#said a", timeout=120_000)
    assert page.locator("article h1").inner_text().startswith("got mixed torch.Tensor and DTensor")
