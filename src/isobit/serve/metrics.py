"""Metrics for Prometheus: counts of requests, tokens and times, and the load of the engine."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from isobit.serve.admission import Gate
from isobit.serve.engine import EngineThread
from isobit.serve.served_request import ServedRequest


class Metrics:
    """Counts, times and gauges of a server."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, thread: EngineThread, gate: Gate) -> None:
        self.registry = CollectorRegistry()
        where = {"registry": self.registry, "namespace": "isobit"}
        self.requests = Counter("requests", "Requests, by status", ["route", "status"], **where)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts", **where)
        self.tokens = Counter("generated_tokens", "Tokens drawn", **where)
        self.run_tokens = Counter("run_tokens", "Tokens drawn for runs", **where)
        self.kept_tokens = Counter("kept_tokens", "Of these, told once more to a run", **where)
        self.seconds = Histogram("request_seconds", "Time of what the engine served", **where)
        self.first = Histogram("time_to_first_token_seconds", "Of streams", **where)
        engine = thread.engine
        for name, text, value in (
            ("samples_in_place", "Samples that are served or wait", lambda: gate.taken),
            ("samples_live", "Samples of the engine", lambda: engine.num_live),
            ("samples_running", "Samples that decode", lambda: engine.num_running),
            ("kv_pages", "Pages of the KV cache", lambda: engine.limits.num_pages),
            ("kv_pages_free", "Pages that nobody holds", lambda: engine.free_pages),
        ):
            Gauge(name, text, **where).set_function(value)

    def page(self) -> bytes:
        """All of them, as ``content_type`` says."""
        return generate_latest(self.registry)

    def count(self, work: ServedRequest) -> None:
        """Count a request to the engine, at its end."""
        self.prompt_tokens.inc(work.usage.prompt_tokens)
        self.tokens.inc(work.usage.completion_tokens)
        self.seconds.observe(time.perf_counter() - work.begun_at)
        if work.first_at is not None:
            self.first.observe(work.first_at - work.begun_at)
