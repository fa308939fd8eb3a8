"""The page at / in a real browser, with a real server and the model that ships with Quire."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.browser import Browser, Tab, path_of_browser
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.skipif(
    path_of_browser() is None, reason="no Chromium is installed: apt-get install chromium runs these tests"
)

READY = "document.querySelector('#status').dataset.state === 'ready'"
KEY = "a-key-for-tests"
SYSTEM = "You are a helpful assistant of a shop that sells tents. " * 6
COMMAND = ["-m", "quire.interfaces.cli", "serve", "--port", "0", "--num-gpu-blocks-override", "160",
           "--max-model-len", "1024", "--max-num-seqs", "8", "--num-threads", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ServerProcess(COMMAND) as server:
        yield server.wait_ready() + "/"


@pytest.fixture
def tab(browser: Browser, url: str) -> Iterator[Tab]:
    found = browser.open(url)
    found.wait_until(READY)
    yield found
    assert found.complaints == [], "the page complained"
    assert all(address.startswith(url) for address in found.requested), "something came from elsewhere"
    found.close()


@contextmanager
def load(url: str) -> Iterator[None]:
    """Two conversations with the same beginning, for as long as the body runs."""
    is_over = threading.Event()

    def talk(question: str) -> None:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": 300, "ignore_eos": True}
        while not is_over.is_set():
            request = urllib.request.Request(
                url + "v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=60).read()

    threads = [threading.Thread(target=talk, args=(question,)) for question in ("Which one is light?", "And warm?")]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_a_chat_streams_an_answer_with_the_keyboard_alone(tab: Tab):
    # the first stop is the link that leads past everything to the chat
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    tab.press("Enter")
    tab.wait_until("location.hash === '#prompt'")
    tab.evaluate("document.querySelector('#prompt').focus()")
    tab.type("What is seven plus five?")
    tab.press("Enter")
    tab.wait_until("document.querySelector('.facts')")
    assert "12" in tab.text(".message.assistant .text")
    assert "tokens" in tab.text(".facts")
    assert tab.evaluate("document.querySelector('#prompt').value") == ""
    assert tab.evaluate("document.querySelector('#log').getAttribute('aria-busy')") == "false"
    order = []
    for _ in range(4):
        tab.press("Tab")
        order.append(tab.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert order[0] == "send"
    assert len(set(order)) == 4
    tab.evaluate("document.querySelector('#new').focus()")
    tab.press("Enter")
    assert tab.evaluate("document.querySelectorAll('.message').length") == 0


def test_an_answer_is_stopped(tab: Tab):
    tab.evaluate("document.querySelector('#max-tokens').value = 900")
    tab.evaluate("window.real = window.fetch")
    # the model itself would end its answer before anybody could stop it
    tab.evaluate(
        "window.fetch = (path, options) => window.real(path, options?.body"
        " ? {...options, body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true})} : options)"
    )
    tab.evaluate("document.querySelector('#prompt').focus()")
    tab.type("Tell me a story.")
    tab.press("Enter")
    tab.wait_until("document.querySelector('.message.assistant .text').textContent.length > 10")
    tab.evaluate("document.querySelector('#stop').click()")
    tab.wait_until("document.querySelector('.facts')?.textContent === 'stopped'")
    assert not tab.evaluate("document.querySelector('#send').hidden")


def test_what_a_model_says_is_never_html(tab: Tab):
    tab.evaluate("document.querySelector('#prompt').focus()")
    tab.type("<img src=x onerror=alert(1)><b>bold</b>")
    tab.press("Enter")
    tab.wait_until("document.querySelector('.facts')")
    assert tab.evaluate("document.querySelectorAll('#log img, #log b, #log script').length") == 0
    assert "<b>bold</b>" in tab.text(".message.user .text")


def test_the_block_map_shows_what_two_conversations_share(tab: Tab, url: str):
    with load(url):
        tab.wait_until("/shared by 2 conversations/.test(document.querySelector('#summary').textContent)")
        shared = tab.wait_until(
            "[...document.querySelectorAll('#legend li')].filter((one) => /shared by several/.test(one.innerText)"
            " && !/^0/.test(one.innerText.trim())).length"
        )
        assert shared == 1
        tab.wait_until("document.querySelectorAll('#running-list .mark').length === 2")
        tab.wait_until("/starts/.test(document.querySelector('#decision-list').innerText)")
        tab.evaluate("document.querySelector('#map').focus()")
        tab.press("ArrowRight")
        assert tab.text("#block").startswith("Block ")
        # what is seen is what the endpoint says
        seen = tab.evaluate("document.querySelector('#summary').textContent")
        assert " of 160 blocks are in use" in seen
    tab.wait_until("/nothing waits/.test(document.querySelector('#summary').textContent)")


def test_a_model_without_a_chat_template_gets_a_box_for_completions(tab: Tab):
    tab.evaluate(
        """(() => {
          const real = window.fetch;
          window.fetch = async (path, options) => {
            const answer = await real(path, options);
            if (path !== '/v1/observe/state' || !answer.ok) return answer;
            const state = await answer.json();
            state.model.has_chat_template = false;
            return Response.json(state);
          };
        })()"""
    )
    tab.wait_until("document.querySelector('#chat-title').textContent === 'Completion'")
    assert tab.evaluate("document.querySelector('#system-field').hidden")
    tab.evaluate("document.querySelector('#max-tokens').value = 8")
    tab.evaluate("document.querySelector('#prompt').focus()")
    tab.type("Once upon a time")
    tab.press("Enter")
    tab.wait_until("document.querySelector('.facts')")
    assert any(address.endswith("/v1/completions") for address in tab.requested)


@pytest.mark.parametrize(("makes", "address"), [("labels", "/v1/rerank"), ("vectors", "/v1/embeddings")])
def test_a_model_that_writes_nothing_says_what_it_is_for(tab: Tab, makes: str, address: str):
    tab.evaluate(
        """(() => {
          const real = window.fetch;
          window.fetch = async (path, options) => {
            const answer = await real(path, options);
            if (path !== '/v1/observe/state' || !answer.ok) return answer;
            const state = await answer.json();
            state.model.makes = 'MAKES';
            return Response.json(state);
          };
        })()""".replace("MAKES", makes)
    )
    tab.wait_until(f"document.querySelector('#empty-text').textContent.includes('{address}')")
    assert tab.evaluate("document.querySelector('#composer').hidden")
    assert tab.evaluate("document.querySelector('#examples').hidden")


def test_a_trace_is_saved_from_the_page(tab: Tab):
    tab.evaluate("document.querySelector('#save-trace').click()")
    tab.wait_until("/^Saved/.test(document.querySelector('#trace-status').textContent)")


def test_a_phone_does_not_scroll_sideways(tab: Tab):
    for dark in (False, True):
        tab.set_scheme(dark=dark)
        tab.resize(360, 740)
        tab.wait_until("innerWidth === 360")
        assert tab.evaluate("document.documentElement.scrollWidth") == 360
        nav = "document.querySelector('nav')"
        assert tab.evaluate(f"{nav}.scrollWidth - {nav}.clientWidth") == 0, "a section cannot be seen in the list"
        # fields and buttons are large enough for a finger
        small = tab.evaluate(
            "[...document.querySelectorAll('button, input, summary')].filter((one) => one.offsetHeight &&"
            " one.offsetHeight < 24).map((one) => one.id)"
        )
        assert small == []


def test_a_failure_is_seen_on_a_phone(tab: Tab):
    tab.resize(360, 740)
    tab.evaluate("document.querySelector('#system').value = 'a word '.repeat(2000)")
    tab.evaluate("document.querySelector('#prompt').focus()")
    for _ in range(4):
        tab.type("What is seven plus five?")
        tab.press("Enter")
        tab.wait_until("document.querySelector('#chat-status').textContent.includes('maximum context')")
        tab.wait_until("!document.querySelector('#send').hidden")
        tab.evaluate("document.querySelector('#chat-status').textContent = ''")
    hidden = "(({scrollHeight, scrollTop, clientHeight}) => scrollHeight - scrollTop - clientHeight)"
    assert tab.evaluate(f"{hidden}(document.querySelector('#log'))") < 2
    tab.complaints.clear()


CONTRAST = """
(() => {
  const channel = (value) => { const s = value / 255; return s <= 0.03928 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4 };
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number);
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  };
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (!/, 0\\)$/.test(colour) && colour !== 'transparent') return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  const poor = [];
  for (const one of document.querySelectorAll('h1, h2, h3, p, a, li, label, button, summary, output, span')) {
    if (!one.offsetParent || !one.innerText?.trim() || one.classList.contains('skip')) continue;
    const [ink, paper] = [light(getComputedStyle(one).color), light(behind(one))];
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < 4.5) poor.push(`${one.tagName} ${one.id || one.className}: ${ratio.toFixed(2)}`);
  }
  return poor;
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_can_be_read_in_both_schemes(tab: Tab, dark: bool):
    tab.set_scheme(dark=dark)
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 384) == dark
    assert tab.evaluate(CONTRAST) == []


