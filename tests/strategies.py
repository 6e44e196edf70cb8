"""What the property tests draw."""

from __future__ import annotations

from hypothesis import strategies as st

from anyep import Config


@st.composite
def configs(draw: st.DrawFn, max_channels: int = 32, max_rows: int = 64) -> Config:
    """Any valid config, small ones first."""
    nvl_send = draw(st.integers(1, max_rows - 1))
    nvl_recv = draw(st.integers(nvl_send + 1, max_rows))
    rdma_send = draw(st.integers(1, max_rows // 2))
    rdma_recv = draw(st.integers(2 * rdma_send, max_rows))
    return Config(2 * draw(st.integers(1, max_channels)), nvl_send, nvl_recv, rdma_send, rdma_recv)
