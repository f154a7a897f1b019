"""The metrics of all replicas as one text for Prometheus, each sample with the label ``replica``.

A replica is called by its rank, from 0 up, so that the labels stay the same when replicas are replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from ..knowledge.replicas import TrackedReplica

OUTCOMES = ("ok", "refused", "full", "failed", "cut", "left")
"""What becomes of a request: it is answered, a replica refuses it, all were full, no replica answered, its replica died
in the midst of the answer, or its client has gone."""


class FrontFigures:
    """What a front counts itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "prefixloom:fleet_requests", "requests by what became of them", ["outcome"], registry=self.registry
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome=outcome)
        self.retries = Counter(
            "prefixloom:fleet_retries", "tries that another replica took over", registry=self.registry
        )
        self.promised = Counter(
            "prefixloom:fleet_promised_tokens", "tokens that events said would hit", registry=self.registry
        )

    def text(self) -> bytes:
        text: bytes = generate_latest(self.registry)
        return text


def gauges_of(known: Iterable[TrackedReplica], ranks: Mapping[str, str]) -> Iterable[Metric]:
    """Return gauges of the figures that a router knows of each replica."""
    running = GaugeMetricFamily("prefixloom:fleet_running", "requests under way at a replica", labels=["replica"])
    ahead = GaugeMetricFamily("prefixloom:fleet_tokens_ahead", "tokens of prompts to be computed", labels=["replica"])
    heard = GaugeMetricFamily("prefixloom:fleet_events_used", "1: its events are gone by", labels=["replica"])
    for each in known:
        labels = [ranks.get(each.name, "?")]
        running.add_metric(labels, each.running)
        ahead.add_metric(labels, each.tokens_ahead)
        heard.add_metric(labels, 0 if each.doubt else 1)
    return running, ahead, heard


def together(texts: Mapping[str, str]) -> bytes:
    """Return the texts of several replicas, by rank, as one."""
    families: dict[str, Metric] = {}
    for rank, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text):
            whole = families.get(family.name)
            if whole is None:
                whole = families[family.name] = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                whole.add_sample(sample.name, {**sample.labels, "replica": rank}, sample.value)
    return exposed(families.values())


def exposed(families: Iterable[Metric]) -> bytes:
    class Ready:
        def collect(self) -> Iterable[Metric]:
            return families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Ready())
    text: bytes = generate_latest(registry)
    return text
