"""The chat of the page at / in a real browser: what models write, attacks among it, and what a user does with it."""

import base64
import io
import re
import time
from collections.abc import Iterator

import pytest
from PIL import Image
from tests.support.browser import Browser, Tab, path_of_browser
from tests.support.scripted_answers import ask, pieces, script
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.skipif(
    path_of_browser() is None, reason="no Chromium is installed: apt-get install chromium runs these tests"
)

READY = "document.querySelector('#status').dataset.state === 'ready'"
COMMAND = ["-m", "quire.interfaces.cli", "serve", "--port", "0", "--num-gpu-blocks-override", "160",
           "--max-model-len", "1024", "--max-num-seqs", "8", "--num-threads", "1"]  # fmt: skip
ANSWER = "document.querySelector('.message.assistant:last-child .text')"
MARKDOWN = """\
# Paging

Blocks of `16` tokens, **shared** by *several*; see [the paper](https://example.com/a_(b)).

1. First
   - inner **bold
2. Second
```python
def f(x):
    return x < 1
```

| state | count |
|:------|------:|
| own \\| shared | **2** |

> quoted
> further

2*3*4 and snake_case_name, \\*escaped\\*.
"""


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
    # nothing of an earlier test
    found.evaluate("new Promise((go) => { indexedDB.deleteDatabase('quire-history').onsuccess = go }).then(() => 0)")
    yield found
    assert found.complaints == [], "the page complained"
    assert all(address.startswith(url) for address in found.requested), "something came from elsewhere"
    found.close()


def outline(tab: Tab) -> str:
    """The answer's tags and texts, without attributes."""
    html = str(tab.evaluate(f"{ANSWER}.innerHTML"))
    return re.sub(r'<button.*?</button>| [a-z-]+="[^"]*"', "", html)


def test_markdown_becomes_elements_and_is_the_same_however_it_is_cut(tab: Tab):
    outlines = []
    for length in (5, 10_000):
        script(tab, *pieces(MARKDOWN, length))
        ask(tab, "How?")
        outlines.append(outline(tab))
    assert outlines[0] == outlines[1]
    for part in (
        "<h3>Paging</h3>",
        "<p>Blocks of <code>16</code> tokens, <strong>shared</strong> by <em>several</em>; see <a>the paper</a>.</p>",
        "<ol><li><p>First</p><ul><li><p>inner **bold</p></li></ul></li><li><p>Second</p></li></ol>",
        "<pre><code><span>def f(x):\n    return x &lt; 1</span></code></pre>",
        "<thead><tr><th>state</th><th>count</th></tr></thead>",
        "<tbody><tr><td>own | shared</td><td><strong>2</strong></td></tr></tbody>",
        "<blockquote><p>quoted\nfurther</p></blockquote>",
        "<p>2*3*4 and snake_case_name, *escaped*.</p>",
    ):
        assert part in outlines[0]
    assert tab.evaluate(f"{ANSWER}.querySelector('a').href") == "https://example.com/a_(b)"


# each text made of random marks, whole, a character at a time and in two parts; returns those that differ
FUZZ = """
(async () => {
  const { Markdown } = await import('/page/markdown.js');
  // what would wait for a frame is done at once
  window.requestAnimationFrame = (work) => { work() };
  let seed = 7;
  const draw = (number) => {
    seed = (seed * 1103515245 + 12345) % 2147483648;
    return Math.floor(seed / 65536) % number;
  };
  const parts = ['a', 'b c', ' ', '  ', '\\n', '\\n\\n', '*', '**', '***', '_', '`', '```', '```py\\n', '\\n```\\n',
    '~~', '# ', '- ', '1. ', '2) ', '> ', '|', '| a | b |\\n|---|--:|\\n| c | d |\\n', '---\\n', '[x](http://y)',
    '[', '](', 'http://z.de/(a)', '<br>', '<b>', '\\\\', '\\\\*', '!', '\\t', '😀', '    '];
  const made = async (pieces) => {
    const root = document.createElement('div');
    const spoken = [];
    const writer = new Markdown(root, { onBlock: (text) => spoken.push(text) });
    for (const piece of pieces) writer.push(piece);
    await writer.end();
    return `${root.innerHTML} ${spoken.join()}`;
  };
  const different = [];
  for (let number = 0; number < 1000; number += 1) {
    const text = Array.from({ length: 1 + draw(30) }, () => parts[draw(parts.length)]).join('');
    const cut = draw(text.length + 1);
    const whole = await made([text]);
    const others = [await made([...text]), await made([text.slice(0, cut), text.slice(cut)])];
    if (others.some((other) => other !== whole)) different.push(text);
  }
  return different;
})()
"""