def test_landmarks_labels_and_names_are_there(tab: Tab):
    for landmark in ("header", "nav[aria-label]", "main", "footer"):
        assert tab.evaluate(f"document.querySelectorAll({json.dumps(landmark)}).length") >= 1
    unnamed = tab.evaluate(
        "[...document.querySelectorAll('section, dialog, canvas[tabindex], [role=log]')].filter((one) =>"
        " !one.getAttribute('aria-label') && !one.getAttribute('aria-labelledby')).map((one) => one.id)"
    )
    assert unnamed == []
    dangling = tab.evaluate(
        "[...document.querySelectorAll('[aria-labelledby], [aria-describedby]')].flatMap((one) =>"
        " `${one.getAttribute('aria-labelledby') ?? ''} ${one.getAttribute('aria-describedby') ?? ''}`"
        ".trim().split(/\\s+/)).filter((id) => !document.getElementById(id))"
    )
    assert dangling == []
    assert tab.evaluate("document.documentElement.lang") == "en"


def test_a_server_with_keys_is_asked_for_one(browser: Browser):
    with ServerProcess([*COMMAND, "--api-key", KEY]) as server:
        url = server.wait_for("http://", 60) and server.wait_ready() + "/"
        tab = browser.open(url)
        tab.wait_until("document.querySelector('#key-dialog').open")
        tab.complaints.clear()  # the browser notes each 401
        tab.evaluate("document.querySelector('#key').focus()")
        tab.type(KEY)
        tab.press("Enter")
        tab.wait_until(READY)
        assert tab.evaluate("sessionStorage.getItem('quire-api-key')") == KEY
        assert tab.evaluate("localStorage.length") == 0
        assert KEY not in tab.evaluate("document.documentElement.outerHTML")
        assert tab.complaints == []
        tab.close()


