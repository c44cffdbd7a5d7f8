"""Ranks on several GPUs of one host, and the same bodies over gloo on the CPU where no other test has them.

TP and EP are as many GPUs as there are, of 8, 4 or 2. The test of the full geometry needs 70 GB of disk under pytest's
temporary folder.
"""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from convert.demo.checkpoint import write_demo
from convert.demo.geometry import TINY, k26
from runtime_min.artifact import Artifact
from runtime_min.collectives import BUFFER, ONE_SHOT
from runtime_min.engine import Engine, EngineError
from runtime_min.graphs import Graphs
from runtime_min.kernels.race import captured
from runtime_min.kv import batch
from runtime_min.launch import Run, launch
from runtime_min.memory import emptied
from runtime_min.models.decoder import Decoder
from runtime_min.pages import Sequence
from runtime_min.remote import Remote
from runtime_min.request import Limits, Request
from runtime_min.score import score
from specs.mesh import Mesh
from tests.engines import mixed
from tests.lab import converted

ROOT = Path(__file__).parent.parent
COUNT = torch.cuda.device_count()
GPUS = next((n for n in (8, 4, 2) if n <= COUNT), 2)
GPU = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason=f"needs 2 GPUs of one host, {COUNT} are there")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """exact: a dtype that tells wrong from rounded."""

    device: str
    world: int
    exact: str
    bound: float
    steps: int
    requests: int


CPU = Where(device="cpu", world=2, exact="float64", bound=1e-9, steps=16, requests=6)
CUDA = Where(device="cuda", world=GPUS, exact="float32", bound=2e-4, steps=500, requests=500)
# Where other tests do the same on a CPU.
MOSTLY = [pytest.param(CPU, id="cpu", marks=pytest.mark.slow), pytest.param(CUDA, id="cuda", marks=GPU)]
ALONE = [pytest.param(CUDA, id="cuda", marks=GPU)]


def mesh_of(where: Where, kind: str) -> Mesh:
    n = where.world
    return {"one": Mesh(), "tp": Mesh(world=n, tp=n), "ep": Mesh(world=n, tp=n, ep=n)}[kind]


Make = Callable[[Where, str], Path]


def ready(out: Path, where: Where) -> None:
    """Compiles what the artifact's ranks launch in bf16."""
    if where.device == "cuda":
        from runtime_min.kernels.compile import compile_artifact
        from runtime_min.kernels.cubin import arch_here

        compile_artifact(out, arch_here(), len(os.sched_getaffinity(0)), lambda done, total: None)


