"""The page at / for who uses no mouse or sees no screen: three sizes, the keyboard alone, the tree that a screen reader
gets; and a block map of 16,384 blocks."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.browser import Browser, Tab, path_of_browser
from tests.support.scripted_answers import ask, pieces, script
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.skipif(
    path_of_browser() is None, reason="no Chromium is installed: apt-get install chromium runs these tests"
)

READY = "document.querySelector('#status').dataset.state === 'ready'"
COMMAND = ["-m", "quire.interfaces.cli", "serve", "--port", "0", "--num-gpu-blocks-override", "160",
           "--max-model-len", "1024", "--max-num-seqs", "8", "--num-threads", "1"]  # fmt: skip
SIZES = pytest.mark.parametrize(
    "size", [(390, 844), (1366, 768), (1920, 1080)], ids=["phone of 390", "laptop of 1366", "wide of 1920"]
)
NUM_BLOCKS = 16_384


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
    found.close()


# what has the focus: its name for a reader of a failure, and whether it is seen, with a mark around it
FOCUSED = """
(() => {
  const one = document.activeElement;
  if (one === document.body) return null;
  const box = one.getBoundingClientRect();
  const style = getComputedStyle(one);
  return {
    name: one.id || `${one.tagName} ${one.className} ${one.textContent.slice(0, 20)}`,
    isSeen: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth && box.width > 0,
    isMarked: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
  };
})()
"""


@SIZES
def test_the_tab_key_reaches_everything_that_can_be_pressed_and_comes_back(tab: Tab, size: tuple[int, int]):
    tab.resize(*size)
    tab.call("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]})
    answer = "See https://example.com.\n\n```py\nx\n```\n\n| a |\n|---|\n| b |"
    script(tab, {"reasoning_content": "Hm."}, *pieces(answer, 50))
    ask(tab, "Go")
    tab.evaluate("document.querySelector('#history-toggle').click()")
    tab.wait_until("document.querySelector('#history .entry')")
    tab.evaluate("document.querySelector('.settings').open = true; document.querySelector('.skip').focus()")
    wanted = tab.evaluate(
        "[...document.querySelectorAll('a, button, input, textarea, summary, [tabindex=\"0\"]')]"
        ".filter((one) => one.checkVisibility({visibilityProperty: true}) && !one.disabled).length"
    )
    seen: list[dict[str, Any]] = [tab.evaluate(FOCUSED)]
    for _ in range(wanted + 5):
        tab.press("Tab")
        focused = tab.evaluate(FOCUSED)
        if focused is None or focused["name"] == seen[0]["name"]:
            break
        seen.append(focused)
    assert len(seen) >= wanted
    assert [one["name"] for one in seen if not one["isSeen"]] == []
    assert [one["name"] for one in seen if not one["isMarked"]] == []


def tree_of(tab: Tab) -> list[dict[str, Any]]:
    """What a screen reader gets: role, name and properties of each node that is not ignored."""
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    return [
        {
            "role": node["role"]["value"],
            "name": node.get("name", {}).get("value", ""),
            **{one["name"]: one["value"].get("value") for one in node.get("properties", [])},
        }
        for node in nodes
        if not node["ignored"]
    ]


@SIZES
def test_a_screen_reader_finds_roles_and_names(tab: Tab, size: tuple[int, int]):
    tab.resize(*size)
    call = {"index": 0, "id": "c", "function": {"name": "look", "arguments": "{}"}}
    script(tab, {"reasoning_content": "Hm."}, *pieces("# Title\n\nText.\n\n```py\nx\n```", 50), {"tool_calls": [call]})
    ask(tab, "Go")
    tab.evaluate("document.querySelector('.settings').open = true")
    tree = tree_of(tab)

    named = {"button", "link", "textbox", "spinbutton", "checkbox", "region", "log", "article", "application", "image"}
    assert [node for node in tree if node["role"] in named and not node["name"]] == []
    for role, name in (
        ("banner", ""),
        ("navigation", "Sections"),
        ("main", ""),
        ("log", "Conversation"),
        ("article", "You"),
        ("article", "Model"),
        ("textbox", "Result of look, which the model waits for"),
        ("button", "Copy this code"),
        ("button", "Copy this answer"),
        ("button", "Try again"),
        ("button", "Edit"),
        ("DisclosureTriangle", "Thoughts"),
        ("DisclosureTriangle", "Calls look"),
        ("group", "Code in py"),
    ):
        assert any(node["role"] == role and node["name"] == name for node in tree), f"no {role} {name!r}"
    live = [node["live"] for node in tree if node.get("live")]
    assert live.count("polite") >= 3
    # a step down at a time, so that a list of headings reads as a table of contents
    levels = [node["level"] for node in tree if node["role"] == "heading"]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


@pytest.fixture
def large(tab: Tab) -> Tab:
    """A cache of 16,384 blocks: of the first 9,000 each fourth is free, the others of one of 40 requests."""
    tab.evaluate(
        f"""(() => {{
          const real = window.realFetch = window.fetch;
          const states = new Uint8Array({NUM_BLOCKS});
          const owners = new Uint16Array({NUM_BLOCKS}).fill(65535);
          for (let block = 0; block < 9000; block += 1) {{
            if (block % 4 === 0) continue;
            states[block] = block < 100 ? 3 : 2;
            owners[block] = (block >> 5) % 40;
          }}
          const coded = (column) => btoa(String.fromCharCode(...new Uint8Array(column.buffer)));
          window.fetch = async (path, options) => {{
            const answer = await real(path, options);
            if (path !== '/v1/observe/blocks' || !answer.ok) return answer;
            return Response.json({{
              ...await answer.json(), num_blocks: {NUM_BLOCKS}, states: coded(states), owners: coded(owners),
              num_holders: coded(states), sequences: Array.from({{ length: 40 }}, (_, number) => [number, 0]),
              summary: 'It is large.',
            }});
          }};
        }})()"""
    )
    tab.wait_until("document.querySelector('#summary').textContent === 'It is large.'")
    return tab


def test_a_large_cache_is_shown_as_ranges_that_open_with_the_keyboard(large: Tab):
    assert large.text("#scale").startswith("each square is 16 blocks")
    large.evaluate("document.querySelector('#map').focus()")
    large.press("ArrowRight")
    assert large.text("#block") == "16 blocks from 0 on: 12 shared by several, 4 free."
    large.press("End")
    assert large.text("#block") == "16 blocks from 16,368 on: 16 free."
    large.press("Home")
    for _ in range(7):
        large.press("ArrowRight")
    large.press("Enter")
    assert large.text("#scale").startswith("blocks 0 to 1,023: each square is a block")
    assert large.text("#block") == "Block 112: free."
    large.press("ArrowRight")
    assert large.text("#block") == "Block 113: held by request 3."
    large.evaluate("document.querySelector('#map-later').click()")
    assert large.text("#scale").startswith("blocks 1,024 to 2,047")
    large.evaluate("document.querySelector('#map').focus()")
    large.press("Escape")
    assert large.text("#scale").startswith("each square is 16 blocks")
    assert large.text("#block").startswith("16 blocks from 1,136 on")


def test_a_frame_draws_no_more_of_a_large_cache_than_of_a_small_one(large: Tab):
    large.evaluate(
        "var drawn = 0; for (const name of ['fillRect', 'strokeRect']) {"
        " const real = CanvasRenderingContext2D.prototype[name];"
        " CanvasRenderingContext2D.prototype[name] = function (...box) {"
        "   if (this.canvas.id === 'map') drawn += 1; real.apply(this, box) } } 0"
    )
    frame = "new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(() => go(drawn))))"
    # many moves within a frame are drawn once
    moves = (
        "for (let x = 20; x < 300; x += 5)"
        " map.dispatchEvent(new PointerEvent('pointermove', {clientX: x + at.left, clientY: at.top + 30}))"
    )
    drawn = large.evaluate(
        "(() => { const map = document.querySelector('#map'); const at = map.getBoundingClientRect();"
        f" drawn = 0; {moves}; return {frame} }})()"
    )
    assert 0 < drawn < 1024 * 10 + 100


def test_a_cache_that_is_no_longer_large_is_shown_whole_again(large: Tab):
    large.evaluate("document.querySelector('#zoom-in').click()")
    assert not large.evaluate("document.querySelector('#zoom-out').disabled")
    large.evaluate("window.fetch = window.realFetch; 0")
    large.wait_until("/160 blocks/.test(document.querySelector('#summary').textContent)")
    assert large.evaluate("document.querySelector('#map-actions').hidden")
