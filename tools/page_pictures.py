"""The pictures of docs/page.md, made again: `python -m tools.page_pictures` writes docs/figures/page_*.png.

Starts a server with the model that ships with Quire and a small KV cache, lets twenty clients talk to it, and looks at
its page with a headless Chromium (Debian: apt-get install chromium).
"""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path

from tests.support.browser import Browser
from tests.support.server_process import ServerProcess

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
SERVE = ["-m", "quire.interfaces.cli", "serve", "--port", "0", "--num-gpu-blocks-override", "320",
         "--max-model-len", "1024", "--max-num-seqs", "20", "--preemption-mode", "swap"]  # fmt: skip
# (name, width, height, dark)
PICTURES = (
    ("page_light", 1440, 900, False),
    ("page_dark", 1440, 900, True),
    ("page_phone_light", 360, 780, False),
    ("page_phone_dark", 360, 780, True),
)
SHOPS = ("tents", "boats", "bread")
NUM_CLIENTS = 22
# until the charts and lanes have something to show
WATCH_SECONDS = 25.0


def post(url: str, path: str, body: dict[str, object]) -> None:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    urllib.request.urlopen(request, timeout=300).read()


def talk(url: str, number: int, is_over: threading.Event) -> None:
    """One client after the other asks a shop that has its own long instructions."""
    draw = random.Random(number)
    shop = SHOPS[number % len(SHOPS)]
    system = f"You are a helpful assistant of a shop that sells {shop}. Answer shortly and kindly. " * 3
    while not is_over.is_set():
        question = f"Question {draw.randrange(1000)}: which of your {shop} do you like?"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        length = draw.choice([60, 120, 400, 700])
        body = {"messages": messages, "max_tokens": length, "ignore_eos": True, "n": draw.choice([1, 1, 1, 2])}
        try:
            post(url, "/v1/chat/completions", body)
        except (OSError, HTTPException):
            return  # the server is gone; so are the pictures' clients


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    is_over = threading.Event()
    with ServerProcess(SERVE) as server, Browser() as browser:
        url = server.wait_ready()
        post(url, "/v1/admin/pinned_prefixes", {"name": "house-rules", "text": "Be kind to everybody.\n" * 8})
        clients = [
            threading.Thread(target=talk, args=(url, number, is_over), daemon=True) for number in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        for name, width, height, dark in PICTURES:
            tab = browser.open(url + "/", width=width, height=height, dark=dark)
            tab.wait_until("document.querySelector('#status').dataset.state === 'ready'")
            tab.evaluate("document.querySelector('#prompt').focus()")
            for question in ("What is seven plus five?", "What can you do?"):
                tab.type(question)
                tab.press("Enter")
                tab.wait_until("!document.querySelector('#send').hidden && document.querySelector('.facts')")
            end = time.monotonic() + WATCH_SECONDS
            while time.monotonic() < end:
                time.sleep(0.5)
                tab.evaluate("0")  # takes what the browser reports meanwhile
            tab.evaluate("document.activeElement.blur()")
            tab.picture(FIGURES / f"{name}.png", whole=True)
            print(f"docs/figures/{name}.png: {tab.text('#summary')}")
            tab.close()
        is_over.set()


if __name__ == "__main__":
    main()