@pytest.fixture(scope="module")
def made(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Artifacts of the tiny model, each made once."""
    folder = tmp_path_factory.mktemp("ranks")

    def make(where: Where, kind: str) -> Path:
        mesh = mesh_of(where, kind)
        out = folder / str(mesh)
        if not out.exists():
            converted(demo, out, world=mesh.world, tp=mesh.tp, ep=mesh.ep)
            ready(out, where)
        return out

    return make


def same(model: Decoder, value: Any) -> bool:
    """Do all ranks hold the same bits, or the same object?"""
    raw = value.cpu().contiguous().view(torch.uint8).numpy().tobytes() if isinstance(value, Tensor) else repr(value)
    told = hashlib.sha256(raw.encode() if isinstance(raw, str) else raw).hexdigest()
    return len(set(model.ranks.every(told))) == 1


def sums_task(model: Decoder, artifact: Artifact, dtype: torch.dtype) -> tuple[str, list[str]]:
    """What adds up, and where it was wrong: messages of every path, eager and as a graph that runs three times."""
    ranks, device = model.ranks, model.settings.device
    shot, wrong = ONE_SHOT.get(ranks.mesh.world, 0), []
    size = torch.empty((), dtype=dtype).element_size()
    for count in (16, 1000, 7168, 7169, shot // size, shot // size + 8, BUFFER // size, BUFFER // size + 8):
        r = torch.Generator().manual_seed(count)
        # Small integers, whose sums are exact in every order.
        terms = [torch.randint(-8, 9, (count,), generator=r).to(dtype).to(device) for _ in range(ranks.mesh.world)]
        want, mine = torch.stack([t.double() for t in terms]).sum(0).to(dtype), terms[ranks.rank]
        x = mine.clone()
        ranks.sum(x)
        found = [x.clone()]
        if device.type == "cuda":
            graph = captured(lambda x=x: ranks.sum(x))  # type: ignore[misc]
            for _ in range(3):
                x.copy_(mine)
                graph.replay()
                found.append(x.clone())
        wrong += [f"{count} {i}" for i, f in enumerate(found) if not torch.equal(f, want) or not same(model, f)]
    return ranks.sums, wrong


REACH = all(torch.cuda.can_device_access_peer(a, b) for a in range(COUNT) for b in range(COUNT) if a != b)
APART = pytest.mark.skipif(not REACH, reason="needs GPUs that read each other's memory")


@pytest.mark.parametrize(
    ("where", "sums", "dtype"),
    [
        pytest.param(CPU, None, torch.float32, id="cpu"),
        *(
            pytest.param(CUDA, sums, dtype, id=f"cuda-{sums}-{dtype}", marks=[*GPU, *marks])
            for sums, marks in (("auto", []), ("nccl", []), ("symmetric", [APART]))
            for dtype in (torch.bfloat16, torch.float32)
        ),
    ],
)
def test_sums_of_every_size(
    made: Make, where: Where, sums: str | None, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(artifact=made(where, "tp"), device=where.device, dtype=where.exact, sums=sums, check=False)
    told, wrong = launch(run, sums_task, dtype)
    with capsys.disabled():
        print(f"\n--sums {sums}: {told}")
    assert not wrong


def logits_task(model: Decoder, artifact: Artifact, argument: tuple[Tensor, int]) -> tuple[Any, bool]:
    """Logits, as numpy since a tensor's memory would go with the rank, and whether all ranks have the same."""
    ids, chunk = argument
    found = torch.cat([score(model, ids[:1], chunk=ids.shape[1]), score(model, ids[1:], chunk=chunk)])
    return found.numpy(), same(model, found)


def ids_for(vocab: int) -> Tensor:
    return torch.randint(0, vocab, (2, 96), generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize(
    ("where", "sums"),
    [
        pytest.param(CPU, None, id="cpu", marks=pytest.mark.slow),
        pytest.param(CUDA, "auto", id="cuda", marks=GPU),
        pytest.param(CUDA, "nccl", id="cuda-nccl", marks=GPU),
    ],
)
@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_logits_equal_those_of_one_process(made: Make, where: Where, kind: str, sums: str | None) -> None:
    argument = ids_for(TINY.ranks), 7
    want, _ = launch(Run(artifact=made(where, "one"), device=where.device, dtype=where.exact), logits_task, argument)
    run = Run(artifact=made(where, kind), device=where.device, dtype=where.exact, sums=sums)
    found, alike = launch(run, logits_task, argument)
    assert alike and abs(found - want).max() <= where.bound


@pytest.mark.slow
@pytest.mark.parametrize("where", ALONE)
def test_full_geometry_of_four_layers(tmp_path: Path, where: Where, capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU in float32 is the measure, and one GPU in bf16 tells which error is fair."""
    geometry, found = k26(4), dict[str, Tensor]()
    write_demo(tmp_path / "model", geometry)
    argument = ids_for(geometry.ranks), 7
    for kind, dtype in (("one", "float32"), ("one", "bfloat16"), ("tp", "bfloat16"), ("ep", "bfloat16")):
        mesh = mesh_of(where, kind)
        out = tmp_path / str(mesh)
        if not out.exists():
            converted(tmp_path / "model", out, len(os.sched_getaffinity(0)), world=mesh.world, tp=mesh.tp, ep=mesh.ep)
            ready(out, where)
        run = Run(artifact=out, device="cuda", dtype=dtype, verify=False)
        logits, alike = launch(run, logits_task, argument)
        found[f"{kind} {dtype}"] = torch.from_numpy(logits)
        emptied()
        assert alike
        if (kind, dtype) != ("one", "float32"):
            shutil.rmtree(out)
    want = found["one float32"]
    errors = {k: float((f - want).square().mean().sqrt() / want.square().mean().sqrt()) for k, f in found.items()}
    with capsys.disabled():
        print(f"\n{where.world} GPUs, relative errors: {errors}")
    fair = errors["one bfloat16"]
    assert fair > 0 and errors["tp bfloat16"] <= 1.5 * fair and errors["ep bfloat16"] <= 1.5 * fair


def graphs_task(model: Decoder, artifact: Artifact, counts: tuple[int, ...]) -> list[str]:
    """Where a replayed step was not, bit for bit, the eager one, or not the same on all ranks."""
    r, wrong = random.Random(3), []
    cache = model.cache(128 * max(counts))
    rows = cache.rows[:, cache.page_tokens :]
    rows.normal_(generator=torch.Generator(rows.device).manual_seed(1))
    graphs = Graphs(model, cache, counts, 1, cache.pool.count(128))
    graphs.capture()
    for n in counts:
        for real in sorted({n, n // 2 + 1}):
            work = []
            for _ in range(real):
                sequence, length = Sequence(), r.randint(0, 100)
                cache.grow(sequence, length)
                sequence.length = length
                work.append((sequence, [r.randrange(model.dims.vocab)]))
            step = batch(cache, work, padding=n - real)
            graphs.fill(step)
            before = cache.rows.clone()
            eager = model.forward(graphs.batch(n), cache)[:real].clone()
            cache.rows.copy_(before)
            replayed = graphs.replay(step)[:real]
            if not torch.equal(eager, replayed) or not same(model, replayed):
                wrong.append(f"{real} of {n}")
            for sequence, _ in work:
                cache.pool.release(sequence)
    return wrong


@pytest.mark.parametrize("sums", ["auto", "nccl"])
@pytest.mark.parametrize("kind", ["tp", "ep"])
@pytest.mark.parametrize("where", ALONE)
def test_graphs_across_ranks_give_the_bits_of_eager_steps(
    made: Make, where: Where, kind: str, sums: str | None
) -> None:
    run = Run(artifact=made(where, kind), device=where.device, sums=sums)
    assert launch(run, graphs_task, (1, 2, 8, 32)) == []


def decode_task(model: Decoder, artifact: Artifact, steps: int) -> list[list[list[int]]]:
    """Each rank's tokens of four sequences, chosen from its own logits and never compared on the way."""
    cache, sequences = model.cache(4 * (steps + 64)), [Sequence() for _ in range(4)]
    tokens = [[(17 * i + j) % model.dims.vocab for j in range(8 + i)] for i in range(4)]
    for s, ids in zip(sequences, tokens, strict=True):
        ids.append(int(model.forward(batch(cache, [(s, ids)]), cache)[0].argmax()))
    graphs = None
    if model.settings.device.type == "cuda":
        graphs = Graphs(model, cache, (4,), 1, cache.pool.count(steps + 64))
        graphs.capture()
    for _ in range(steps):
        step = batch(cache, [(s, ids[-1:]) for s, ids in zip(sequences, tokens, strict=True)])
        logits = model.forward(step, cache) if graphs is None else graphs.replay(step)
        for ids, token in zip(tokens, logits.argmax(-1).tolist(), strict=True):
            ids.append(token)
    return model.ranks.every(tokens)


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        pytest.param(CPU, "ep", id="cpu", marks=pytest.mark.slow),
        *(pytest.param(CUDA, kind, id=f"cuda-{kind}", marks=GPU) for kind in ("tp", "ep")),
    ],
)
def test_ranks_do_not_diverge_though_each_chooses_by_itself(made: Make, where: Where, kind: str) -> None:
    found = launch(Run(artifact=made(where, kind), device=where.device), decode_task, where.steps)
    assert len(found) == where.world and all(tokens == found[0] for tokens in found)
    assert [len(ids) for ids in found[0]] == [9 + i + where.steps for i in range(4)]
    assert len({token for ids in found[0] for token in ids[-20:]}) > 4


LIMITS = Limits(running=32, step_tokens=256, share=64, cache_tokens=64 * 64, context=1024, graphs=32)


@pytest.mark.parametrize("kind", ["tp", "ep"])
@pytest.mark.parametrize("where", MOSTLY)
def test_the_engine_serves_mixed_requests_and_ends_with_a_dead_rank(made: Make, where: Where, kind: str) -> None:
    with Engine(made(where, kind), LIMITS, device=where.device) as engine:
        link = engine.link
        assert isinstance(link, Remote)
        asked = mixed(where.requests, 5, engine.bounds.vocab)
        results = engine.generate(asked)
        assert [len(r.ids) for r in results] == [a.max_tokens for a in asked]
        assert engine.stats.free == engine.stats.pages and not engine.stats.compiled
        processes = link.processes.processes
        engine.submit(Request(prompt=(1, 2, 3), max_tokens=900))
        while not engine.step(wait=1.0):
            pass
        processes[-1].kill()
        begin = time.monotonic()
        while engine.unfinished:
            engine.step(wait=1.0)
        assert time.monotonic() - begin < 10 and all(p.exitcode is not None for p in processes)
        with pytest.raises(EngineError, match="killed by signal 9"):
            engine.submit(Request(prompt=(1,)))


def ranks_of(server: int) -> list[int]:
    """Processes of a server's ranks, zombies among them."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == server:
                line = (entry / "cmdline").read_bytes()
                found += [int(entry.name)] if b"spawn_main" in line or not line else []
        except OSError:
            continue
    return sorted(found)


@pytest.fixture
def serving() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("where", MOSTLY)
def test_the_server_answers_everyone_and_says_that_a_rank_died(
    made: Make, where: Where, serving: list[subprocess.Popen[str]]
) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    httpx = pytest.importorskip("httpx")
    command = [sys.executable, "-m", "runtime_min", "serve", str(made(where, "ep")), "--device", where.device]
    command += ["--port", "0", "--cache-tokens", "4096", "--context", "1024", "--interval", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    serving.append(server)
    assert server.stderr is not None
    told: list[str] = []
    for line in server.stderr:
        told.append(line)
        if line.startswith("serving: "):
            break
    assert any("sums between ranks: " in line for line in told), told
    threading.Thread(target=server.stderr.read, daemon=True).start()
    web, url = httpx.Client(trust_env=False, timeout=300), told[-1].split()[1]

    def ask(i: int) -> int:
        body = {
            "model": "kimi-k2.6", "messages": [{"role": "user", "content": f"Question {i % 7} " * (1 + i % 9)}],
            "max_tokens": 1 + i % 20, "seed": i, "temperature": (i % 3) / 2, "stream": i % 2 == 0, "ignore_eos": True,
        }  # fmt: skip
        answer = web.post(f"{url}/v1/chat/completions", json=body)
        whole = "data: [DONE]" in answer.text if body["stream"] else '"finish_reason"' in answer.text
        return answer.status_code if whole else 0

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(where.requests))) == {200}
    pids = ranks_of(server.pid)
    assert len(pids) == where.world
    os.kill(pids[1], signal.SIGKILL)
    begin = time.monotonic()
    while ranks_of(server.pid) or web.get(f"{url}/health").status_code != 503:
        assert time.monotonic() - begin < 10
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "killed by signal 9" in web.get(f"{url}/health").text
    assert ask(1) in (0, 503) and web.get(f"{url}/live").status_code == 200
    server.send_signal(signal.SIGTERM)
    assert server.wait(20) == 0