def test_random_marks_are_read_the_same_however_they_are_cut(tab: Tab):
    assert tab.evaluate(FUZZ) == []


def test_nothing_that_a_model_writes_runs_or_loads(tab: Tab):
    attacks = [
        "<script>window.hacked = 1</script>",
        "<img src=x onerror='window.hacked = 1'>",
        "[a](javascript:window.hacked=1) [b](JaVaScRiPt:window.hacked=1) [c](data:text/html,x) [d](vbscript:x)",
        "[e]( javascript:window.hacked=1) [f](&#106;avascript:window.hacked=1) <javascript:window.hacked=1>",
        "![tracked](https://evil.example/pixel.png) ![g](javascript:window.hacked=1)",
        "```<svg onload=window.hacked=1>\n<b>x</b>\n```",
        "| <b>a</b> | [h](javascript:1) |\n|---|---|\n| <iframe src=javascript:1> | x |",
    ]
    script(tab, *pieces("\n\n".join(attacks), 50))
    ask(tab, "Hello?")
    assert not tab.evaluate("'hacked' in window")
    dangerous = "script, img, svg, iframe, object, embed, b, style, [onclick], [onerror], [onload], [style]"
    assert tab.evaluate(f"{ANSWER}.querySelectorAll({dangerous!r}).length") == 0
    links = tab.evaluate(f"[...{ANSWER}.querySelectorAll('a')].map((one) => one.href + ' ' + one.rel)")
    # an image is a link that somebody may follow, not a thing that is fetched
    assert links == ["https://evil.example/pixel.png noopener noreferrer nofollow"]


LONG = 1_000_000
HOSTILE = {
    "backticks": "'`'.repeat(LONG)",
    "runs of backticks": "Array.from({length: 1400}, (_, n) => '`'.repeat(n)).join(' x ')",
    "open emphasis": "'*a **b _c __d ~~e '.repeat(LONG / 18)",
    "brackets": "'[a](b'.repeat(LONG / 5)",
    "quotes": "'> '.repeat(LONG / 2)",
    "headings": "'#\\n'.repeat(LONG / 2)",
    "items": "'- a\\n'.repeat(LONG / 4)",
    "table": "`|${'a|'.repeat(60)}\\n|${'-|'.repeat(60)}\\n` + `|${'b|'.repeat(60)}\\n`.repeat(LONG / 122)",
    "one line of code": "'```\\n' + 'x'.repeat(LONG)",
    "lines of code": "'```\\n' + 'x = 1\\n'.repeat(LONG / 6)",
}


SLOW = pytest.mark.nightly
# in the default run: what would be quadratic where marks, or lines, are looked for again and again
HOSTILE_CASES = [pytest.param(name, marks=() if name in ("backticks", "open emphasis") else SLOW) for name in HOSTILE]


@pytest.mark.parametrize("name", HOSTILE_CASES)
def test_a_megabyte_of_anything_does_not_freeze_the_page(tab: Tab, name: str):
    script(tab)
    # in packets of 4 KB; `longest`: milliseconds for which the page did nothing else
    tab.evaluate(
        f"var LONG = {LONG}; var text = {HOSTILE[name]}; window.deltas = [];"
        "for (let at = 0; at < text.length; at += 4096) deltas.push({content: text.slice(at, at + 4096)});"
        "var longest = 0; var before = performance.now();"
        "setInterval(() => {"
        " const now = performance.now(); longest = Math.max(longest, now - before); before = now }, 5); 0"
    )
    ask(tab, "Attack!")
    assert tab.evaluate(f"{ANSWER}.querySelectorAll('*').length") < 10_000
    # marks that are drawn as lists, cells and quotes are no text any more; letters are
    letters = "replace(/[^a-z]/g, '').length"
    assert tab.evaluate(f"{ANSWER}.textContent.{letters} >= text.{letters}")
    assert tab.evaluate("longest") < 2000


