"""Rows of this machine: aiordma beside the same work in C, both on the software device.

They say what Python costs where the processor is no emulated one.
"""

from collections.abc import Callable
from functools import partial

from aiordma.bench.workload import Workload

from .candidates import Candidates
from .rows import LESS, MORE, Reading, Row, latency, rate
from .rxe import WINDOW, after_other_code
from .same_work import measured

LARGE = 65536
DEPTH = 16
"""Messages in flight."""
ANSWERED = 32
"""Messages in flight that are answered."""
BLOCKS = 34
"""Into which messages of LARGE bytes arrive: on both sides what `aiordma bench` posts for views."""


def rows(here: Candidates) -> list[Row]:
    """Return them all."""
    return [
        _row(
            here, "software/send_receive/64/polling", Workload("echo", 64), "C, polling", limit=1.1
        ),
        _row(
            here,
            "software/send_receive/64/beside_events_in_c",
            Workload("echo", 64),
            "C, sleeping",
            limit=0.5,
            refer_polling=False,
        ),
        _row(
            here,
            "software/send_receive/64/events",
            Workload("echo", 64),
            "C, sleeping",
            limit=1.5,
            polling=False,
            refer_polling=False,
        ),
        _row(here, "software/read/64", Workload("read", 64), "C, polling", limit=1.1),
        _row(here, "software/write/64", Workload("write", 64), "C, polling", limit=1.1),
        _row(
            here,
            f"software/write/64/window{WINDOW}",
            Workload("write", 64, WINDOW),
            "C, polling",
            limit=0.95,
        ),
        _row(
            here,
            f"software/send/64/window{WINDOW}",
            Workload("send", 64, WINDOW),
            "C, polling",
            limit=0.95,
        ),
        Row(
            "software/messages/64/beside_posts",
            "us",
            lambda: latency(here.rdma(Workload("messages", 64))),
            "echo by post_send and post_recv",
            lambda: latency(here.rdma(Workload("echo", 64))),
            limit=1 / 0.9,
        ),
        Row(
            f"software/messages/64/window{ANSWERED}",
            "per second",
            lambda: rate(here.rdma(Workload("messages", 64, ANSWERED), timed=False)),
            "echo by post_send and post_recv, as many in flight",
            lambda: rate(here.rdma(Workload("echo", 64, ANSWERED), timed=False)),
            limit=0.8,
            better=MORE,
            note="send_ahead on both sides",
        ),
        Row(
            f"software/echo/64/window{ANSWERED}/beside_tcp",
            "per second",
            lambda: rate(here.rdma(Workload("echo", 64, ANSWERED), timed=False)),
            "asyncio TCP streams, as many in flight",
            lambda: rate(here.streams(64, depth=ANSWERED)),
            limit=0.3,
            better=MORE,
        ),
        Row(
            f"software/views/{LARGE}",
            "per second",
            lambda: rate(here.rdma(Workload("views", LARGE, DEPTH), timed=False)),
            f"the same in C, sleeping, into {BLOCKS} blocks",
            partial(_received_in_c, here, BLOCKS),
            limit=0.95,
            better=MORE,
        ),
        Row(
            f"software/views/{LARGE}/in_c",
            "per second",
            partial(_received_in_c, here, BLOCKS),
            "C, sleeping, with memory for 512 blocks",
            partial(_received_in_c, here, 512),
            better=MORE,
            note=f"C alone, into {BLOCKS} blocks: what the processor's cache does",
        ),
        after_other_code(here, "software/write/64/post_in_c"),
    ]


def _received_in_c(here: Candidates, receives: int) -> Reading:
    work = Workload("send", LARGE, DEPTH)
    return measured(here.host, here.device, work, here.seconds, False, receives)


def _row(
    here: Candidates,
    name: str,
    work: Workload,
    reference: str,
    *,
    limit: float | None = None,
    polling: bool = True,
    refer_polling: bool = True,
) -> Row:
    is_rate = work.depth > 1

    def candidate() -> Reading:
        found = here.rdma(work, polling=polling, timed=not is_rate)
        return rate(found) if is_rate else latency(found)

    refer: Callable[[], Reading] = partial(
        measured, here.host, here.device, work, here.seconds, refer_polling
    )
    return Row(
        name,
        "per second" if is_rate else "us",
        candidate,
        f"the same in {reference}",
        refer,
        limit,
        MORE if is_rate else LESS,
    )
