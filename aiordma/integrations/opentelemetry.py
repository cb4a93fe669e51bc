"""OpenTelemetry: a span for each work request.

    with aiordma.trace(aiordma.integrations.opentelemetry.RequestSpans()):
        ...

To relate the spans of two programs, carry the traceparent in your message: docs/observability.md.
"""

from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from aiordma._runtime.tracing import TracedRequest

__all__ = ("RequestSpans",)

SUCCESS = "SUCCESS"


class RequestSpans:
    """Makes a span of each traced request; an argument of `aiordma.trace`.

    Args:
        tracer: makes the spans; None: that of the global tracer provider.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = trace.get_tracer("aiordma") if tracer is None else tracer

    def __call__(self, requests: Sequence[TracedRequest]) -> None:
        """Make the spans of these requests."""
        for request in requests:
            host, _, port = (request.peer or "").rpartition(":")
            peer: dict[str, str | int] = {}
            if port:
                peer = {"network.peer.address": host.strip("[]"), "network.peer.port": int(port)}
            span = self._tracer.start_span(
                f"rdma {request.operation}",
                kind=SpanKind.CONSUMER if request.operation == "RECV" else SpanKind.PRODUCER,
                start_time=request.posted_ns,
                attributes={
                    "rdma.operation": request.operation,
                    "rdma.bytes": request.bytes,
                    "rdma.status": request.status,
                    "rdma.device": request.device,
                    "rdma.qp_num": request.qp_num,
                    **peer,
                },
            )
            if request.status != SUCCESS:
                span.set_status(Status(StatusCode.ERROR, request.status))
            span.end(end_time=request.posted_ns + request.latency_ns)
