"""Kernels are compiled when a Buffer is made; tests also call them without one, and their own ones."""

from __future__ import annotations

import sys

import pytest
from hypothesis import settings

# A machine may be busy: how long an example takes says nothing.
settings.register_profile("anyep", deadline=None)
settings.load_profile("anyep")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile every kernel of the modules that were imported, once for this process and the ranks it starts.

    In a test it would count against the time that ranks have to answer.
    """
    needs_kernels = "anyep.backends.cpu" in sys.modules or "tests.support.world" in sys.modules
    if needs_kernels and session.items and not session.config.option.collectonly:
        from anyep.backends.cpu import compile_kernels

        compile_kernels()


def pytest_runtestloop(session: pytest.Session) -> None:
    """Workers and ranks share the cores: threads of torch would only wait for each other, busily."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.property)
    if getattr(config.option, "loadgroup", False):
        _name_groups(items)


def _name_groups(items: list[pytest.Item]) -> None:
    """Tell pytest-xdist which tests go together, by their ids: pytest 9.2 ignores how version 3.8 does it."""
    try:
        from _pytest.nodeid import coerce_node_id
    except ImportError:
        return
    for item in items:
        group = item.get_closest_marker("xdist_group")
        if group is not None and not item.nodeid.endswith(f"@{group.args[0]}"):
            item._id = coerce_node_id(f"{item.nodeid}@{group.args[0]}")
