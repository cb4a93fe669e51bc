"""The documentation's blocks that are no programs: their commands exist, and their YAML parses.

tests/docs runs the programs.
"""

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from aiordma.cli import commands
from tests.unit.sources import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"", "console", "python", "text", "yaml"}
OTHERS = {
    "dask",
    "docker",
    "jq",
    "modprobe",
    "rdma",
    "sort",
    "tail",
    "tshark",
    "uvicorn",
    "valkey-server",
}
"""Commands of other packages."""
PLACEHOLDERS = r"[A-Z_]+"


def _blocks(language: str) -> Iterator[Any]:
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            if match[1] == language:
                line = text.count("\n", 0, match.start()) + 1
                yield pytest.param(match[2], id=f"{page.relative_to(ROOT)}:{line}")


def _commands(block: str) -> Iterator[list[str]]:
    """Return the words of each command of a console block."""
    block = block.replace("\\\n", " ")
    for line in re.findall(r"^[$#] (.*)$", block, re.MULTILINE):
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for word in lexer:
            if word in ("|", "&&", ";"):
                yield words
                words = []
            elif word not in (">", "<") and (words or not re.match(r"\w+=", word)):
                words.append(word)
        yield words


@cache
def _our_command() -> Any:
    """Return the command `aiordma`, which `main` makes and runs."""
    made: list[typer.Typer] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.Typer, "__call__", lambda app, *_arguments, **_names: made.append(app))
        commands.main()
    return typer.main.get_command(made[0])


def _check(words: list[str]) -> None:
    command, *rest = words
    if command == "aiordma":
        _check_ours(_our_command(), rest)
    elif command == "python" and rest[0].endswith(".py"):
        text = (ROOT / rest[0]).read_text()
        assert all(word in text for word in rest if word.startswith("--")), rest
    elif command == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in rest:
            name, _, value = word.partition("=")
            target = rf"^[\w -]*\b{re.escape(name)}\b[\w -]*:(?!=)"
            assert value or re.search(target, makefile, re.MULTILINE), word
    elif command == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert rest[0] == "install"
        for extra in re.findall(r"aiordma\[(\w+)\]", " ".join(rest)):
            assert extra in project["optional-dependencies"]
    else:
        assert command in OTHERS, f"no command of ours, and not in OTHERS: {words}"


def _check_ours(command: Any, words: list[str]) -> None:
    for word in words:
        if command.name == "exec":
            return  # what follows is another program's
        parts = getattr(command, "commands", {})
        if word in parts:
            command = parts[word]
        elif word.startswith("-"):
            known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
            assert word.partition("=")[0] in known | {"--help", "--version"}, (command.name, word)
        else:
            assert not parts or re.fullmatch(PLACEHOLDERS, word), f"no command: {word}"


def test_every_block_has_a_known_language() -> None:
    found = {match[1] for page in PAGES for match in BLOCK.finditer(page.read_text())}
    assert found <= LANGUAGES


SESSIONS = [each for each in _blocks("text") if re.search(r"^\$ ", each.values[0], re.MULTILINE)]
"""Blocks with commands that tests/docs is not to run."""


@pytest.mark.parametrize("block", [*_blocks("console"), *SESSIONS])
def test_commands_of_a_block_exist(block: str) -> None:
    found = list(_commands(block))
    assert found
    for words in found:
        _check(words)


@pytest.mark.parametrize("block", [*_blocks("yaml")])
def test_yaml_parses(block: str) -> None:
    yaml = importlib.import_module("yaml")  # without stubs
    assert isinstance(yaml.safe_load(block), dict)


def test_text_blocks_have_no_commands() -> None:
    """They would not be checked."""
    command = re.compile(r"^(docker |kubectl |pip |apt |apiVersion)", re.MULTILINE)
    found = [
        f"{page.relative_to(ROOT)}: {match[2][:40]}"
        for page in PAGES
        for match in BLOCK.finditer(page.read_text())
        if match[1] in ("", "text") and command.search(match[2])
    ]
    assert found == []


def test_pages_of_the_reference_are_linked_by_files_that_exist() -> None:
    text = (ROOT / "docs/site/reference.py").read_text()
    links = re.findall(r"\]\(\.\./([\w/-]+\.md)\)", text)
    assert links
    assert [each for each in links if not Path(ROOT / "docs" / each).is_file()] == []
