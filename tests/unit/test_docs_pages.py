"""The pages of docs/: their links lead somewhere, and what they quote is what the package says."""

from __future__ import annotations

import doctest
import importlib.util
import logging
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer

import anyep
from anyep.cli.app import app
from tests.support.programs import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LOGS = {DOCS / "gpu-runs.md", *(DOCS / "runs").glob("*.md")}
"""Of former versions."""
TABLES = DOCS / "planning-accuracy.md"
"""Written by a program."""


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools" / "docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(site: ModuleType, path: Path, text: str | None = None) -> str:
    """What the hook makes of a page."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri=str(path.relative_to(DOCS))))
    result: str = site.on_page_markdown(path.read_text() if text is None else text, page=page)
    return result


# Links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_to_files(page: Path) -> None:
    """In the repository, without the site."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]*)\)", text):
        if not link.startswith(("https://", "#")):
            assert (page.parent / link.split("#")[0]).exists(), link


def test_links_out_of_the_folder_lead_to_the_repository(site: ModuleType) -> None:
    text = shown(site, DOCS / "reference" / "errors.md", "[a](../../examples/train.py#x) [b](../nodes.md)")
    assert text == f"[a]({site.REPOSITORY}/blob/main/examples/train.py#x) [b](../nodes.md)"
    text = shown(site, DOCS / "nodes.md", "[tests](../tests/model/)")
    assert text == f"[tests]({site.REPOSITORY}/tree/main/tests/model)"


@pytest.mark.parametrize(
    ("text", "said"),
    [("[a](../nothing.md)", "there is no nothing.md"), ("Two:\n- one", "needs an empty line before it")],
)
def test_what_the_hook_warns_of(
    site: ModuleType, caplog: pytest.LogCaptureFixture, text: str, said: str
) -> None:
    """MkDocs counts warnings of this logger, and fails."""
    with caplog.at_level(logging.WARNING, "mkdocs.hooks"):
        shown(site, DOCS / "nodes.md", text)
    assert [said in record.getMessage() for record in caplog.records] == [True]


def test_no_page_causes_a_warning(site: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mkdocs.hooks"):
        for page in PAGES:
            shown(site, page)
    assert not caplog.records


def test_examples_of_the_hook(site: ModuleType) -> None:
    result = doctest.testmod(site)
    assert result.attempted >= 2
    assert result.failed == 0


def test_examples_of_this_module() -> None:
    assert doctest.testmod(sys.modules[__name__]) == (0, 1)


# The site as a whole


MAX_LINES = 200
"""Longer pages have more than one idea. The reference and the logs of runs are as long as they are."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_no_page_is_long(page: Path) -> None:
    if page.parent.name != "reference" and page not in {*LOGS, TABLES}:
        num_lines = len(page.read_text().splitlines())
        assert num_lines <= MAX_LINES, f"{num_lines} lines: split it into pages of one idea each"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    first = page.read_text().split("\n\n")[1]
    told = re.search(r"After this page|[Tt]h(?:is|ese) pages?|These commands|Look up|Find here", first)
    assert told or page.name == "index.md", f"say first what the reader will be able to do: {first!r}"


def test_every_page_is_in_the_menu_once() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    shown_pages = re.findall(r"([\w/-]+\.md)$", menu, re.MULTILINE)
    assert sorted(shown_pages) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


# Commands


def test_every_option_of_every_command_is_shown(site: ModuleType) -> None:
    text = shown(site, DOCS / "reference" / "commands.md")
    group: Any = typer.main.get_command(app)
    assert len(group.commands) >= 8
    for name, command in group.commands.items():
        part = text.split(f"## anyep {name}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            rows = [
                row for row in rows_of(part) if set(names_of(parameter)) <= set(re.split(r"[` ,]+", row[0]))
            ]
            assert len(rows) == 1, (name, parameter.name)
            assert parameter.help, f"anyep {name}: {parameter.name} has no help"
            assert rows[0][-1] == site.in_one_line(parameter.help)


def rows_of(text: str) -> list[list[str]]:
    """The cells of its tables."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]


def names_of(parameter: Any) -> list[str]:
    return (
        list(parameter.opts)
        if parameter.param_type_name == "option"
        else [parameter.metavar or parameter.name.upper()]
    )


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_shown_commands_have_these_options(page: Path) -> None:
    """Commands in blocks and in running text: parsed as the command line does, not run."""
    group: Any = typer.main.get_command(app)
    for name, arguments in [] if page in LOGS else shown_commands(page.read_text()):
        assert name in group.commands, name
        if arguments:
            group.commands[name].make_context(name, arguments)


def shown_commands(text: str) -> list[tuple[str, list[str]]]:
    """The name and the arguments of each.

    >>> shown_commands("`anyep plan --ranks 8` or\\n```\\nX=1 anyep run -n 2 a.py   # two\\n```\\n")
    [('run', ['-n', '2', 'a.py']), ('plan', ['--ranks', '8'])]
    """
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"(?<!`)`(anyep [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = [re.search(r"(?:^|[=\w] )anyep ([a-z]+)(?= |$)(.*)", line.split(" #")[0]) for line in lines]
    return [(match[1], shlex.split(match[2])) for match in found if match]


# What pages quote


def said_by_the_package() -> str:
    """Its sources, with strings over several lines joined."""
    sources = "".join(path.read_text() for path in Path(anyep.__file__).parent.rglob("*.py"))
    return re.sub(r'"\s+f?"', "", sources)


@pytest.mark.parametrize("page", ["exceptions", "installation"])
def test_messages_are_those_of_the_package(page: str) -> None:
    """Quoted messages, up to what varies in them: numbers, and "..."."""
    sources = said_by_the_package()
    rows = re.findall(r"^\| (.*?) \|", (DOCS / "troubleshooting" / f"{page}.md").read_text(), re.MULTILINE)
    quoted = [found for row in rows for found in re.findall(r"``? ?(.+?)``?(?=[ ,]|$)", row) if " " in found]
    assert len(quoted) >= 6
    for message in quoted:
        for part in re.split(r"(?<=\w) \.\.\. (?=\w)|\d+", message):
            assert part.strip() in sources, f"{message!r}: no message has {part.strip()!r}"


def test_paths_in_tables_are_those_that_bench_prints() -> None:
    """One term for one path: in the tables of the commands, and in those of the pages."""
    sources = "".join(
        path.read_text() for path in (Path(anyep.__file__).parent / "cli" / "bench").glob("*.py")
    )
    rows = []
    for page in (DOCS / "performance").glob("*.md"):
        for table in re.findall(
            r"^\| case \| path \|.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE
        ):
            rows += [(page.name, row.split(" | ")[1]) for row in table.splitlines()]
    assert len(rows) >= 20
    assert [(page, path) for page, path in rows if f'"{path}"' not in sources] == []


def test_every_exception_has_a_part() -> None:
    page = (DOCS / "troubleshooting" / "exceptions.md").read_text()
    kinds = [name for name in anyep.__all__ if isinstance(getattr(anyep, name), type)]
    exceptions = [name for name in kinds if issubclass(getattr(anyep, name), anyep.AnyEPError)]
    assert len(exceptions) >= 8
    for name in exceptions:
        if name != "AnyEPError":
            assert f"\n## {name}\n" in page, name
            assert f"[`{name}`](#{name.lower()})" in page, name
