"""The server over the real engine on a CPU, with the demo model: what it says is what the model says, and nobody is
left behind."""

import asyncio
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch
from PIL import Image

from runtime_min.artifact import Artifact
from runtime_min.engine import Engine
from runtime_min.request import Limits
from runtime_min.sample import Sampling
from runtime_min.serve import start
from runtime_min.serve.app import app_of
from runtime_min.serve.pump import Pump
from runtime_min.serve.server import Rules, Server
from runtime_min.text import ChatTemplate, Tokenizer
from runtime_min.version import version_line
from tests.lab import converted
from tests.scripted import listening, until
from tests.serving import HELLO, WEB
from tests.test_serve_grammar import JSON, SCHEMA, TOOLS
from tests.test_serve_pictures import asked, url

ROOT = Path(__file__).parent.parent
LIMITS = Limits(running=8, waiting=128, step_tokens=256, share=32, cache_tokens=2048, context=1024, grammars=True)


@pytest.fixture(scope="module")
def artifact(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("served") / "artifact"
    converted(demo, out)
    return out


@dataclass
class Live:
    url: str
    engine: Engine
    server: Server

    @property
    def client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def chat(self, **body: Any) -> Any:
        body = {"model": "kimi-k2.6", "messages": HELLO, **body}
        answer = WEB.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def served(artifact: Path, limits: Limits = LIMITS, rules: Rules | None = None) -> Iterator[Live]:
    engine = Engine(artifact, limits, device="cpu")
    what = start.served(Artifact.open(artifact, verify=False), engine.bounds, with_grammars=limits.grammars)
    server = Server(what, Pump(engine), rules or Rules())
    with listening(app_of(server, lambda line: None)) as address:
        yield Live(address, engine, server)


@pytest.fixture(scope="module")
def live(artifact: Path) -> Iterator[Live]:
    with served(artifact) as found:
        yield found


def test_the_text_is_the_engines(live: Live, artifact: Path) -> None:
    """The server's answer is what the engine gives to the same ids, decoded."""
    tokenizer = Tokenizer.open(artifact)
    prompt = ChatTemplate.open(artifact).encode_chat(tokenizer, HELLO)
    with Engine(artifact, replace(LIMITS, grammars=False), device="cpu") as engine:
        want = engine.generate([prompt], Sampling(), max_tokens=24, stops=tokenizer.stop_ids)[0]
    body = live.chat(temperature=0, max_tokens=24)
    assert body["choices"][0]["message"]["reasoning_content"] == tokenizer.decode(want.ids, skip_special=True)
    assert body["choices"][0]["finish_reason"] == want.finish
    chunks = live.client.chat.completions.create(
        model="kimi-k2.6", messages=HELLO, temperature=0, max_tokens=24, stream=True
    )
    streamed = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks)
    assert streamed == tokenizer.decode(want.ids, skip_special=True)


def test_seeds_repeat_among_strangers(live: Live) -> None:
    def said(**more: Any) -> list[str]:
        body = live.chat(max_tokens=16, temperature=1.2, **more)
        return [c["message"].get("reasoning_content", "") for c in body["choices"]]

    alone = said(seed=7)
    strangers = [threading.Thread(target=said, kwargs={"seed": s}) for s in range(100, 106)]
    for thread in strangers:
        thread.start()
    assert said(seed=7, n=3)[:1] == alone and len(set(said(seed=7, n=3))) == 3
    for thread in strangers:
        thread.join()
    assert said(seed=8) != alone


def test_bias_penalties_and_stop_ids_act(live: Live, artifact: Path) -> None:
    tokenizer = Tokenizer.open(artifact)
    only = tokenizer.encode_ordinary("z")[0]
    body = live.chat(temperature=0, max_tokens=6, logit_bias={str(only): 100})
    assert body["choices"][0]["message"]["reasoning_content"] == "zzzzzz"
    ended = live.chat(temperature=0, max_tokens=6, logit_bias={str(only): 100}, stop_token_ids=[only])
    assert ended["choices"][0]["finish_reason"] == "stop" and ended["usage"]["completion_tokens"] == 1
    varied = live.chat(temperature=0, max_tokens=6, logit_bias={str(only): 3}, frequency_penalty=2)
    assert varied["choices"][0]["message"]["reasoning_content"] != "zzzzzz"