def test_thoughts_and_tool_calls_are_folded_and_a_result_goes_back(tab: Tab):
    call = {"index": 0, "id": "call-7", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": '{"city": "Oslo"}'}}
    thoughts = ({"reasoning_content": "Where "}, {"reasoning": "is it?"})
    script(tab, *thoughts, {"tool_calls": [call]}, {"tool_calls": [rest]})
    tab.evaluate("document.querySelector('#tools').value = '[{\"name\": \"get_weather\"}]'")
    ask(tab, "Is it cold in Oslo?")
    folds = tab.evaluate("[...document.querySelectorAll('.fold')].map((one) => [one.open, one.textContent])")
    assert folds == [[False, "ThoughtsWhere is it?"], [False, 'Calls get_weather{"city": "Oslo"}']]
    assert "get_weather" in tab.text("#prompt-label")
    script(tab, *pieces("Yes, -3 degrees."))
    ask(tab, "-3")
    assert tab.text("#prompt-label") == "Your message"
    [first, second] = tab.evaluate("asked")
    assert first["tools"] == [{"type": "function", "function": {"name": "get_weather"}}]
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    made = {"id": "call-7", "type": "function", "function": function}
    assert second["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call-7", "content": "-3"},
    ]


def test_tools_that_are_no_json_are_told_before_anything_is_sent(tab: Tab):
    script(tab, *pieces("Hello."))
    tab.evaluate("document.querySelector('#tools').value = '[{'")
    ask(tab, "Hi", waits=False)
    tab.wait_until("/no JSON/.test(document.querySelector('#composer-error').textContent)")
    assert tab.evaluate("document.querySelector('#prompt').value") == "Hi"
    assert tab.evaluate("asked") == []


def test_an_answer_is_made_again_and_a_message_changed_with_the_keyboard_alone(tab: Tab):
    script(tab, *pieces("One."))
    ask(tab, "First")
    ask(tab, "Second")
    script(tab, *pieces("Two."))
    tab.evaluate("document.querySelector('.message:last-child .retry').focus()")
    tab.press("Enter")
    tab.wait_until(f"{ANSWER}.textContent === 'Two.'")
    said = "[...document.querySelectorAll('.message .text')].map((one) => one.textContent)"
    assert tab.evaluate(said) == ["First", "One.", "Second", "Two."]
    # only the last answer can be made again
    assert tab.evaluate("[...document.querySelectorAll('.retry')].filter((one) => one.offsetParent).length") == 1
    tab.wait_until("!document.querySelector('#send').hidden")

    tab.evaluate("document.querySelector('.message.user .actions button').focus()")
    tab.press("Enter")
    assert tab.evaluate("document.activeElement.value") == "First"
    tab.press("Escape")
    assert tab.evaluate("document.activeElement.textContent") == "Edit"
    tab.press("Enter")
    tab.evaluate("document.activeElement.select()")
    tab.type("Changed")
    tab.press("Enter")
    tab.wait_until(f"{said}.join() === 'Changed,Two.'")
    assert [one["content"] for one in tab.evaluate("asked.at(-1)")["messages"]] == ["Changed"]
    tab.wait_until("!document.querySelector('#send').hidden")

    # what was said before the change is kept
    tab.evaluate("document.querySelector('#history-toggle').click()")
    tab.wait_until("document.querySelectorAll('#history .entry').length === 2")
    assert tab.evaluate("[...document.querySelectorAll('#history .title')].map((one) => one.textContent)") == [
        "Changed",
        "First",
    ]


def wait_until_kept(tab: Tab, condition: str = "answer.ending === null") -> None:
    """The browser has written the last answer down, so far."""
    is_kept = f"""(async () => {{
      const {{ History }} = await import('/page/history.js');
      const kept = await new History().read(sessionStorage.getItem('quire-conversation'));
      const answer = kept?.messages.at(-1);
      return answer?.role === 'assistant' && {condition};
    }})()"""
    end = time.monotonic() + 60
    while not tab.evaluate(is_kept):
        assert time.monotonic() < end, "the conversation was not kept"


