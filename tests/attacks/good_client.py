"""A well-behaved client: echoes messages through aiordma, from a thread with its own loop."""

import threading
from functools import partial
from types import TracebackType

import anyio

import aiordma
from tests.attacks.victim import HOST

PROGRESS_SECONDS = 60
"""After which a client that made no progress counts as locked out. It is no measure of speed."""


class GoodClient:
    """Connects to the victim, which echoes, and sends one message after the other.

    `rounds` counts those that came back. `must_progress(n)` waits for n more.
    """

    def __init__(self, port: int, source: str = HOST) -> None:
        self._port = port
        self._source = source, 0
        self.rounds = 0
        self._is_over = False
        self._error: BaseException | None = None
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            anyio.run(self._echo)
        except BaseException as error:
            self._error = error
        with self._progress:
            self._progress.notify_all()

    async def _echo(self) -> None:
        async with await aiordma.connect(
            HOST, self._port, device="software", timeout=PROGRESS_SECONDS, source=self._source
        ) as connection:
            while not self._is_over:
                sent = b"round %d" % self.rounds
                with anyio.fail_after(PROGRESS_SECONDS):
                    await connection.send(sent)
                    assert bytes(await connection.receive()) == sent
                with self._progress:
                    self.rounds += 1
                    self._progress.notify_all()

    def must_progress(self, rounds: int = 20) -> None:
        """Fail unless so many more messages come back, each within a minute."""
        with self._progress:
            goal = self.rounds + rounds
            while self.rounds < goal:
                before = self.rounds
                # The client may have failed before this thread waits.
                self._progress.wait_for(partial(self._is_beyond, before), 2 * PROGRESS_SECONDS)
                if self._error is not None:
                    raise AssertionError("the good client failed") from self._error
                assert self.rounds > before, f"the good client is locked out after {before} rounds"

    def _is_beyond(self, rounds: int) -> bool:
        return self.rounds > rounds or self._error is not None

    def __enter__(self) -> "GoodClient":
        self._thread.start()
        self.must_progress(1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over = True
        self._thread.join(2 * PROGRESS_SECONDS)
        if kind is None and self._error is not None:
            raise AssertionError("the good client failed") from self._error
