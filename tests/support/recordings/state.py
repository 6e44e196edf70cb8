"""The public attributes of a Buffer, and the functions that need no Buffer, as rounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyep import Config
from anyep.api.buffer import Buffer
from tests.support.recorder import Player


@dataclass(frozen=True)
class State:
    """The public attributes and sizes of a Buffer."""

    name: str

    def play(self, player: Player) -> None:
        buffer = player.buffer
        player.barrier()
        local = [
            buffer.get_local_buffer_tensor(torch.int32),
            buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([3, 8]), 256),
            buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True),
        ]
        player.note(
            self.name,
            repr=repr(buffer),
            status="; ".join(map(str, buffer.status())),
            attributes=[
                buffer.rank,
                buffer.group_size,
                buffer.num_nvl_bytes,
                buffer.num_rdma_bytes,
                buffer.low_latency_mode,
                buffer.explicitly_destroy,
                buffer.enable_shrink,
                buffer.group is player.group,
            ],
            local=[(str(part.dtype), list(part.shape), part.is_contiguous()) for part in local],
        )
        player.barrier()


@dataclass(frozen=True)
class Sizes:
    """Configs and hints: nothing that depends on a Buffer."""

    name: str

    def play(self, player: Player) -> None:
        for num_ranks in (1, 2, 3, 4, 8, 12, 16, 24, 64, 160):
            configs = Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks), Config()
            player.note(
                f"{self.name}: {num_ranks} ranks",
                configs=list(configs),
                nvl=[config.get_nvl_buffer_size_hint(14336, num_ranks) for config in configs],
                rdma=[config.get_rdma_buffer_size_hint(14336, num_ranks) for config in configs],
                low_latency=Buffer.get_low_latency_rdma_size_hint(128, 7168, num_ranks, 48 * num_ranks),
            )
        usual = Buffer.num_sms
        try:
            Buffer.set_num_sms(8)
            player.note(
                f"{self.name}: 8 SMs", config=Buffer.get_dispatch_config(4), sms=player.buffer.num_sms
            )
            player.attempt(f"{self.name}: odd SMs", lambda: Buffer.set_num_sms(7))
        finally:
            Buffer.set_num_sms(usual)
        player.note(self.name, sm90=Buffer.is_sm90_compiled(), event=Buffer.capture().event is not None)