def test_of_several_tenants_the_page_shows_the_chat_and_says_what_is_missing(browser: Browser):
    def use(key: str) -> None:
        tab.wait_until("document.querySelector('#key-dialog').open")
        tab.evaluate("document.querySelector('#key').focus()")
        tab.type(key)
        tab.press("Enter")

    shown = "[...document.querySelectorAll('main section')].filter((one) => one.offsetParent).map((one) => one.id)"
    with ServerProcess([*COMMAND, "--api-key", KEY, "--api-key", "another", "--admin-api-key", "root"]) as server:
        tab = browser.open(server.wait_for("http://", 60) and server.wait_ready() + "/")
        use(KEY)
        tab.wait_until(READY)
        tab.wait_until("!document.querySelector('#withheld').hidden")
        assert tab.evaluate(shown) == ["chat", "withheld"]
        assert "administrator" in tab.text("#withheld")
        assert tab.evaluate(CONTRAST) == []
        tab.wait_until("/^Quire · /.test(document.title)")
        tab.evaluate("document.querySelector('#prompt').focus()")
        tab.type("What is seven plus five?")
        tab.press("Enter")
        tab.wait_until("document.querySelector('.facts')")
        assert "12" in tab.text(".message.assistant .text")
        tab.evaluate("document.querySelector('#change-key').click()")
        use("root")
        tab.wait_until("document.querySelector('#withheld').hidden")
        tab.wait_until("document.querySelector('#tokens').textContent !== '–'")
        assert tab.evaluate(shown) == ["chat", "load", "memory", "requests", "decisions"]
        tab.close()
