"""Promise: the page at / shows what the server does, to whoever may know, and gets nothing from anywhere else."""

import base64
import hashlib
import re
import shutil
from dataclasses import fields, replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from live import PATIENCE, FakeEngine, faked
from playwright.sync_api import expect, sync_playwright
from tokenizers_tiny import byte_level

import orca_hf
from orca_hf.serving import ServingStats
from orca_hf.work import IterationRecord, Share

TOKENIZER = byte_level()
PAGE = files("orca_hf.server").joinpath("status.html").read_text()
KEY = "ключ, a long one"
EMPTY = ServingStats(**{**{field.name: 0 for field in fields(ServingStats)}, "num_slots": 800, "recent": ()})
IDLE = replace(EMPTY, is_healthy=True, is_accepting=True)


def iteration(*shares):
    return IterationRecord(1.0, 0.025, tuple(Share(*share) for share in shares))


FIRST = (iteration((4, "prefill", 9)), iteration((4, "decode", 1), (7, "prefill", 30)), iteration((7, "decode", 1)))
BUSY = replace(
    IDLE,
    num_running=2,
    num_waiting=3,
    num_reserved=400,
    num_used=100,
    num_iterations=1203,
    num_prompt_tokens=3939,
    num_generated_tokens=2345,
    num_draft_tokens=1800,
    num_accepted_tokens=1234,
    num_native=6,
    num_finished=21,
    num_cancelled=5,
    num_failed=1,
    recent=FIRST,
)


class Engine(FakeEngine):
    """One whose state the test decides."""

    def __init__(self, state=IDLE):
        super().__init__([5])
        self.state = state

    def stats(self):
        return self.state


@pytest.fixture(scope="module")
def locked():
    with faked(Engine(BUSY), TOKENIZER, key=KEY) as running:
        yield running


def status_of(running, **given):
    headers = {"Authorization": f"Bearer {running.key}".encode()}
    return httpx.get(f"{running.url}/status.json", headers=headers, params=given).raise_for_status().json()


# Without a browser.


def test_it_needs_no_key_and_holds_nothing(locked):
    answer = httpx.get(f"{locked.url}/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == PAGE
    assert httpx.get(f"{locked.url}/status.json").status_code == 401


def test_a_web_page_that_takes_our_address_gets_none():
    with faked(Engine(), TOKENIZER) as running:
        assert httpx.get(f"{running.url}/", headers={"Host": "evil.example"}).status_code == 421


def test_the_browser_may_run_its_script_and_nothing_else(locked):
    headers = httpx.get(f"{locked.url}/").headers
    policy = dict(each.split(" ", 1) for each in headers["content-security-policy"].split("; "))
    for element in ("script", "style"):
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy.pop(f"{element}-src") == f"'sha256-{digest}'"
    assert policy.pop("connect-src") == "'self'"
    assert policy.pop("img-src") == "data:"
    assert set(policy) == {"default-src", "base-uri", "form-action", "frame-ancestors"}
    assert set(policy.values()) == {"'none'"}
    assert headers["x-content-type-options"] == "nosniff"


class Elements(HTMLParser):
    """What stands in a page: addresses that it names, code and styles in attributes, and ids."""

    def __init__(self, page):
        super().__init__()
        self.addresses, self.inline, self.ids = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href", "action", "srcset", "data", "poster"):
                self.addresses.append(value)
            elif name.startswith("on") or name == "style":
                self.inline.append((tag, name))
            elif name == "id":
                self.ids.append(value)


def test_it_names_no_other_place():
    elements = Elements(PAGE)
    assert [each[:15] for each in elements.addresses] == ["data:image/png;"]
    assert elements.inline == []
    assert re.findall(r"//[a-z]|url\(|@import|import\(|innerHTML|eval\(", PAGE) == []
    assert re.findall(r"fetch\(`?([a-z.]*)", PAGE) == ["status.json"]


def test_it_reads_only_what_the_status_says(locked):
    status = status_of(locked)
    read = set(re.findall(r"\bstatus\.([a-z_]+)", PAGE)) - {"json"}
    assert read == set(status)
    elements = Elements(PAGE)
    used = set(re.findall(r"\$\(\"([a-z-]+)\"\)|say\(\"([a-z-]+)\"", PAGE))
    assert {name for pair in used for name in pair if name} <= set(elements.ids)
    assert len(elements.ids) == len(set(elements.ids))


@pytest.mark.parametrize(
    ("after", "num_given"), [(None, 3), (0, 3), (1200, 3), (1201, 2), (1203, 0), (9999, 0), (-5, 3)]
)
def test_only_iterations_that_are_new_are_sent(locked, after, num_given):
    status = status_of(locked, **({} if after is None else {"after": after}))
    everything = [{"started": 1.0, "duration": 0.025, "shares": [list(s) for s in it.shares]} for it in FIRST]
    assert status["recent"] == everything[3 - num_given :]
    assert {name: status[name] for name in ("num_iterations", "num_slots", "is_healthy", "open", "version")} == {
        "num_iterations": 1203,
        "num_slots": 800,
        "is_healthy": True,
        "open": 0,
        "version": orca_hf.__version__,
    }


# In a browser.


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        names = ("chromium", "chromium-browser", "google-chrome", "chrome")
        found = own if Path(own).exists() else next(filter(None, map(shutil.which, names)), None)
        if found is None:
            pytest.skip("There is no Chromium: playwright install chromium, or apt-get install chromium")
        # Its sandbox does not run as root, and the pages are ours.
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1180, "height": 900})
    page.set_default_timeout(1000 * PATIENCE)
    expect.set_options(timeout=1000 * PATIENCE)
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda message: page.faults.append(message.text) if "Content Security" in message.text else None)
    page.asked = []
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    page.close()
    assert page.faults == []


