"""Train models larger than a device: --sharding full or hybrid, by PyTorch's FSDP2. And --checkpoint-activations.

A rank keeps some rows of every parameter, of its gradient and of its optimizer state. The modules that Workload.shards()
names are gathered one at a time, when their forward or backward needs them. full: the rows are split over all ranks.
hybrid: they are split over the ranks of a node, and every node has all rows.

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import errno
import os
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_core.build import in_precision, refuse_other_modules
from ddp_core.comparison import hooked
from ddp_core.errors import Failure, UsageError, WorkloadError
from ddp_core.files import Stored
from ddp_core.order import seed_everything
from ddp_core.probe import BATCH_STATISTICS
from ddp_core.process_group import Peers
from ddp_core.reduction import Reduction
from ddp_core.rehearsal import rehearse
from ddp_core.snapshot import Draft, drafts_of, in_order, load, put, refuse_unknown_dtypes
from ddp_core.state import State, dense, local, of_model
from ddp_core.workload import Workload, blaming

IN_TURN = (
    "the model cannot be built without its numbers (torch.device('meta')): every rank has built the whole of it, one at a time "
    "on a node"
)


class Sharded(Reduction):
    """FSDP2 sums a module's gradients while backward runs, and leaves each rank its rows of the sum."""

    name = "sharded"
    overlaps = True
    needs_all = True  # FSDP2 leaves a parameter without a gradient out of its sum, and would add others in its place

    def __init__(self, model: nn.Module, compiled: nn.Module, peers: Peers, unused_parameters: bool):
        super().__init__(model, compiled, peers, unused_parameters)
        mesh: Any = self.parameters[0].device_mesh  # type: ignore[attr-defined]
        self.device = torch.device(mesh.device_type)  # with --offload the parameters are on the CPU
        self.ranks_per_replica = mesh.size(mesh.ndim - 1)

    def norm(self, norm: torch.Tensor) -> torch.Tensor:
        # Sum over all ranks, even where every node has all rows: all replicas must clip by the same bits. That sum counts
        # each row once per replica.
        square = norm.to(self.device, torch.float64).square()
        dist.all_reduce(square, group=self.peers.data)
        return (square / (self.world_size // self.ranks_per_replica)).sqrt().to(norm.dtype)

    def seconds_of_a_sum(self, share: float = 1.0) -> float:
        """Parameters are gathered twice, gradients scattered once: each costs half an all_reduce. Timed on one rank's share."""
        return 1.5 * self.ranks_per_replica * super().seconds_of_a_sum(share / self.ranks_per_replica)


def build(workload: Workload, config, peers: Peers, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, list[str]]:
    """Collective. Returns the sharded model with rank 0's parameters, and notes.

    Only rank 0 ever holds the whole model, unless model() cannot run on the meta device (IN_TURN).
    """
    if workload.unused_parameters:
        raise WorkloadError(
            f"--workload {workload.name} has unused_parameters = True, and --sharding {config.sharding} needs the gradient of "
            f"every parameter on every rank: pass --sharding none"
        )
    mesh = _mesh(peers, device, config)
    model: Any = _skeleton(workload, config)
    numbers: dict[str, torch.Tensor] = {}

    @blaming(workload, "the model")
    def build_and_shard() -> None:
        nonlocal model
        model = _whole(workload, config, dtype)
        deque(_shard(workload, config, model, mesh, device), 0)

    @blaming(workload, "the model")
    def make_numbers() -> None:
        numbers.update(_numbers(_whole(workload, config, dtype)))

    if in_turn := model is None:
        for turn in range(int(peers.reduce(most=torch.tensor([peers.local_world_size], dtype=torch.float64))[1])):
            peers.together(build_and_shard if turn == peers.local_rank else None)
    peers.together(make_numbers if peers.rank == 0 else None)
    dealt: set[str] = set()
    for _ in [model] if in_turn else _shard(workload, config, in_precision(model, dtype), mesh, device):
        for name, tensor in _numbers(model).items():
            if name not in dealt and not tensor.is_meta:
                deal(numbers.pop(name, None), tensor, peers)  # pop: rank 0 frees each whole tensor once it is sent
                dealt.add(name)
    return model, [IN_TURN] if in_turn else []


def _whole(workload: Workload, config, dtype: torch.dtype) -> nn.Module:
    seed_everything(config.seed)
    model = workload.model(config)
    refuse_other_modules(model, workload)
    if sparse := [name for name, buffer in model.named_buffers() if not dense(buffer)]:
        raise workload.unusable(
            f"{sparse[0]} is sparse or ragged, and --sharding deals dense tensors out: pass --sharding none"
        )
    if names := hooked(model):
        raise workload.unusable(
            f"{names[0]} has a hook, which its parts would not have: take register_step_pre_hook of the optimizer, or pass "
            "--sharding none"
        )
    refuse_unknown_dtypes(of_model(model), workload.name)
    return in_precision(model, dtype)


def _mesh(peers: Any, device: torch.device, config) -> DeviceMesh:
    size = peers.local_world_size
    if config.sharding == "full" or size == peers.world_size:
        return DeviceMesh.from_group(peers.data, device.type)
    astray = peers.local_rank != peers.rank % size
    most, least, odd = peers.reduce(most=torch.tensor([size, -size, astray], dtype=torch.float64))[1].int().tolist()
    if most + least or odd:
        raise UsageError(
            f"--sharding hybrid needs as many ranks on every node, and those of a node one after the other (block "
            f"distribution), not {-least} to {most} ranks a node in another order: pass --sharding full",
            everywhere=True,
        )
    ranks = torch.arange(peers.world_size).view(-1, size)
    mine: list[Any] = []
    for groups in (ranks.T, ranks):  # first the ranks that hold the same rows, then the ranks of each node
        for group in groups.tolist():  # new_group() is collective over all ranks, also those outside the group
            made = dist.new_group(group, timeout=peers.data_timeout)
            mine += [made] if peers.rank in group else []
    return DeviceMesh.from_group(mine, device.type, mesh=ranks, mesh_dim_names=("replicas", "parts"))


def _skeleton(workload: Workload, config) -> nn.Module | None:
    """The model on the meta device, without memory. None where model() reads values, or keeps tensors that are neither
    parameters nor buffers.
    """
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights loaded into meta tensors: without effect, and loaded again with memory
            model = workload.model(config)
        owners = [workload, *model.modules()]
    except Exception:  # a real fault is raised again when the model is built with values
        return None
    kept = [value for owner in owners for name, value in vars(owner).items() if name not in ("_parameters", "_buffers")]
    # tree_leaves() also finds tensors in lists and dictionaries.
    return None if any(isinstance(value, torch.Tensor) and value.is_meta for value in tree_leaves(kept)) else model


def _shard(workload: Workload, config, model: nn.Module, mesh: DeviceMesh, device: torch.device) -> Iterator[nn.Module]:
    """Shard in place: every module of Workload.shards() in turn, then the rest of the model. Yields each module."""
    lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if config.offload else OffloadPolicy()
    # Autocast converts inputs, as under ddp. Gradients are summed in fp32.
    precision = MixedPrecisionPolicy(lower, torch.float32 if lower else None, cast_forward_inputs=False)
    units = chosen(workload, model)
    if config.checkpoint_activations:
        checkpoint(units)
    # BatchNorm's statistics are fp32, and PyTorch wants its weights in their precision: each is a unit of its own.
    statistics = [module for module in model.modules() if lower and isinstance(module, BATCH_STATISTICS) and module.affine]
    unit: Any
    # Children before parents: FSDP2 gives a module the parameters that no module inside it has taken.
    for unit in reversed([*model.modules()]):
        if not (unit is model or unit in statistics or (unit in units and not _shares(unit, model))):
            continue
        _give_memory(unit, device)
        unit.register_forward_hook(_no_view)
        policy = MixedPrecisionPolicy(cast_forward_inputs=False) if unit in statistics else precision
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy, offload_policy=offload)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean
        unit.set_gradient_divide_factor(1.0)
        yield unit


def _no_view(module: nn.Module, inputs: tuple, output: Any) -> Any:
    """Clone outputs that are views or parameters. FSDP2 gathers a module for backward by a hook on its output, which
    `output += x` silently removes from a view; and it frees the memory of a parameter that is returned as output.
    """

    def own(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        handed_on = isinstance(base, nn.Parameter) or (base is not tensor and tensor.requires_grad)
        return tensor.clone() if handed_on else tensor

    return tree_map_only(torch.Tensor, own, output)


def chosen(workload: Workload, model: nn.Module) -> list[nn.Module]:
    """The modules of Workload.shards() that have parameters. Raises WorkloadError if one is not part of the model."""
    units = [*workload.shards(model)]
    ours = [*model.modules()]
    if wrong := [unit for unit in units if not any(unit is module for module in ours)]:
        raise workload.unusable(f"shards() returned {type(wrong[0]).__name__}, and should return modules of the model")
    return [unit for unit in units if any(True for _ in unit.parameters())]


def _shares(unit: nn.Module, model: nn.Module) -> bool:
    """Whether the unit shares a parameter with a module outside it (tied weights): both must be gathered together."""
    inside = {id(module) for module in unit.modules()}
    others = {id(p) for module in model.modules() if id(module) not in inside for p in module.parameters(recurse=False)}
    return any(id(parameter) in others for parameter in unit.parameters())


def _give_memory(unit: nn.Module, device: torch.device) -> None:
    """Replace the unit's meta tensors by uninitialized ones on the device."""
    made: dict[torch.Tensor, nn.Parameter] = {}  # so that tied parameters stay tied
    for module in unit.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and not isinstance(parameter, DTensor):
                if parameter not in made:
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _numbers(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers by name, also the buffers that a snapshot leaves out."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def checkpoint(modules: list[nn.Module]) -> None:
    """--checkpoint-activations: do not keep what these modules compute in forward, but compute it again in backward."""
    for module in modules:
        # Replace the method, do not wrap the module: parameter names stay, and hooks on the module run once.
        module.forward = partial(torch.utils.checkpoint.checkpoint, module.forward, use_reentrant=False)


def refuse_to_compute_again(workload: Workload, model: nn.Module, probed) -> None:
    """Raise WorkloadError where a second forward pass would change the training. probed: the result of probe.py."""
    inside = {id(buffer) for unit in workload.shards(model) for buffer in unit.buffers()}
    changed = [name for name in probed.buffers if id(model.get_buffer(name)) in inside]
    if changed or probed.others:
        why = f"changes {', '.join(changed[:3])}" if changed else "draws from Python's or NumPy's generator"
        raise workload.unusable(
            f"a forward pass {why}, and --checkpoint-activations computes it twice: leave out the flag, or such modules in "
            "shards()"
        )


def deal(numbers: torch.Tensor | None, tensor: torch.Tensor, peers: Peers) -> None:
    """Collective. Send a whole tensor from rank 0 (None elsewhere) to all ranks; each copies its own rows into `tensor`."""
    # With --offload the rows are on the CPU, and the ranks are connected by their devices.
    device = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if numbers is None else numbers.to(device).contiguous()
    peers.broadcast_tensors([whole])
    if isinstance(tensor, DTensor):
        whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local(tensor).copy_(local(whole))


class Writers:
    """Write a snapshot of a sharded model: rank 0 writes a single file, or each rank its own files of a set.

    All ranks gather a tensor together, and a thread on the rank that writes its file writes it. Tensors of the files are
    gathered in turn, so all files are written at once, and a rank holds at most three whole tensors (one being written, one
    waiting, one just gathered). If a file fails, all ranks still gather to the end.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], trainer: Any):
        self.tensors = {name: tensors[name].detach() for name in in_order(tensors)}
        self.trainer, self.peers = trainer, trainer.peers

    def lead(self, drafts: list[Draft]) -> dict[str, int]:
        """Rank 0's part: the put_drafts of snapshot.write(). Raises an OSError that any rank met."""
        self.peers.broadcast([str(draft.path) for draft in drafts])
        results, count = self._put(drafts), len(drafts)
        for n, rank in enumerate(self._deal(count)):
            if results[n]:
                host = self.trainer.ranks[rank]["host"]
                raise OSError(results[n], f"file {n + 1} of {count}, by rank {rank} on {host}: {os.strerror(results[n])}")
        return {name: results[name] for name in self.tensors}

    def follow(self) -> None:
        """The part of all other ranks, until rank 0 has no more drafts."""
        while names := self.peers.broadcast(None):
            self._put(drafts_of(self.tensors, {}, self.trainer.config.max_shard_size, lambda n: Path(names[n])))

    def _deal(self, count: int) -> list[int]:
        """The writing rank of each file. A few files get writers far apart, so on several nodes."""
        writers = min(count, 1 if self.trainer.rank_0_writes else self.peers.world_size)
        return [n % writers * self.peers.world_size // writers for n in range(count)]

    def _put(self, drafts: list[Draft]) -> dict:
        """Collective. Returns on all ranks: checksums by tensor name; and by file number its errno, 0 if it is written."""
        writers = self._deal(len(drafts))
        mine = {n: draft for n, draft in enumerate(drafts) if writers[n] == self.peers.rank}
        # By turn: each writer has one file of it, and of these files first the first tensors.
        places = ((n, place, name) for n, draft in enumerate(drafts) for place, name in enumerate(draft.tensors))
        turns = sorted((n // len({*writers}), place, n, name) for n, place, name in places)
        waiting: Queue = Queue(1)
        with ThreadPoolExecutor(1, "save") as pool:
            written = pool.submit(self._put_mine, mine, iter(waiting.get, None))
            try:
                for *_, n, name in turns:
                    whole = self._whole(name)
                    if n in mine:
                        waiting.put({name: whole.cpu().contiguous()})
            finally:
                waiting.put(None)
        keys = [*self.tensors, *range(len(drafts))]
        results = torch.tensor([written.result().get(key, 0) for key in keys], dtype=torch.float64)
        _, results = self.peers.reduce(most=results)
        return dict(zip(keys, results.long().tolist(), strict=True))

    def _put_mine(self, drafts: dict[int, Draft], gathered: Iterator[dict[str, torch.Tensor]]) -> dict:
        """Write this rank's files, one after the other (in a thread). gathered: each tensor under its name."""
        results: dict = {}
        try:
            for n, draft in drafts.items():
                results[n] = 0
                rehearse("save", self.trainer.step)
                results |= put(draft, gathered=lambda name: next(gathered)[name])
        except OSError as error:
            results[n] = error.errno or errno.EIO
        finally:
            deque(gathered, 0)  # empty the queue: if it stayed full, this rank would stop gathering, and all others would wait
        return results

    def _whole(self, name: str) -> torch.Tensor:
        tensor: Any = self.tensors[name]
        return tensor.to(self.trainer.device).full_tensor() if hasattr(tensor, "full_tensor") else tensor


class ShardedState(State):
    """The same snapshot format as that of every other run, read and written tensor by tensor."""

    def save(self, write: Callable, trainer: Any) -> None:
        peers, writers, failure = trainer.peers, Writers(self.tensors(), trainer), None
        if peers.rank:
            writers.follow()
        else:
            try:
                write(self.tensors(), writers.lead)
            except Failure as error:
                failure = error
            peers.broadcast(None)  # ends follow() on the other ranks
        peers.agree(failure or trainer.record.failure)

    def send(self, tensors: dict[str, Any], resuming: bool, peers: Peers) -> None:
        for name, tensor in self.tensors().items() if resuming else ():  # build() has dealt out a new model already
            numbers = tensors.get(name)
            deal(load(numbers) if isinstance(numbers, Stored) else numbers, tensor, peers)


def hang_up(store_port: int) -> None:
    """Close this rank's connections to others, except the store's: ranks that wait for it then fail, too, and answer.

    Peers.lost() drops its own references to the groups, but FSDP and DTensor's caches keep theirs until the process ends.
    """
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
            internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if internet and store_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                connection.shutdown(socket.SHUT_RDWR)
