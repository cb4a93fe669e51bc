"""The test bed's cache: an entry is whole or absent, and built once."""

import threading
from pathlib import Path

import pytest

from tests.vm import cache


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_an_entry_is_built_once_and_then_found() -> None:
    calls = []

    def build(directory: Path) -> None:
        calls.append(directory)
        (directory / "file").write_text("contents")

    first = cache.once("kind/entry", build)
    assert cache.once("kind/entry", build) == first
    assert (first / "file").read_text() == "contents"
    assert len(calls) == 1


def test_a_failed_build_leaves_nothing_and_can_be_repeated() -> None:
    def fail(directory: Path) -> None:
        (directory / "half").touch()
        raise RuntimeError("out of disk")

    with pytest.raises(RuntimeError, match="out of disk"):
        cache.once("kind/entry", fail)
    assert list((cache.root() / "kind").iterdir()) == []
    assert not any(cache.once("kind/entry", lambda directory: None).iterdir())


def test_concurrent_first_uses_build_once() -> None:
    calls = []
    together = threading.Barrier(4)

    def build(directory: Path) -> None:
        calls.append(directory)

    def use() -> None:
        together.wait()
        cache.once("kind/entry", build)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_an_atomic_write_leaves_only_the_file(tmp_path: Path) -> None:
    cache.write_atomically(tmp_path / "default", "one")
    cache.write_atomically(tmp_path / "default", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["default"]
    assert (tmp_path / "default").read_text() == "two"