def shown(page, *ids):
    return [page.locator(f"#{name}").inner_text() for name in ids]


def test_it_shows_the_engine(page):
    with faked(Engine(BUSY), TOKENIZER, model_names=("SmolLM2",)) as running:
        page.goto(running.url)
        expect(page.locator("#model")).to_have_text("SmolLM2")
        assert shown(page, "state", "running", "waiting", "open") == ["running", "2", "3", "0 answers open"]
        assert shown(page, "used", "reserved", "free", "slots") == [
            "100 used",
            "300 more reserved",
            "400 free",
            "of 800 slots",
        ]
        assert shown(page, "iteration", "batch") == ["25", "1.3 requests in each"]
        assert shown(page, "range") == ["1,201 to 1,203, 2 requests"]
        assert shown(page, "finished", "cancelled", "failed", "native") == ["21", "5", "1", "6"]
        assert shown(page, "iterations", "prompt-tokens", "generated-tokens") == ["1,203", "3,939", "2,345"]
        assert shown(page, "guesses") == ["1,234 of 1,800"]
        widths = page.evaluate("['used-bar', 'reserved-bar'].map((id) => document.getElementById(id).style.width)")
        assert widths == ["12.5%", "50%"]
        assert "2 requests as rows, iterations 1,201 to 1,203" in page.locator("#canvas").get_attribute("aria-label")
        page.locator("summary").click()
        rows = page.locator("#rows tr")
        assert [row.split() for row in rows.all_inner_texts()] == [
            ["1,203", "25", "0", "1", "1"],
            ["1,202", "25", "1", "1", "31"],
            ["1,201", "25", "1", "0", "9"],
        ]
        assert {url.rpartition("?")[0] or url for url in page.asked if not url.startswith("data:")} == {
            f"{running.url}/",
            f"{running.url}/status.json",
        }


