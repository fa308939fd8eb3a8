"""The files of the page at /: served to everybody, at any time, under a strict policy, and complete in themselves."""

import re

import httpx2 as httpx
import pytest

from quire.interfaces.gateway import create_app
from quire.interfaces.server import page

TEXTS = {path: asset.content.decode() for path, asset in page.ASSETS.items()}


@pytest.mark.parametrize("path", sorted(page.PATHS))
def test_a_file_is_served_without_key_and_engine(run, path: str):
    async def main():
        app = create_app(api_keys=["a-key"])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://quire.test") as http:
            found = await http.get(path)
            assert found.status_code == 200
            assert "default-src 'none'" in found.headers["content-security-policy"]
            assert "unsafe" not in found.headers["content-security-policy"]
            assert found.headers["x-content-type-options"] == "nosniff"
            again = await http.get(path, headers={"if-none-match": found.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert (await http.head(path)).status_code == 200

    run(main())


@pytest.mark.parametrize("path", ["/page/nothing.js", "/page/__init__.py", "/page/..%2fapp.py", "/page/"])
def test_there_are_no_other_files(run, served, path: str):
    async def main():
        async with served() as server:
            response = await server.http.get(path)
            assert response.status_code == 404
            assert response.json()["error"]["message"]

    run(main())


def test_what_the_page_names_is_there_and_nothing_comes_from_elsewhere():
    for path, text in TEXTS.items():
        for name in re.findall(r'(?:src|href)="(/[^"]*)"', text):
            assert name in page.PATHS, f"{path} names {name}"
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert f"/page/{name}" in page.PATHS, f"{path} imports {name}"
        links = {"https://ui.perfetto.dev", "http://www.w3.org/2000/svg"}
        assert set(re.findall(r"https?://[^\s\"'<>)]+", text)) <= links, path


def test_nothing_on_the_page_needs_a_laxer_policy():
    html = TEXTS["/"]
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert not re.search(r"\son\w+=|\sstyle=|<style", html)
    for path, text in TEXTS.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        # two choices of the reader, and no key
        assert set(re.findall(r"localStorage(?!\.(?:get|set|remove)Item\((?:KEEPS|WIDTH)\b)", text)) == set(), path


def test_every_element_that_scripts_look_for_is_there():
    ids = set(re.findall(r'id="([^"]+)"', TEXTS["/"]))
    for path, text in TEXTS.items():
        asked = re.findall(r'getElementById\("([^"]+)"\)|setText\("([^"]+)"|new Chart\("([^"]+)"|fill\("([^"]+)"', text)
        for names in asked:
            assert {name for name in names if name} <= ids, path


def test_every_field_has_a_label():
    html = TEXTS["/"]
    fields = re.findall(r'<(?:input|textarea)[^>]*\bid="([^"]+)"', html)
    assert fields
    assert set(fields) <= set(re.findall(r'<label[^>]*\bfor="([^"]+)"', html))
