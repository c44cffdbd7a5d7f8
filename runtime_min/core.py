"""One rank's engine: commands in, events out, one step at a time.

Every rank runs this same deterministic code on the same commands, which rank 0 shares at the beginning of a step, so no
plan is ever sent. Groups of ranks (tp < world) each have a scheduler, and all ranks know all of them. A step is
launched before the previous one is read: a decode token goes from sampling to the next step on the device, and the host
reads it while that step runs. A request that turns out to have ended is in one step too many, whose result is dropped.
"""

import sys
from collections.abc import Callable
from typing import Any, Self

from runtime_min.artifact import Artifact
from runtime_min.embeddings import Embeddings, Encode
from runtime_min.graphs import Graphs
from runtime_min.graphs import sizes as counts
from runtime_min.kernels.jit import Jit
from runtime_min.kv import LatentCache
from runtime_min.memory import HOST_TOKENS, MemoryPlan, measured
from runtime_min.messages import Close, Command, Event, Finish, Logprob, Stats, Submit
from runtime_min.models.decoder import Decoder
from runtime_min.pages import Pool
from runtime_min.request import Bounds, Limits
from runtime_min.runner import Entry, Flight, Runner
from runtime_min.sampler import FIXED, Row, Sampler
from runtime_min.scheduler import Active, Scheduler
from runtime_min.speculate.draft import Draft
from runtime_min.speculate.drafting import Drafting
from runtime_min.speculate.figures import Acceptance
from runtime_min.speculate.open import opened, paced
from runtime_min.speculate.verify import until, walk
from runtime_min.text import Tokenizer
from runtime_min.vision.encoder import Encoder
from runtime_min.warm import warm
from specs.errors import InputError

Constrain = Callable[[str], Any]