COLOUR_AT = """([x, y]) => {
  const canvas = document.getElementById("canvas"), scale = devicePixelRatio;
  const found = [...canvas.getContext("2d").getImageData(x * scale, y * scale, 1, 1).data];
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => style.getPropertyValue(`--${name}`).match(/[0-9a-f]{2}/g).map((each) => parseInt(each, 16));
  const is = (name) => rgb(name).every((each, index) => each === found[index]);
  return found[3] === 0 ? "" : ["prefill", "decode", "track"].find(is);
}"""
# Of the picture's cells, 14 by 16 pixels here: rows are requests 4 and 7, columns the three iterations.
CELLS = {(0, 0): "prefill", (0, 1): "decode", (0, 2): "", (1, 0): "", (1, 1): "prefill", (1, 2): "decode"}


def middle(row, column):
    return 44 + 14 * column + 7, 42 + 16 * row + 8


def top(row, column):
    return 44 + 14 * column + 7, 42 + 16 * row + 1


def test_the_picture_is_the_schedule(page):
    with faked(Engine(BUSY), TOKENIZER) as running:
        page.goto(running.url)
        expect(page.locator("#picture")).to_be_visible()
        assert {cell: page.evaluate(COLOUR_AT, middle(*cell)) for cell in CELLS} == CELLS
        # Who sees no colours sees that prefills are taller.
        lower = {cell: "track" if kind == "decode" else kind for cell, kind in CELLS.items()}
        assert {cell: page.evaluate(COLOUR_AT, top(*cell)) for cell in CELLS} == lower


def test_a_request_that_sits_an_iteration_out_keeps_its_row(page):
    recent = (iteration((4, "decode", 1), (7, "prefill", 9)), iteration((7, "prefill", 9)), iteration((4, "decode", 1)))
    with faked(Engine(replace(BUSY, recent=recent)), TOKENIZER) as running:
        page.goto(running.url)
        expect(page.locator("#picture")).to_be_visible()
        assert page.evaluate(COLOUR_AT, middle(0, 1)) == "track"
        x, y = middle(0, 1)
        page.locator("#canvas").hover(position={"x": x, "y": y})
        expect(page.locator("#tip")).to_contain_text("Request 4: not in this iteration")


def test_pointing_tells_request_and_iteration(page):
    with faked(Engine(BUSY), TOKENIZER) as running:
        page.goto(running.url)
        canvas, tip = page.locator("#canvas"), page.locator("#tip")
        for cell, words in {
            (1, 1): "Request 7: prefill, 30 tokens\nIteration 1,202: 2 requests, 25 ms",
            (0, 1): "Request 4: decode, 1 token\nIteration 1,202: 2 requests, 25 ms",
            (0, 2): "Iteration 1,203: 1 request, 25 ms",
        }.items():
            x, y = middle(*cell)
            canvas.hover(position={"x": x, "y": y})
            expect(tip).to_have_text(words)
        page.mouse.move(5, 5)
        expect(tip).to_be_hidden()
        canvas.focus()
        for key, words in {
            "ArrowLeft": "Request 7: decode, 1 token\nIteration 1,203",
            "ArrowUp": "Iteration 1,203",
            "ArrowRight": "Iteration 1,203",
        }.items():
            page.keyboard.press(key)
            expect(tip).to_contain_text(words)
        page.keyboard.press("ArrowLeft")
        expect(tip).to_contain_text("Request 4: decode, 1 token\nIteration 1,202")
        page.keyboard.press("Escape")
        expect(tip).to_be_hidden()


def test_it_follows_the_server(page):
    engine = Engine()
    with faked(engine, TOKENIZER) as running:
        page.goto(running.url)
        expect(page.locator("#state")).to_have_text("idle")
        assert page.locator("#picture").is_hidden()
        line = page.locator("#curl").inner_text()
        assert f"curl {running.url}/v1/completions" in line
        assert "Authorization" not in line
        engine.state = replace(BUSY, num_iterations=3)
        expect(page.locator("#range")).to_have_text("1 to 3, 2 requests")
        expect(page.locator("#state")).to_have_text("running")
        assert page.locator("#empty").is_hidden()
        engine.state = replace(BUSY, num_iterations=5, num_generated_tokens=3000, recent=FIRST + FIRST[2:] * 2)
        expect(page.locator("#range")).to_have_text("1 to 5, 2 requests")
        expect(page.locator("#rate")).to_have_text(re.compile("[1-9]"))
        engine.state = replace(BUSY, is_accepting=False)
        expect(page.locator("#state")).to_have_text("shutting down")
        engine.state = replace(BUSY, is_healthy=False)
        expect(page.locator("#state")).to_have_text("engine has died")
        expect(page.locator("#notice")).to_contain_text("has died")
    expect(page.locator("#state")).to_have_text("server gone")
    expect(page.locator("#notice")).to_contain_text("cannot be reached")
    expect(page.locator("#main")).to_have_class("stale")