def test_a_conversation_survives_a_reload_and_is_deleted(tab: Tab, url: str):
    script(tab, {"reasoning_content": "Hm."}, *pieces("An **answer**."))
    tab.evaluate("document.querySelector('#system').value = 'Be kind.'")
    ask(tab, "Remember this")
    before = outline(tab)
    wait_until_kept(tab)
    tab.go(url)
    tab.wait_until(f"{READY} && {ANSWER}?.textContent === 'An answer.' && document.querySelector('.facts')")
    assert outline(tab) == before
    assert tab.evaluate("document.querySelector('#system').value") == "Be kind."
    assert tab.evaluate("document.querySelector('.fold').textContent") == "ThoughtsHm."

    # it goes on where it was
    script(tab, *pieces("More."))
    ask(tab, "And then?")
    asked = [one["content"] for one in tab.evaluate("asked")[0]["messages"]]
    assert asked == ["Be kind.", "Remember this", "An **answer**.", "And then?"]

    tab.evaluate("document.querySelector('#history-toggle').focus()")
    tab.press("Enter")
    tab.wait_until("document.querySelector('#history .entry')")
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.getAttribute('aria-current')") == "true"
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "Delete: Remember this"
    tab.press("Enter")
    tab.wait_until("document.querySelector('#history-status').textContent === 'Deleted.'")
    assert tab.evaluate("document.querySelectorAll('.message').length") == 0
    tab.go(url)
    tab.wait_until(f"{READY} && document.querySelector('#examples button')")
    assert tab.evaluate("document.querySelectorAll('.message').length") == 0


def test_what_had_arrived_when_the_page_was_left_is_there_again(tab: Tab, url: str):
    script(tab, *pieces("word " * 400, 5), pause_ms=20)
    ask(tab, "Talk", waits=False)
    tab.wait_until(f"{ANSWER}.textContent.length > 50")
    # it is written every three seconds
    wait_until_kept(tab, "answer.content.length > 20")
    tab.go(url)
    tab.wait_until(f"{READY} && /^word word/.test({ANSWER}.textContent)")
    assert "cut" in tab.text(".message .facts")
    assert tab.evaluate("document.querySelector('.retry').offsetParent !== null")


def test_nothing_is_kept_where_nothing_shall_be(tab: Tab, url: str):
    script(tab, *pieces("Hello."))
    tab.evaluate("document.querySelector('#keeps-history').click()")
    ask(tab, "A secret")
    tab.evaluate("document.querySelector('#history-toggle').click()")
    tab.wait_until("/No conversation/.test(document.querySelector('#history-items').textContent)")
    tab.go(url)
    tab.wait_until(READY)
    assert not tab.evaluate("document.querySelector('#keeps-history').checked")
    assert tab.evaluate("document.querySelectorAll('.message').length") == 0
    tab.evaluate("document.querySelector('#keeps-history').click()")


def test_the_history_is_bounded(tab: Tab):
    sizes = tab.evaluate(
        """(async () => {
          const { History } = await import('/page/history.js');
          const history = new History();
          const messages = [{ role: 'user', content: 'x'.repeat(3_000_000), images: [] }];
          for (let number = 0; number < 9; number += 1) {
            await history.write({ id: `${number}`, title: 't', messages, settings: {} });
          }
          const titles = await history.titles();
          await history.removeAll();
          return { ids: titles.map((one) => one.id), left: (await history.titles()).length };
        })()"""
    )
    assert sizes == {"ids": ["8", "7", "6", "5", "4", "3"], "left": 0}


def test_an_example_is_asked_with_one_press(tab: Tab):
    script(tab, *pieces("Much."))
    tab.evaluate("document.querySelector('#examples button').focus()")
    tab.press("Enter")
    tab.wait_until(f"{ANSWER}.textContent === 'Much.'")
    assert tab.evaluate("document.querySelector('#examples')") is None
    tab.evaluate("document.querySelector('#new').click()")
    assert tab.evaluate("document.querySelectorAll('#examples button').length") == 3


def test_code_is_copied(tab: Tab):
    script(tab, *pieces("```js\nlet a = 1;\n\nlet b = '" + "x" * 9000 + "';\n```\nDone.", 1000))
    ask(tab, "Code?")
    tab.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }; 0")
    tab.evaluate("document.querySelector('.code button').focus()")
    tab.press("Enter")
    tab.wait_until("document.querySelector('.code button').textContent === 'Copied'")
    assert tab.evaluate("copied") == "let a = 1;\n\nlet b = '" + "x" * 9000 + "';"