class Core:
    """Requests of all groups, and the tensors of this rank."""

    def __init__(
        self,
        model: Decoder,
        limits: Limits,
        encode: Encode | None = None,
        constrain: Constrain | None = None,
        draft: Draft | None = None,
    ) -> None:
        """encode: what makes embeddings of requests' pictures, None where there can be none; constrain: a request's
        place in its compiled grammar, likewise; draft: what proposes tokens."""
        self.model, self.ranks, self.limits, self.constrain = model, model.ranks, limits, constrain
        self.ranks.agree({"limits": repr(limits)})
        context = min(limits.context or model.dims.context, model.cos.shape[0])
        if model.settings.device.type == "cuda" and isinstance(model.ops.kernels, Jit):
            warm(model, limits.step_tokens, limits.spec_tree > 0)
            if draft is not None:
                draft.warm(limits.step_tokens)
        self.pace = None if draft is None else paced(draft, limits)
        self.memory: MemoryPlan | None = measured(model, limits, context, encode, draft, self.pace)
        size = limits.page_tokens
        pages = -(-(limits.cache_tokens or HOST_TOKENS) // size) if self.memory is None else self.memory.pages
        pages = min(self.ranks.every(pages))
        cache = model.cache(pages * size, size)
        pools = [cache.pool if g == self.ranks.group else Pool(pages, size) for g in range(self.ranks.groups)]
        self.schedulers = [Scheduler(pool, limits, self.pace) for pool in pools]
        self.bounds = Bounds(
            vocab=model.dims.vocab, context=context, cache_tokens=pages * size, sees=encode is not None
        )
        self.runner = self._runner(cache, encode, draft)
        self.active: dict[int, tuple[Scheduler, Active]] = {}
        self.flight: Flight | None = None
        self.accepted = None if draft is None else Acceptance()
        self.warned = False
        self.closed = False
        self.ready = self.compiled
        if self.ranks.rank == 0:
            sys.stderr.write("".join(f"{line}\n" for line in self._lines()))

    def _runner(self, cache: LatentCache, encode: Encode | None, draft: Draft | None) -> Runner:
        """What runs steps over this cache, its graphs captured."""
        model, limits = self.model, self.limits
        sampler = Sampler(limits.running, model.dims.vocab, model.settings.device)
        embeddings = None if encode is None else Embeddings(encode, limits.pictures)
        drafting = None
        if draft is not None and self.pace is not None:
            draft.bind(cache)
            drafting = Drafting(
                draft=draft, model=model, cache=cache, sampler=sampler, embeddings=embeddings,
                trees=limits.spec_tree > 0, depth=self.pace.tokens,
            )  # fmt: skip
        graphs = verify = None
        if self.memory is not None and limits.graphs and model.ops.kernels is not None:
            whole = min(self.bounds.context, self.bounds.cache_tokens)
            graphs = Graphs(model, cache, counts(limits.graphs), 1, cache.pool.count(whole))
            graphs.capture()
            if draft is not None and self.pace is not None:
                most, width = counts(self.pace.rows(limits.graphs)), cache.pool.count(whole + self.pace.most)
                verify = Graphs(model, cache, most, 1 + self.pace.most, width, draft.taps, limits.spec_tree > 0)
                verify.capture()
        return Runner(
            model=model, cache=cache, sampler=sampler, graphs=graphs, embeddings=embeddings, drafting=drafting,
            verify=verify,
        )  # fmt: skip

    @classmethod
    def load(cls, model: Decoder, artifact: Artifact, limits: Limits) -> Self:
        """The core over an artifact's model, over its vision part if it has one, and a draft if one is asked for."""
        seeing = artifact.has_vision
        encode = Encoder.load(artifact, model.ops, model.ranks, model.settings) if seeing else None
        draft = None if limits.draft is None else opened(artifact, limits.draft, model)
        return cls(model, limits, encode, _constrain(artifact) if limits.grammars else None, draft)

    def _lines(self) -> list[str]:
        """What is told at the start: what memory is spent on, and what can be asked from now on."""
        graphs = self.runner.graphs
        captured = "no graphs" if graphs is None else f"graphs of {', '.join(map(str, graphs.counts))} tokens"
        b, groups, running = self.bounds, self.ranks.groups, self.limits.running
        ready = (
            f"ready: {groups * running} requests at once, {groups * b.cache_tokens} tokens in the cache, context "
            f"{b.context}, {captured}, {self.ready} kernels compiled here"
        )
        return [ready] if self.memory is None else [self.memory.line(), ready]

    @property
    def compiled(self) -> int:
        """Kernels that were compiled in this process so far. Past `ready` it must not grow."""
        kernels = self.model.ops.kernels
        return 0 if kernels is None else kernels.compiled

    @property
    def stats(self) -> Stats:
        s = self.schedulers
        return Stats(
            running=sum(len(x.running) for x in s),
            waiting=sum(len(x.waiting) for x in s),
            pages=sum(x.pool.pages for x in s),
            free=sum(x.pool.available for x in s),
            preempted=sum(x.preempted for x in s),
            compiled=self.compiled - self.ready,
            drafts=self.accepted,
        )

    @property
    def busy(self) -> bool:
        return bool(self.active) or self.flight is not None

    def step(self, commands: list[Command]) -> list[Event]:
        """Obeys rank 0's commands, launches the next step, reads the one before. Every call with requests under way
        does one of the latter two, or something is wrong with the scheduler, and that is raised."""
        events = [event for command in self.ranks.shared(commands) for event in self._obey(command)]
        if any(a.drafting for _, a in self.active.values()):
            return events + self._in_turn()
        plans = [s.plan() for s in self.schedulers]
        flight, self.flight = self.flight, self.runner.launch(plans) if any(plans) else None
        if flight is not None:
            events += self._read(flight)
        elif self.flight is None and self.active:
            raise self._stuck()
        return events

    def _in_turn(self) -> list[Event]:
        """A step that is read before the next one is planned, since how long the accepted runs are decides what that
        one computes."""
        flight, self.flight = self.flight, None
        events = [] if flight is None else self._read(flight)
        plans = [s.plan() for s in self.schedulers]
        if any(plans):
            events += self._read(self.runner.launch(plans))
        elif self.active and flight is None:
            raise self._stuck()
        return events

    def _stuck(self) -> Exception:
        return RuntimeError(f"engine: {len(self.active)} requests, none of which can go on: {sorted(self.active)}")

    def follow(self) -> None:
        """Ranks other than 0: steps until rank 0 closes."""
        while not self.closed:
            self.step([])

    def _obey(self, command: Command) -> list[Event]:
        if isinstance(command, Close):
            self.closed = True
        elif isinstance(command, Submit):
            return self._admit(command)
        elif command.id in self.active:
            return [self._end(self.active[command.id][1], "cancelled")]
        return []

    def _admit(self, command: Submit) -> list[Event]:
        """A new request goes to the group with the fewest; pictures are looked at first."""
        scheduler = min(self.schedulers, key=lambda s: len(s.running) + len(s.waiting))
        request = command.request
        a = Active(command.id, request, command.seed, list(request.prompt))
        if self.runner.embeddings is not None:
            try:
                for m in request.media:
                    self.runner.embeddings.encode.check(m.item, m.tokens)
            except InputError as e:
                return [Event(id=a.id, finish="error", error=f"pictures: {e}")]
        if request.grammar is not None:
            if self.constrain is None:
                return [Event(id=a.id, finish="error", error="grammars: this engine was started without them")]
            a.constraint = self.constrain(request.grammar)
        a.drafting = self.pace is not None and request.draft and self.pace.begins()
        self.active[a.id] = scheduler, a
        scheduler.add(a)
        return []

    def _end(self, a: Active, finish: Finish, **news: Any) -> Event:
        scheduler, _ = self.active.pop(a.id)
        scheduler.finish(a, poisoned=finish == "error")
        return Event(id=a.id, finish=finish, cached=a.cached or 0, **news)

    def _read(self, flight: Flight) -> list[Event]:
        events = []
        for group, results in zip(flight.entries, flight.read(), strict=True):
            for e in group:
                if not e.active.done:
                    events += self._heard(e, results[e.first : e.first + len(e.rows)])
        if flight.marks and self.accepted is not None:
            self.accepted = self.accepted.took(*flight.times())
            self._warn(self.accepted)
        return events

    def _warn(self, found: Acceptance) -> None:
        """Says once that drafts are useless."""
        line = None if self.warned else found.warning()
        if line is not None:
            self.warned = True
            if self.ranks.rank == 0:
                sys.stderr.write(f"{line}\n")

    def _heard(self, e: Entry, results: list[list[float]]) -> list[Event]:
        """What one request's rows of a step mean for it."""
        a = e.active
        a.pending -= e.sampled
        if e.drafted:
            return self._verified(e, results)
        if not all(r[1] for r in results):
            return [self._end(a, "error", error=f"logits after token {e.length} are not finite; the request was ended")]
        self.active[a.id][0].commit(a, e.length)
        told = [_logprob(r, row) for r, row in zip(results, e.rows, strict=True)]
        known = [(row.position, p) for p, row in zip(told, e.rows, strict=True) if row.target is not None]
        # After a preemption prompt tokens are computed again; they are reported once.
        scored = tuple(p for position, p in known if p is not None and position > a.scored)
        a.scored += len(scored)
        if not e.sampled:
            return [Event(id=a.id, scored=scored)] if scored else []
        return [self._told(a, [int(results[-1][0])], [told[-1]], scored=scored)]

    def _verified(self, e: Entry, results: list[list[float]]) -> list[Event]:
        """What the rows behind a token and its drafts mean: a run of tokens, up to the first that ends the request."""
        assert self.pace is not None and self.accepted is not None
        a, start = e.active, e.length - 1
        path = walk(*([int(r[column]) for r in results] for column in (0, 3, 4)))
        finite = next((i for i, node in enumerate(path) if not results[node][1]), len(path))
        # A drafted token may have spoilt even the rows before it: what is not finite is computed again without drafts.
        a.drafting &= finite == len(path)
        path = path[:finite]
        tokens = until(a.request.stops, (int(results[node][0]) for node in path))
        accepted = max(0, min(len(tokens), len(path) - 1))
        self.pace.heard(a.pace, accepted, min(e.drafted, self.pace.tokens, a.left - 1))
        self.accepted = self.accepted.plus(e.drafted, accepted)
        self._stands(a, start, path, tokens)
        if not tokens:
            return []
        told = [_logprob(results[node], e.rows[0]) for node in path[: len(tokens)]]
        return [self._told(a, tokens, told, drafted=e.drafted, accepted=accepted)]

    def _stands(self, a: Active, start: int, path: list[int], tokens: list[int]) -> None:
        """Keeps of a verified step what was accepted."""
        scheduler, _ = self.active[a.id]
        if scheduler is self.schedulers[self.ranks.group] and self.runner.drafting is not None:
            self.runner.drafting.accept(a, start, path)
            if a.request.sampling.penalised and a.slot is not None:
                self.runner.sampler.count(a.slot, tokens)
        a.sequence.length = start + len(path)
        scheduler.commit(a, a.sequence.length)

    def _told(self, a: Active, tokens: list[int], told: list[Logprob | None], **news: Any) -> Event:
        """The event of new tokens, which may end the request: by a stop, else by their number."""
        a.tokens += tokens
        news |= {"tokens": tuple(tokens), "logprobs": tuple(p for p in told if p is not None)}
        if tokens[-1] in a.request.stops:
            return self._end(a, "stop", **news)
        if len(a.tokens) - len(a.request.prompt) == a.request.max_tokens:
            return self._end(a, "length", **news)
        return Event(id=a.id, cached=a.cached or 0, **news)


def _constrain(artifact: Artifact) -> Constrain:
    """Places in grammars over the tokens of an artifact."""
    from runtime_min.grammar import Constraint, vocabulary

    known = vocabulary(Tokenizer.open(artifact.path))
    return lambda compiled: Constraint(compiled, known)


def _logprob(result: list[float], row: Row) -> Logprob | None:
    wanted = row.sampling.logprobs
    if wanted is None:
        return None
    tops = (len(result) - FIXED) // 2
    pairs = zip(map(int, result[FIXED : FIXED + tops]), result[FIXED + tops :], strict=True)
    token = int(result[0]) if row.target is None else row.target
    return Logprob(token=token, logprob=result[2], top=tuple(pairs)[:wanted])
