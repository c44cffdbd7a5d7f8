"""The web page in a real browser: streaming, thinking, a tool call and its result, a picture."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from runtime_min.request import Request
from tests.serving import TOOLS, Bench

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("pageerror", lambda e: pytest.fail(str(e)))
        yield page
        browser.close()


def test_chat(page: Page, bench: Any, tmp_path: Path) -> None:
    """One conversation: it streams, the thinking folds, a call takes a result, a picture goes along."""
    answers = iter(
        [
            "I wonder.</think>Hello <b>you</b> 🌸.",
            '</think><|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
            "<|tool_call_end|><|tool_calls_section_end|>",
            "</think>The result is 42.",
            "</think>A red picture.",
        ]
    )
    b: Bench
    with bench(lambda _: next(answers), pause=0.02) as b:
        page.goto(b.url)
        expect(page.locator("#model")).to_have_text("kimi")
        page.fill("#text", "Hi there")
        page.press("#text", "Enter")
        # It streams: something is there before all of it is.
        expect(page.locator(".thought")).to_contain_text("I w")
        assert page.locator("#stop").is_enabled()
        expect(page.locator(".assistant .content")).to_have_text("Hello <b>you</b> 🌸.")
        expect(page.locator(".thought")).to_have_text("I wonder.")
        expect(page.locator(".speed")).to_have_text(re.compile(r"\d+ tokens, [\d.]+ a second, stop"))
        assert page.locator("details.thinking").get_attribute("open") is None

        page.locator("summary", has_text="tools").click()
        page.fill("#tools", json.dumps(TOOLS))
        page.fill("#text", "Call it")
        page.click("#send")
        expect(page.locator(".call")).to_contain_text('f {"a": 1}')
        page.fill(".call input", "42")
        page.press(".call input", "Enter")
        expect(page.locator(".assistant .content").last).to_have_text("The result is 42.")
        prompt = b.server.served.tokenizer.decode(b.engine.requests[2].prompt)
        assert "## Return of functions.f:0\n42" in prompt and "Hello <b>you</b> 🌸." in prompt

        picture = tmp_path / "red.png"
        Image.new("RGB", (29, 28), "red").save(picture)
        page.set_input_files("#files", picture)
        expect(page.locator("#pictures img")).to_have_count(1)
        page.fill("#text", "What is it?")
        page.click("#send")
        expect(page.locator(".assistant .content").last).to_have_text("A red picture.")
        asked: Request = b.engine.requests[3]
        assert [m.tokens for m in asked.media] == [2]
        page.screenshot(path=tmp_path / "page.png")


def test_stopping_and_errors(page: Page, bench: Any) -> None:
    with bench(script=lambda _: [[65]] * 100_000, pause=0.01) as b:
        page.goto(b.url)
        page.fill("#text", "Hi")
        page.press("#text", "Enter")
        expect(page.locator(".thought")).to_contain_text("A")
        page.click("#stop")
        expect(page.locator(".speed")).to_have_text("stopped")
        page.fill("#temperature", "9")
        page.fill("#text", "Hi")
        page.press("#text", "Enter")
        expect(page.locator(".error")).to_contain_text("400: temperature: found 9")
