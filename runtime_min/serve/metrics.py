"""What the server counts: for Prometheus, and for its own line of status."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime_min.messages import Event
from runtime_min.serve.jobs import Job
from runtime_min.serve.pump import Pump
from runtime_min.text.parser import Parser

WAITS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 5)


@dataclass(slots=True)
class Clock:
    """When things happened to one job, in seconds of `time.monotonic`."""

    begun: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0

    def token(self) -> float | None:
        """Notes that tokens came; the seconds since the ones before."""
        now = time.monotonic()
        gap = None if self.first is None else now - self.last
        self.first = now if self.first is None else self.first
        self.last = now
        return gap


class Drafts(Collector):
    """Sums about drafted tokens, of which the usual figures are made: acceptance rate = accepted / draft_tokens, mean
    accept length = 1 + accepted / drafts, rate at a position = accepted_at / drafts. Nothing without a draft."""

    def __init__(self, pump: Pump) -> None:
        self.pump = pump

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        found = self.pump.engine.stats.drafts
        if found is None:
            return
        told = {
            "drafts": ("Steps of requests that had drafts.", found.drafts),
            "draft_tokens": ("Drafted tokens.", found.draft_tokens),
            "accepted": ("Of them, accepted and given out.", found.accepted),
            "draft_seconds": ("Spent on drafting.", found.draft_ms / 1e3),
            "verify_seconds": ("Spent on the target's part of the same steps.", found.verify_ms / 1e3),
        }
        for name, (what, value) in told.items():
            yield CounterMetricFamily(f"kiln_spec_{name}", what, value=value)
        places = CounterMetricFamily(
            "kiln_spec_accepted_at", "Accepted runs that reach a position.", labels=["position"]
        )
        for i, count in enumerate(found.accepted_at, start=1):
            places.add_metric([str(i)], count)
        yield places


class Metrics:
    """One server's numbers, in a registry of their own."""

    def __init__(self, pump: Pump) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kiln_requests", "Requests by endpoint and how they ended.", ["endpoint", "finish"], registry=self.registry
        )
        self.prompt = Counter("kiln_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.cached = Counter("kiln_cached_tokens", "Of them, taken from the prefix cache.", registry=self.registry)
        self.made = Counter("kiln_completion_tokens", "Generated tokens.", registry=self.registry)
        self.unreadable = Counter(
            "kiln_unreadable_tool_calls", "Calls whose id names no tool; shown as text.", registry=self.registry
        )
        self.first = Histogram(
            "kiln_first_token_seconds", "From arrival to the first token.", buckets=WAITS, registry=self.registry
        )
        self.gap = Histogram("kiln_token_seconds", "Between tokens of a stream.", buckets=TOKEN, registry=self.registry)
        self.whole = Histogram("kiln_request_seconds", "Of whole requests.", buckets=WAITS, registry=self.registry)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "requests_under_way": ("Requests that the engine has.", lambda: pump.busy),
            "requests_running": ("Requests in the engine's steps.", lambda: pump.engine.stats.running),
            "requests_waiting": ("Requests that wait for room.", lambda: pump.engine.stats.waiting),
            "cache_pages": ("Pages of the cache.", lambda: pump.engine.stats.pages),
            "cache_pages_free": ("Pages that no request holds.", lambda: pump.engine.stats.free),
            "preemptions": ("Requests that had to give up their pages.", lambda: pump.engine.stats.preempted),
            "kernels_compiled": ("Kernels compiled since the start; none should.", lambda: pump.engine.stats.compiled),
        }
        for name, (what, value) in gauges.items():
            Gauge(f"kiln_{name}", what, registry=self.registry).set_function(value)
        self.registry.register(Drafts(pump))

    def heard(self, event: Event) -> None:
        """Counts an event of the engine."""
        self.made.inc(len(event.tokens))

    def begun(self, job: Job) -> None:
        """Counts a request that the engine has taken."""
        self.prompt.inc(job.prompt_tokens)

    def ended(self, endpoint: str, finish: str, job: Job, clock: Clock) -> None:
        """Counts how it ended."""
        self.requests.labels(endpoint, finish).inc()
        self.cached.inc(sum(c.cached for c in job.choices))
        self.unreadable.inc(sum(c.reader.unreadable for c in job.choices if isinstance(c.reader, Parser)))
        self.whole.observe(time.monotonic() - clock.begun)

    def total(self, counter: Counter) -> float:
        """The value of a counter without labels."""
        return sum(sample.value for metric in counter.collect() for sample in metric.samples if "total" in sample.name)

    def page(self) -> bytes:
        return generate_latest(self.registry)
