"""Check that all ranks have equal parameters before a snapshot is written: it holds only rank 0's."""

import zlib
from collections.abc import Iterable

import torch
from torch import nn

from ddp_core.errors import PeerLostError, named
from ddp_core.process_group import Peers
from ddp_core.state import local

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per number
BROKEN = "suspect the memory or the fabric of that node, and resume without it"


def refuse_diverged(model: nn.Module, peers: Peers, parts: int, step: int) -> None:
    """Collective. parts: ranks that together hold one model (1: each rank does). Raises PeerLostError on all ranks."""
    if parts == peers.world_size:
        return  # no two ranks hold the same rows
    mine = checksum(model.parameters())
    of_parts = torch.full((parts,), -1.0, dtype=torch.float64)
    if peers.rank < parts:
        of_parts[peers.rank] = mine
    _, should_be = peers.reduce(most=of_parts)
    if odd := peers.which(bool(mine != should_be[peers.rank % parts])):
        raise PeerLostError(
            f"the parameters of rank {named(odd)} differ from rank {odd[0] % parts}'s at step {step}: no snapshot was written; "
            f"{_cause(model, peers) if parts == 1 else BROKEN}",
            everywhere=True,
        )


def _cause(model: nn.Module, peers: Peers) -> str:
    """Collective. The likely cause: model() makes other parameters, the model moves one itself, the optimizer, or a node."""
    parameters = dict(model.named_parameters())
    layout = zlib.crc32(repr([(name, *parameter.shape) for name, parameter in parameters.items()]).encode())
    _, should_be = peers.reduce(most=torch.tensor([0.0 if peers.rank else layout], dtype=torch.float64))
    if peers.which(layout != int(should_be)):
        return "model() makes other parameters there, by name or shape: it should make the same ones on every rank"
    mine = torch.cat([checksum([parameter]) for parameter in parameters.values()])
    _, should_be = peers.reduce(most=torch.full_like(mine, -1.0) if peers.rank else mine)
    _, differs = peers.reduce(most=(mine != should_be).double())
    odd = [name for name, other in zip(parameters, differs.tolist(), strict=True) if other]
    names = ", ".join(odd[:6])
    if not odd:  # the difference is gone: a fault of memory or fabric
        return BROKEN
    if not any(parameters[name].requires_grad for name in odd):
        return f"if the model moves {names} by a rank's own rows, make it a buffer (register_buffer); else {BROKEN}"
    return f"{names}: optimizer() or its step() is not the same on every rank, or {BROKEN}"


def checksum(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """[1] fp64: the bits of all tensors, summed as integers modulo 2**52, which fp64 holds exactly."""
    total = torch.zeros((), dtype=torch.int64)
    for parameter in parameters:
        bits = local(parameter.detach()).reshape(-1).view(BITS[parameter.element_size()])
        total = total.to(bits.device) + bits.sum(dtype=torch.int64)
    return (total % 2**52).double().cpu().view(1)
