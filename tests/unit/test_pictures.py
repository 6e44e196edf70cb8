"""The pictures of the documentation are those that `tools/draw_pictures.py` draws, and a page shows each."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.support.programs import ROOT

TOOL = ROOT / "tools" / "draw_pictures.py"
FILES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_pictures", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_are_what_is_drawn(drawing: ModuleType) -> None:
    assert len(FILES) >= 6
    assert {path.name: path.read_text() for path in FILES} == {
        name: draw() for name, draw in drawing.PICTURES.items()
    }, "run python tools/draw_pictures.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_readable_in_light_and_dark_and_has_a_title(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text())
    assert root.tag.endswith("svg")
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text
    assert "prefers-color-scheme:dark" in path.read_text()


def test_every_token_of_the_moving_picture_moves(drawing: ModuleType) -> None:
    picture = drawing.moving_dispatch()
    for number in range(len(drawing.ROUTES)):
        assert f"@keyframes m{number}{{" in picture
        assert f'class="t{number}"' in picture
    assert "prefers-reduced-motion:no-preference" in picture


def test_every_picture_is_shown_on_a_page() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert [path.name for path in FILES if f"pictures/{path.name})" not in pages] == []


def test_bars_are_those_of_the_table(drawing: ModuleType) -> None:
    picture = drawing.beside_deep_ep()
    assert picture.count('class="theirs"') - 1 == picture.count('class="full"') - 1 == 9
    assert ">2 ranks, 24 SMs<" in picture
    assert ">8 ranks, 16 SMs<" in picture
