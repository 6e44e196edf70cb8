"""What `make docs` adds to MkDocs; mkdocs.yml names it as a hook. The pages stay plain Markdown.

- Links to files outside of docs/ (`../examples/train.py`) lead to the repository's pages.
- `<!-- commands -->` becomes the commands and options of `anyep`, read from the command line itself.
- A list without an empty line before it would be part of the paragraph: a warning.
"""

from __future__ import annotations

import html
import logging
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer

ROOT: Final = Path(__file__).parents[1]
REPOSITORY: Final = "https://github.com/anyep/anyep"
COMMANDS: Final = "<!-- commands -->"
log = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """MkDocs calls it with each page's text; what it returns is shown."""
    source = page.file.src_uri
    for line in lists_without_a_line_before(markdown):
        log.warning("%s: a list needs an empty line before it: %r", source, line)
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, "\n".join(command_pages()))
    return with_links_to_the_repository(markdown, source)


def with_links_to_the_repository(markdown: str, source: str) -> str:
    """Links out of docs/ become links to the repository; a warning where there is no such file."""

    def replaced(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), target))
        if path.startswith("docs/"):
            return match[0]
        if path.startswith("..") or not (ROOT / path).exists():
            log.warning("%s: there is no %s", source, path)
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{path}{anchor})"

    return re.sub(r"\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)", replaced, markdown)


def lists_without_a_line_before(markdown: str) -> Iterator[str]:
    """The first lines of lists that follow a paragraph.

    >>> list(lists_without_a_line_before("Two things:\\n- one\\n- two\\n\\n- three"))
    ['- one']
    """
    before, in_code = "", False
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        is_item = re.match(r"(?:[-*]|\d+\.) ", line)
        if is_item and not in_code and before.strip() and not re.match(r"\s|[-*] |\d+\. |#|<", before):
            yield line
        before = line


# Commands, from the command line itself


def command_pages() -> Iterator[str]:
    """One heading per command of `anyep`, with its usage, its sentence and its options."""
    # MkDocs has taken away what a hook adds to the path while it is loaded.
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from anyep.cli.app import app

    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name="anyep")
    yield f"{group.help}\n"
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield from command_page(name, command, command.context_class(command, info_name=name, parent=context))


def command_page(name: str, command: Any, context: Any) -> Iterator[str]:
    """The part of one command."""
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## anyep {name}\n\n{in_one_line(command.help)}\n\n```\nanyep {name} {usage}\n```\n"
    yield "| option | default | meaning |\n|---|---|---|"
    for parameter in command.params:
        yield "| " + " | ".join(row_of(parameter, context)) + " |"
    yield ""


def row_of(parameter: Any, context: Any) -> tuple[str, ...]:
    """Its names and what it takes, as --help has them; its default; its meaning."""
    names, _ = parameter.get_help_record(context)
    is_flag = getattr(parameter, "is_flag", False)
    default = "required" if parameter.required else default_in_words(parameter.default, is_flag)
    cells = (f"`{names}`", default, in_one_line(parameter.help or ""))
    return tuple(cell.replace("|", "\\|") for cell in cells)


def default_in_words(default: Any, is_flag: bool) -> str:
    """
    >>> default_in_words(8, False), default_in_words(None, False), default_in_words(False, True)
    ('`8`', '', 'off')
    """
    if is_flag:
        return "on" if default is True else "off"
    return "" if default is None or callable(default) else f"`{default}`"


def in_one_line(text: str) -> str:
    """Text without line breaks, safe in a table of Markdown."""
    return html.escape(" ".join(text.split()), quote=False)
