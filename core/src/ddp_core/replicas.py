"""Check that all ranks compute alike before training, and that all have equal parameters before a snapshot is written: it holds
only rank 0's.
"""

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ddp_core.batches import converted
from ddp_core.comparison import ROUNDED_BY
from ddp_core.errors import PeerLostError, RendezvousError, named
from ddp_core.order import DROPOUT, drawing_alike
from ddp_core.process_group import Peers
from ddp_core.state import Kept, local
from ddp_core.workload import outputs_of, parts_of

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per number
BROKEN = "suspect the memory or the fabric of that node, and resume without it"


def refuse_unlike(trainer: Any) -> None:
    """Collective, once per start. Every rank now has rank 0's numbers, and has tried the same rows: their loss should be the
    same. Raises RendezvousError on all ranks.
    """
    workload, peers, config = trainer.workload, trainer.peers, trainer.config
    # A loss that does not repeat, or rows that do not, differ anyway; a note says so.
    if peers.world_size == 1 or peers.which(not trainer.probed.repeats or config.row_seeds == "off"):
        return
    kept = Kept(trainer.model, averaged=config.sharding == "none")
    with drawing_alike(trainer.device, peers.rank, DROPOUT, config.seed, 0), trainer.autocast():
        rows = converted(trainer.probed.rows, torch.clone, trainer.device)
        loss = workload.loss(outputs_of(workload, trainer.model, rows), rows)
    total = parts_of(loss, trainer.probed.losses, workload)[0].item()
    kept.put_back()
    mine = torch.tensor([total, trainer.probed.checksum] if peers.rank == 0 else [float("-inf")] * 2, dtype=torch.float64)
    first, checksum_of_rank_0 = peers.reduce(most=mine)[1].tolist()
    if peers.which(trainer.probed.checksum != checksum_of_rank_0):
        return  # rows that draw when they are read: a loss tells nothing then
    near = ROUNDED_BY.get(config.precision, 1e-3) * max(abs(total), abs(first)) + 1e-6  # ranks may round differently
    if odd := peers.which(abs(total - first) > near):
        raise RendezvousError(
            f"rank {named(odd)} computes another loss than rank 0 ({first:.6g}), of the same rows and parameters: the "
            "workload's file computes something anew in each process, such as hash() of a text, the order of a set, numbers of "
            "an unseeded generator, or something by its rank; make it the same everywhere (sorted(), a seed), or keep it in a "
            "buffer of the model (register_buffer), which all ranks take from rank 0",
            everywhere=True,
        )


def refuse_diverged(trainer: Any) -> None:
    """Collective. Raises PeerLostError on all ranks."""
    model, peers = trainer.model, trainer.peers
    parts = trainer.reduction.ranks_per_replica  # ranks that together hold one model (1: each rank does)
    if parts == peers.world_size:
        return  # no two ranks hold the same rows
    mine = checksum(model.parameters())
    of_parts = torch.full((parts,), -1.0, dtype=torch.float64)
    if peers.rank < parts:
        of_parts[peers.rank] = mine
    _, should_be = peers.reduce(most=of_parts)
    if odd := peers.which(bool(mine != should_be[peers.rank % parts])):
        raise PeerLostError(
            f"the parameters of rank {named(odd)} differ from rank {odd[0] % parts}'s at step {trainer.step}: no snapshot was "
            f"written; {_cause(model, peers, trainer.probed.written) if parts == 1 else BROKEN}",
            everywhere=True,
        )


def _cause(model: nn.Module, peers: Peers, written: list[str]) -> str:
    """Collective. The likely cause: model() makes other parameters, the model moves one itself, the optimizer, or a node.

    written: names of parameters that the model writes when it is called.
    """
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
    if {*odd} & {*written}:
        return (
            f"the model writes {names} when it is called, each rank by its own rows: leave max_norm of an embedding out, and "
            "divide by the norm in forward(); initialize by rows in model()"
        )
    return f"{names}: optimizer() or its step() is not the same on every rank, or {BROKEN}"


def checksum(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """[1] fp64: the bits of all tensors, summed as integers modulo 2**52, which fp64 holds exactly."""
    total = torch.zeros((), dtype=torch.int64)
    for parameter in parameters:
        bits = local(parameter.detach()).reshape(-1).view(BITS[parameter.element_size()])
        total = total.to(bits.device) + bits.sum(dtype=torch.int64)
    return (total % 2**52).double().cpu().view(1)
