"""The dashboard in a real browser: on a real server under load, and on pipelines that are made up."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Page, Request, Route, sync_playwright

from tests.server.made_up_pipeline import made_up_timeline, made_up_view
from tests.server.served import DEADLINE_S, Served, serving

KEY = "key-of-the-dashboard"
DEADLINE_MS = DEADLINE_S * 1000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed (apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[Served]:
    """Two API processes, and two stages of which the second has far too much to do."""
    flags = ["-pp", "2", "--pp-layer-partition", "8,22", "--served-model-name", "smol", "--max-model-len", "1024"]
    flags += ["--dtype", "bfloat16", "--kv-cache-memory", "256MiB", "--api-key", KEY, "--api-server-count", "2"]
    with serving(str(smollm2_gguf), *flags) as server:
        server.wait_until_ready()
        yield server


class Watched:
    """A page, and whatever it should not have done."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[Request] = []
        page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request))  # a built-in function is not taken

    def wait_for(self, selector: str, pattern: str) -> str:
        """Until the element's text matches; its text."""
        script = "([selector, pattern]) => new RegExp(pattern).test(document.querySelector(selector).innerText)"
        self.page.wait_for_function(script, arg=[selector, pattern], timeout=DEADLINE_MS)
        return self.page.inner_text(selector)

    def fits(self) -> bool:
        """Whether nothing is wider than the window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@contextmanager
def open_page(browser: Browser, width: int = 1280, height: int = 900, **more: Any) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": width, "height": height}, **more)
    context.set_default_timeout(DEADLINE_MS)
    try:
        yield Watched(context.new_page())
    finally:
        context.close()


def address(server: Served) -> str:
    return f"http://127.0.0.1:{server.port}/dashboard"


def enter(watched: Watched, server: Served, key: str) -> None:
    watched.page.goto(address(server))
    watched.page.fill("#key", key)
    watched.page.press("#key", "Enter")


@contextmanager
def load_on(server: Served, num_clients: int = 6) -> Iterator[None]:
    """As many requests as there are clients are under way all the time."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {"model": "smol", "prompt": [number + 1] * 40, "max_tokens": 48, "ignore_eos": True}
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", headers=headers, timeout=DEADLINE_S) as client:
            while not is_over.is_set():
                client.post("/v1/completions", json=body).raise_for_status()

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(num_clients)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join(DEADLINE_S)


def test_a_loaded_pipeline_is_seen_live_with_its_slowest_stage_and_advice(browser: Browser, server: Served) -> None:
    with open_page(browser) as watched, load_on(server):
        enter(watched, server, KEY)
        watched.wait_for("#slowest", r"s1 sets the pace: busy \d+ %")
        watched.wait_for("#advice", r"slowest stage: s1 \(\+\d+%\).*try --pp-layer-partition \d+,\d+")
        watched.wait_for("#numbers", r"Throughput\s+[1-9][\d.]*\s*tokens/s")
        watched.wait_for("#numbers", r"TTFT\s+[\d.]+\s*m?s median[^]*ITL\s+[\d.]+\s*m?s median")
        assert re.findall(r"s\d", watched.page.inner_text("#shares")) == ["s0", "s1"]
        words = watched.page.get_attribute("#shares li:first-child .bar", "aria-label") or ""
        assert "computing" in words and "idle: too little in flight" in words
        watched.wait_for("#journeys-text", r"TTFT: computing .*s1 [\d.]+ m?s.*; ITL: computing .*with the engine")
        watched.page.wait_for_selector("#journeys li:nth-child(3) .bar[aria-label*='computing']", timeout=DEADLINE_MS)
        rows = watched.page.locator("#partition tr").all_inner_texts()
        assert ["0–7 (8)" in rows[0], "8–29 (22)" in rows[1], "LM head" in rows[1]] == [True] * 3
        watched.wait_for("#partition tr:nth-child(2)", r"iB/s\s+[\d.]+ (µs|ms)")
        watched.page.focus("#gantt")
        watched.page.keyboard.press("ArrowLeft")
        first = watched.wait_for("#picked", r"^s\d m\d+: .*forward [\d.]+ ms")
        watched.page.keyboard.press("ArrowLeft")
        watched.wait_for("#picked", rf"^(?!{re.escape(first.split(':')[0])}:)s\d m\d+: ")
        assert watched.page.inner_text("#status").startswith("live")
        assert watched.complaints == []
        assert {urlsplit(request.url).hostname for request in watched.requests} == {"127.0.0.1"}
        stored = watched.page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]")
        assert stored == [[KEY], 0, ""]


def test_microbatches_are_drawn_where_stages_compute(browser: Browser, server: Served) -> None:
    blue = "[47, 111, 222]"
    count = f"""() => {{
        const canvas = document.querySelector("#gantt"), [r, g, b] = {blue};
        const lane = Math.floor(canvas.height / 2 * 0.8);
        const seen = (top) => {{
          const data = canvas.getContext("2d").getImageData(0, top, canvas.width, lane).data;
          let found = 0;
          for (let at = 0; at < data.length; at += 4)
            if (data[at] === r && data[at + 1] === g && data[at + 2] === b) found += 1;
          return found;
        }};
        return seen(0) > 500 && seen(lane) > 500;
    }}"""
    with open_page(browser, color_scheme="light") as watched, load_on(server):
        enter(watched, server, KEY)
        watched.page.wait_for_function(count, timeout=DEADLINE_MS)