def test_logprobs_are_the_models(live: Live, artifact: Path) -> None:
    """Prompt and answer scored by /v1/completions as lm-eval does it, against the model's own logits."""
    prompt = [5, 9, 300, 17, 44, 208]
    body = live.client.completions.create(
        model="kimi-k2.6", prompt=prompt, max_tokens=1, temperature=0, logprobs=3, echo=True, seed=1
    )
    told = body.choices[0].logprobs
    from runtime_min.launch import Run, loaded
    from runtime_min.score import score

    with loaded(Run(artifact=artifact, device="cpu"), 0, 1, None) as (model, _):
        normed = score(model, torch.tensor([prompt]))[0].double().log_softmax(-1)
    want = [normed[i, token].item() for i, token in enumerate(prompt[1:])]
    assert told.token_logprobs[0] is None
    assert told.token_logprobs[1 : len(prompt)] == pytest.approx(want, abs=1e-4)
    assert told.token_logprobs[len(prompt)] == pytest.approx(normed[-1].max().item(), abs=1e-4)
    assert [len(t) for t in told.top_logprobs[1:]] == [3] * len(prompt)
    assert max(told.top_logprobs[2].values()) == pytest.approx(normed[1].max().item(), abs=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_grammars_hold_whatever_the_model_prefers(live: Live, seed: int) -> None:
    how: dict[str, Any] = {"seed": seed, "temperature": 1.5, "chat_template_kwargs": {"thinking": False}}
    text = live.chat(response_format=JSON, max_tokens=700, **how)["choices"][0]
    if text["finish_reason"] == "stop":
        jsonschema.validate(json.loads(text["message"]["content"]), SCHEMA)
    quick = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}
    quick["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "quick", "parameters": quick}}
    named = {"type": "function", "function": {"name": "quick"}}
    call = live.chat(tools=[*TOOLS, tool], tool_choice=named, max_tokens=200, **how)["choices"][0]
    assert call["finish_reason"] == "tool_calls" and call["message"]["content"] is None
    made = call["message"]["tool_calls"]
    assert [c["function"]["name"] for c in made] == ["quick"] and made[0]["id"] == "functions.quick:0"
    jsonschema.validate(json.loads(made[0]["function"]["arguments"]), quick)


def test_pictures_are_seen_and_cached(live: Live) -> None:
    def answer(picture: Image.Image) -> tuple[float, int]:
        """Log-probability of the first token, and prompt tokens from the cache."""
        out = io.BytesIO()
        picture.save(out, "PNG")
        body = live.chat(messages=asked(url(out.getvalue())), temperature=0, max_tokens=8, logprobs=True)
        first = body["choices"][0]["logprobs"]["content"][0]["logprob"]
        return first, body["usage"]["prompt_tokens_details"]["cached_tokens"]

    black, bits = Image.new("RGB", (280, 280)), Image.new("1", (280, 280))
    noise = Image.frombytes("RGB", (280, 280), random.Random(1).randbytes(280 * 280 * 3))
    first, cached = answer(black)
    assert cached == 0
    # What the model sees is what counts, not how it came.
    for same in (black, bits):
        assert answer(same) == (pytest.approx(first, abs=1e-4), 64)
    other, cached = answer(noise)
    assert abs(other - first) > 1e-3 and cached == 0


def test_metrics_and_health(live: Live) -> None:
    live.chat(max_tokens=4)
    text = WEB.get(f"{live.url}/metrics").text
    assert "kiln_cache_pages 32.0" in text and "kiln_kernels_compiled 0.0" in text
    assert WEB.get(f"{live.url}/health?deep=1").json()["token_seconds"] > 0


def test_many_streams_with_random_disconnects_leave_nothing(live: Live) -> None:
    """64 at once, each leaving at a moment of its own or not at all."""
    generator = random.Random(4)
    before = len(os.listdir("/proc/self/fd"))

    async def one(client: httpx.AsyncClient, seconds: float | None, seed: int) -> int:
        body = {
            "model": "kimi-k2.6", "messages": [{"role": "user", "content": f"Question {seed} " * (1 + seed % 9)}],
            "stream": True, "max_tokens": 24, "seed": seed, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        count = 0
        try:
            async with asyncio.timeout(seconds):
                async with client.stream("POST", f"{live.url}/v1/chat/completions", json=body) as answer:
                    assert answer.status_code == 200
                    last = ""
                    async for line in answer.aiter_lines():
                        count += line.startswith("data: {")
                        last = line or last
                    assert last == "data: [DONE]"
                    return count
        except TimeoutError:
            return 0

    async def all_of_them() -> list[int]:
        waits = [None if i % 2 else generator.uniform(0, 6) for i in range(64)]
        async with httpx.AsyncClient(timeout=90, trust_env=False, limits=httpx.Limits(max_connections=64)) as client:
            return await asyncio.gather(*(one(client, w, i) for i, w in enumerate(waits)))

    counts = asyncio.run(all_of_them())
    assert all(counts[i] for i in range(1, 64, 2)) and not all(counts)
    until(lambda: not live.engine.unfinished and not live.server.active and not live.server.pump.tickets)
    until(lambda: live.engine.stats.running == live.engine.stats.waiting == 0)
    assert live.engine.stats.free == live.engine.stats.pages
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 4)
    live.chat(max_tokens=2)


def test_ranks_keep_to_grammars_and_a_dead_one_turns_health(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "two", world=2, tp=2)
    with served(tmp_path / "two") as two:
        short = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
        limited = two.chat(response_format=short, chat_template_kwargs={"thinking": False})
        assert limited["choices"][0]["message"]["content"] in ('"yes"', '"no"')
        assert WEB.get(f"{two.url}/health").status_code == 200
        body = {"model": "kimi-k2.6", "messages": HELLO, "stream": True, "ignore_eos": True}
        with WEB.stream("POST", f"{two.url}/v1/chat/completions", json=body) as s:
            lines = s.iter_lines()
            next(lines)
            two.engine.link.processes.processes[1].kill()  # type: ignore[attr-defined]
            last = [line for line in lines if line][-1]
        assert "rank 1 of 2 was killed by signal 9" in json.loads(last.removeprefix("data: "))["error"]["message"]
        until(lambda: WEB.get(f"{two.url}/health").status_code == 503)
        assert WEB.get(f"{two.url}/live").status_code == 200


def test_the_command_starts_tells_and_drains(artifact: Path) -> None:
    """Start-up lines; a stream that goes on after SIGTERM while new requests are refused; exit code 0."""
    command = [sys.executable, "-m", "runtime_min", "serve", str(artifact), "--device", "cpu", "--port", "0",
               "--cache-tokens", "2048", "--context", "1024", "--interval", "0.2", "--name", "demo"]  # fmt: skip
    environment = {**os.environ, "KILN_API_KEY": "secret", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stderr is not None
        told: list[str] = []
        for line in process.stderr:
            told.append(line)
            if line.startswith("serving: "):
                break
        whole = "".join(told)
        expected = (
            version_line(), "format 1.0", "model: demo", "device: cpu", "mesh: 1 ranks, TP 1, EP 1", "load: check",
            "prefill, decode and verify", "pictures: ", "drafts: none", "tuning: ", "2048 tokens in the cache",
            "parsers: ", "sampling, unless",
        )  # fmt: skip
        for needed in expected:
            assert needed in whole, (needed, whole)
        address = told[-1].split()[1]
        rest: list[str] = []
        reader = threading.Thread(target=lambda: rest.extend(process.stderr or ()))
        reader.start()
        keyed = httpx.Client(trust_env=False, timeout=30, headers={"authorization": "Bearer secret"})
        assert httpx.get(f"{address}/v1/models").status_code == 401
        body = {"model": "demo", "messages": HELLO, "stream": True, "max_tokens": 150, "ignore_eos": True}
        with keyed.stream("POST", f"{address}/v1/chat/completions", json=body) as s:
            lines = s.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            until(lambda: keyed.get(f"{address}/ready").status_code == 503)
            assert keyed.post(f"{address}/v1/chat/completions", json={**body, "stream": False}).status_code == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(20) == 0
        reader.join()
    said = "".join(rest)
    assert "SIGTERM: no new requests; 1 under way" in said and "finish=length" in said and "status: 1 running" in said


def test_a_taken_port_is_told_before_anything_is_loaded(artifact: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        begun = time.monotonic()
        command = [sys.executable, "-m", "runtime_min", "serve", str(artifact), "--device", "cpu", "--port", port]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    assert done.returncode == 1 and "cannot listen there" in done.stderr and "load:" not in done.stderr
    assert time.monotonic() - begun < 60
