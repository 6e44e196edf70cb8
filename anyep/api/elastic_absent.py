"""The calls of DeepEP V2's `ElasticBuffer` that AnyEP does not have: each says what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from anyep.errors import NotSupported


class AbsentCalls:
    """Methods of `ElasticBuffer` that raise `NotSupported`."""

    def engram_write(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotSupported`."""
        _no_tables("engram_write")

    def engram_fetch(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotSupported`."""
        _no_tables("engram_fetch")

    def pp_set_config(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotSupported`."""
        _no_pipelines("pp_set_config")

    def pp_send(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotSupported`."""
        _no_pipelines("pp_send")

    def pp_recv(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotSupported`."""
        _no_pipelines("pp_recv")

    def agrs_set_config(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotSupported`."""
        _no_sessions("agrs_set_config")

    def create_agrs_session(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotSupported`."""
        _no_sessions("create_agrs_session")

    def destroy_agrs_session(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotSupported`."""
        _no_sessions("destroy_agrs_session")

    def agrs_new_session(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotSupported`."""
        _no_sessions("agrs_new_session")

    def agrs_get_inplace_tensor(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotSupported`."""
        _no_sessions("agrs_get_inplace_tensor")

    def all_gather(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotSupported`."""
        _no_sessions("all_gather")


def _no_tables(name: str) -> NoReturn:
    raise NotSupported(
        f"ElasticBuffer.{name}: AnyEP has no remote tables; keep the table on every rank, or gather its"
        " entries with torch.distributed.all_to_all_single"
    )


def _no_pipelines(name: str) -> NoReturn:
    raise NotSupported(
        f"ElasticBuffer.{name}: AnyEP sends no tensors between pipeline stages; use torch.distributed.send"
        " and recv"
    )


def _no_sessions(name: str) -> NoReturn:
    raise NotSupported(
        f"ElasticBuffer.{name}: AnyEP has no sessions of all-gathers; use"
        " torch.distributed.all_gather_into_tensor"
    )