def test_a_server_that_comes_back_is_another(page):
    engine = Engine(BUSY)
    with faked(engine, TOKENIZER) as running:
        page.goto(running.url)
        expect(page.locator("#range")).to_have_text("1,201 to 1,203, 2 requests")
        page.route("**/status.json*", lambda route: route.abort())
        expect(page.locator("#state")).to_have_text("server gone")
        engine.state = replace(BUSY, num_iterations=3)
        page.unroute("**/status.json*")
        expect(page.locator("#range")).to_have_text("1 to 3, 2 requests")
        expect(page.locator("#state")).to_have_text("running")
        assert page.locator("#notice").is_hidden()


def test_it_asks_for_the_key_and_keeps_it_in_the_tab(page, locked):
    page.goto(locked.url)
    key, state = page.locator("#key"), page.locator("#state")
    expect(state).to_have_text("needs a key")
    assert page.locator("#main").is_hidden()
    key.fill("wrong")
    key.press("Enter")
    expect(page.locator("#words")).to_have_text("The server does not know this key.")
    assert page.evaluate("sessionStorage.length") == 0
    key.fill(KEY)
    page.locator("button").click()
    expect(state).to_have_text("running")
    assert page.locator("#notice").is_hidden()
    assert "Bearer YOUR_KEY" in page.locator("#curl").text_content()
    page.reload()
    expect(state).to_have_text("running")
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    assert not any("wrong" in url or "key" in url for url in page.asked)


def test_a_hidden_tab_asks_for_nothing(page):
    # Chromium without a window never hides a tab: the page is told so.
    page.add_init_script("window.hides = false; Object.defineProperty(document, 'hidden', {get: () => window.hides});")
    page.clock.install()
    turn = "(hides) => { window.hides = hides; document.dispatchEvent(new Event('visibilitychange')); }"
    with faked(Engine(BUSY), TOKENIZER) as running:
        page.goto(running.url)
        expect(page.locator("#state")).to_have_text("running")
        page.evaluate(turn, True)
        before = len(page.asked)
        page.clock.run_for(60_000)
        assert len(page.asked) == before
        with page.expect_request("**/status.json*"):
            page.evaluate(turn, False)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1180])
def test_it_fits_and_can_be_read(page, scheme, width):
    many = tuple(iteration(*((number, "decode", 1) for number in range(start, start + 60))) for start in range(256))
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 700})
    with faked(Engine(replace(BUSY, recent=many)), TOKENIZER, model_names=("a_model_with_a_long_name" * 4,)) as running:
        page.goto(running.url)
        expect(page.locator("#picture")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        contrasts = page.evaluate(CONTRASTS)
    assert min(contrasts["text"]) >= 4.5
    assert min(contrasts["shapes"]) >= 3


CONTRASTS = """() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const [r, g, b] = style.getPropertyValue(`--${name}`).match(/[0-9a-f]{2}/g).map((each) => parseInt(each, 16) / 255)
      .map((each) => each <= .04045 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const contrast = (a, b) => (Math.max(light(a), light(b)) + .05) / (Math.min(light(a), light(b)) + .05);
  return {
    text: ["text", "muted", "bad"].flatMap((each) => [contrast(each, "card"), contrast(each, "page")]),
    shapes: ["prefill", "decode", "accent"].map((each) => contrast(each, "card")),
  };
}"""