def an_image(width: int, height: int) -> str:
    content = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def test_images_are_pasted_sent_and_kept_when_the_model_takes_them(tab: Tab, url: str):
    assert tab.evaluate("document.querySelector('#attach').hidden"), "this model takes no images"
    offer = (
        "(async () => { const { Attachments } = await import('/page/images.js');"
        " const real = Attachments.prototype.offer;"
        " Attachments.prototype.offer = function () { real.call(this, true) } })()"
    )
    tab.evaluate(offer)
    tab.wait_until("!document.querySelector('#attach').hidden")
    script(tab, *pieces("Two red ones."))
    tab.evaluate(
        f"""(() => {{
          const transfer = new DataTransfer();
          for (const [name, content] of [['small', '{an_image(40, 30)}'], ['large', '{an_image(3000, 20)}']]) {{
            const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
            transfer.items.add(new File([bytes], name, {{ type: 'image/png' }}));
          }}
          const paste = new ClipboardEvent('paste', {{ clipboardData: transfer, cancelable: true }});
          document.querySelector('#prompt').dispatchEvent(paste);
        }})()"""
    )
    tab.wait_until("document.querySelectorAll('#attached li').length === 2")
    ask(tab, "What is this?")
    assert tab.evaluate("document.querySelectorAll('#attached li').length") == 0
    [small, large, text] = tab.evaluate("asked[0]")["messages"][0]["content"]
    assert small["image_url"]["url"] == f"data:image/png;base64,{an_image(40, 30)}"
    assert text == {"type": "text", "text": "What is this?"}
    head, content = large["image_url"]["url"].split(",")
    assert head == "data:image/jpeg;base64"
    assert max(Image.open(io.BytesIO(base64.b64decode(content))).size) == 1600
    found = "[...document.querySelectorAll('.message .picture')]"
    pictures = f"{found}.map((one) => [one.width, one.getAttribute('aria-label')])"
    assert tab.evaluate(pictures) == [[40, "Image 1"], [480, "Image 2"]]
    wait_until_kept(tab)
    tab.go(url)
    tab.wait_until(f"{READY} && {pictures}.join() === '40,Image 1,480,Image 2'")


@pytest.mark.parametrize("size", [(390, 844), (1366, 768), (1920, 1080)], ids=["phone", "laptop", "wide"])
def test_opened_settings_leave_the_last_answer_its_place(tab: Tab, size: tuple[int, int]):
    tab.resize(*size)
    script(tab, *pieces("A line.\n\n" * 40 + "The end."))
    ask(tab, "Speak")
    end = "[...document.querySelectorAll('.markdown p')].at(-1).getBoundingClientRect()"
    log = "document.querySelector('#log').getBoundingClientRect()"
    is_seen = f"{end}.top >= {log}.top && {end}.bottom <= {log}.bottom"
    assert tab.evaluate(is_seen)
    tab.evaluate("document.querySelector('.settings summary').focus()")
    tab.press("Enter")
    tab.wait_until("document.querySelector('.settings').open")
    tab.wait_until(is_seen)
    assert tab.evaluate(f"{log}.height") > 100
    if size[0] > 1000:
        tab.evaluate("document.querySelector('#widen').click()")
        assert tab.evaluate("document.querySelector('.chat').offsetWidth") > 0.9 * min(size[0], 1760)
        tab.wait_until(is_seen)
        tab.evaluate("document.querySelector('#widen').click()")
    assert tab.evaluate("document.documentElement.scrollWidth") == size[0]


def test_a_screen_reader_hears_an_answer_a_block_at_a_time(tab: Tab):
    script(tab, *pieces("First *words*.\n\n```py\na\nb\n```\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\nLast."))
    ask(tab, "Speak")
    spoken = "[...document.querySelectorAll('#spoken p')].map((one) => one.textContent)"
    assert tab.evaluate(spoken) == ["First words.", "Code in py, 2 lines.", "Table of a, b; 1 row.", "Last."]
    assert tab.evaluate("document.querySelector('#spoken').getAttribute('aria-live')") == "polite"
    # the log itself says nothing, or each word would be heard twice
    assert tab.evaluate("document.querySelector('#log').getAttribute('aria-live')") == "off"
