"""Prometheus: a collector of the counters of `aiordma.statistics`, for prometheus_client.

prometheus_client.REGISTRY.register(aiordma.integrations.prometheus.DeviceCollector())
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aiordma._base.socket_address import address_text
from aiordma._connection.listener_endpoint import open_listeners
from aiordma._runtime.device_statistics import statistics

__all__ = ("DeviceCollector",)

_COUNTERS = (
    ("polls", "Polls of the completion queues"),
    ("wakes", "Wake-ups of event loops by a completion channel"),
    ("completion_events", "Completion events taken from the channels"),
    ("completions", "Completions polled"),
    ("registration_cache_hits", "Registrations of the cache that were used again"),
    ("registration_cache_misses", "Registrations that were made for the cache"),
    ("refused_accesses", "Connections that ended by a refused access of the peer's"),
)
_REQUEST_COUNTERS = (
    ("posted_sends", "Requests posted to send queues"),
    ("posted_receives", "Receives posted"),
    ("flushed", "Requests of the program that the end of a connection flushed"),
    ("discarded", "Requests that ended without a completion"),
    ("bytes_sent", "Bytes of completed messages and WRITEs"),
    ("bytes_received", "Bytes of completed receives and READs"),
    ("queue_full_waits", "Waits for a slot of a full queue"),
)


_LISTENER_COUNTERS = (
    ("connection_requests", "Connection requests that arrived"),
    ("established", "Connections that were accepted and established"),
    ("rejected", "Connection requests that the program rejected"),
    ("backlog_full", "Connection requests that found a full backlog"),
    ("failed", "Connection requests whose accept failed"),
    ("without_handshake", "Peers that connected by plain TCP"),
)


class DeviceCollector(Collector):
    """Collects the counters of each device of this process, labelled with the device's name, and
    those of each open listener, labelled with its address. The names are `aiordma_` and those of
    DeviceStatistics and RequestStatistics, and `aiordma_listener_` and those of
    ListenerStatistics."""

    def collect(self) -> Iterator[Metric]:
        """Return the metrics. prometheus_client calls this, in any thread."""
        devices = statistics()
        for name, text in _COUNTERS:
            counter = CounterMetricFamily(f"aiordma_{name}", text, labels=["device"])
            for device, each in devices.items():
                counter.add_metric([device], getattr(each, name))
            yield counter
        for name, text in _REQUEST_COUNTERS:
            counter = CounterMetricFamily(f"aiordma_{name}", text, labels=["device"])
            for device, each in devices.items():
                counter.add_metric([device], getattr(each.requests, name))
            yield counter
        completed = CounterMetricFamily(
            "aiordma_completed", "Requests completed without an error", labels=["device", "opcode"]
        )
        failed = CounterMetricFamily(
            "aiordma_failed", "Requests completed with an error", labels=["device", "status"]
        )
        queues = GaugeMetricFamily(
            "aiordma_queues", "Connections and other queues", labels=["device"]
        )
        in_flight = GaugeMetricFamily("aiordma_in_flight", "Requests in flight", labels=["device"])
        for device, each in devices.items():
            for opcode, count in each.requests.completed.items():
                completed.add_metric([device, opcode.name], count)
            for status, count in each.requests.failed.items():
                failed.add_metric([device, status.name], count)
            queues.add_metric([device], each.queues)
            in_flight.add_metric([device], each.requests.in_flight)
        yield from (completed, failed, queues, in_flight)
        listeners = [
            (address_text(each.local_address), each.statistics()) for each in open_listeners()
        ]
        for name, text in _LISTENER_COUNTERS:
            counter = CounterMetricFamily(f"aiordma_listener_{name}", text, labels=["listener"])
            for address, statistics_ in listeners:
                counter.add_metric([address], getattr(statistics_, name))
            yield counter
        waiting = GaugeMetricFamily(
            "aiordma_listener_waiting", "Connection requests in the backlog", labels=["listener"]
        )
        for address, statistics_ in listeners:
            waiting.add_metric([address], statistics_.waiting)
        yield waiting