def test_a_wrong_key_is_refused_and_forgotten(browser: Browser, server: Served) -> None:
    with open_page(browser) as watched:
        enter(watched, server, "wrong")
        watched.wait_for("#key-error", "refused")
        assert watched.page.is_hidden("#content")
        assert watched.page.evaluate("sessionStorage.length") == 0
        enter(watched, server, KEY)
        watched.page.wait_for_selector("#content:not([hidden])")


def test_data_needs_the_key_and_the_page_holds_none(server: Served) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=DEADLINE_S) as client:
        page = client.get("/dashboard")
        assert page.status_code == 200 and "smol" not in page.text and KEY not in page.text
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
        for path in ("/debug/pipeline", "/debug/timeline"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401


# ---- pipelines that are made up ----


def answer_with(watched: Watched, view: Callable[[Route], None], timeline: Callable[[Route], None]) -> None:
    watched.page.add_init_script(f"sessionStorage.setItem('stageline-key', '{KEY}')")
    watched.page.route("**/debug/pipeline", view)
    watched.page.route("**/debug/timeline*", timeline)


def show_made_up(watched: Watched, server: Served, num_stages: int) -> None:
    view, timeline = made_up_view(num_stages), made_up_timeline(num_stages)
    answer_with(
        watched,
        lambda route: route.fulfill(body=view, content_type="application/json"),
        lambda route: route.fulfill(body=timeline, content_type="application/json"),
    )
    watched.page.goto(address(server))
    watched.page.wait_for_selector("#content:not([hidden])")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("num_stages", [1, 2, 64])
def test_any_depth_fits_any_width(browser: Browser, server: Served, num_stages: int, width: int) -> None:
    with open_page(browser, width, 740) as watched:
        show_made_up(watched, server, num_stages)
        watched.wait_for("#slowest", f"s{num_stages // 2} sets the pace")
        assert watched.page.locator("#shares li").count() == num_stages
        assert watched.page.locator("#partition tr").count() == num_stages
        assert watched.page.locator("#groups li").count() == num_stages + 4
        assert watched.fits()
        height = watched.page.evaluate("document.querySelector('#gantt').clientHeight / devicePixelRatio")
        assert height >= 9 * num_stages
        assert watched.complaints == []


def test_what_the_server_tells_is_text_and_never_markup(browser: Browser, server: Served) -> None:
    with open_page(browser) as watched:
        show_made_up(watched, server, 2)
        assert "<b>the KV cache is full</b> (and 2 before it)" in watched.wait_for("#events", "preempted")
        assert watched.page.locator("#events b").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_system_into_the_dark(browser: Browser, server: Served, scheme: Any) -> None:
    brightness = """(name) => getComputedStyle(document.body)[name].match(/\\d+/g).slice(0, 3)
        .reduce((sum, part) => sum + Number(part), 0)"""
    with open_page(browser, color_scheme=scheme) as watched:
        show_made_up(watched, server, 2)
        page, text = (watched.page.evaluate(brightness, name) for name in ("backgroundColor", "color"))
        assert (page < 150 < 600 < text) if scheme == "dark" else (text < 150 < 600 < page)


def test_nothing_moves_when_numbers_change(browser: Browser, server: Served) -> None:
    """Where the panels are: before and after another answer came."""
    places = """[...document.querySelectorAll("section, .number")]
        .map((one) => JSON.stringify(one.getBoundingClientRect()))"""
    has_new_numbers = "document.querySelector('#numbers polyline').getAttribute('points').includes(' ')"
    with open_page(browser) as watched:
        show_made_up(watched, server, 4)
        before = watched.page.evaluate(places)
        for _ in range(2):
            with watched.page.expect_response("**/debug/pipeline"):
                pass
        watched.page.wait_for_function(has_new_numbers)
        assert watched.page.evaluate(places) == before


def test_a_hidden_page_asks_nothing_and_a_seen_one_asks_again(browser: Browser, server: Served) -> None:
    hide = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with open_page(browser) as watched:
        watched.page.clock.install()
        show_made_up(watched, server, 2)
        watched.page.evaluate(hide, True)
        watched.page.clock.run_for(2000)
        num_asked = len(watched.requests)
        watched.page.clock.run_for(60_000)
        assert len(watched.requests) == num_asked
        with watched.page.expect_response("**/debug/pipeline"):
            watched.page.evaluate(hide, False)


def test_a_loading_and_a_lost_server_are_told_and_asked_ever_more_slowly(browser: Browser, server: Served) -> None:
    answers = {"status": 503, "message": "the model is still loading"}
    view, timeline = made_up_view(2), made_up_timeline(2)

    def answer(body: bytes) -> Callable[[Route], None]:
        def fulfil(route: Route) -> None:
            error = {"error": {"message": answers["message"]}}
            if answers["status"] == 200:
                route.fulfill(body=body, content_type="application/json")
            else:
                route.fulfill(status=answers["status"], json=error)

        return fulfil

    with open_page(browser) as watched:
        answer_with(watched, answer(view), answer(timeline))
        watched.page.goto(address(server))
        watched.wait_for("#status", "still loading")
        assert watched.page.get_attribute("#status", "data-state") == "waiting"
        answers["status"] = 200
        watched.wait_for("#status", "^live")
        answers |= {"status": 500, "message": "stage 1 of the pipeline was lost; the server is stopping"}
        watched.wait_for("#status", "stage 1 of the pipeline was lost")
        assert watched.page.get_attribute("#status", "data-state") == "lost"
        watched.wait_for("#events", r"lost\s+stage 1 of the pipeline was lost")
        answers["status"] = 200
        watched.wait_for("#status", "^live")
        assert watched.page.locator("#events li").count() == 2
