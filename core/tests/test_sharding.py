"""Models larger than a device: sharded training equals ddp training, and its snapshots work everywhere.

python -m pytest core/tests/test_sharding.py
"""

import ctypes
import re
import resource
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import small
import torch
from ddp_core import Rank, sharding, snapshot
from ddp_core.errors import SnapshotError, UsageError
from ddp_core.workload import initial_parameters
from ddp_core.workloads.gpt import GPT, Gpt
from faults import at_step, files_limited_to, signalled
from ranks import Job, assert_same_run, step_of, train
from small import OPTIMIZERS
from test_trainer import deviation
from torch.distributed.fsdp import CPUOffloadPolicy

from conformance.harness.ports import free_port

T1 = 1e-10
FULL = "--sharding full"
RUN = "--epochs 3 --precision fp64"


def assert_same_training(job: Job, reference: Job) -> None:
    """Compare every loss, gradient norm, evaluation and number of the snapshot, within T1."""
    assert deviation(job.losses, reference.losses) < T1
    for kind, names in (("step", ["grad_norm"]), ("epoch", ["loss", "eval_loss"])):
        for name in names:
            ours, theirs = ({one.get("step", one["epoch"]): one[name] for one in run.records(kind)} for run in (job, reference))
            assert ours == pytest.approx(theirs, rel=T1)
    (ours, document), (theirs, other) = (snapshot.read(one.snapshot) for one in (job, reference))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape)
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-8, atol=1e-12, msg=name)
    for name in ("step", "epochs_run", "problem", "data", "stateless", "numbers"):
        assert document.get(name) == other.get(name)


# ---- the same training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("flags", ["", "--clip-norm 0.5 --optimizer adamw --lr 0.003 --weight-decay 0.1", "--accumulate 2"])
def test_digits(finished, flags, world_size):
    assert_same_training(finished(f"{RUN} {FULL} {flags}", world_size), finished(f"{RUN} {flags}", world_size))


@pytest.mark.parametrize("world_size", [2, 4])
def test_gpt(flags_of, finished, world_size):
    flags = f"{flags_of['gpt']} --precision fp64"
    assert_same_training(finished(f"{flags} {FULL}", world_size), finished(flags, 1))


# There are 37 held-out rows, so some ranks have one batch less.
@pytest.mark.parametrize(
    "workload",
    [
        "Small",
        "Dropout",
        "Tied",
        "Frozen",
        "FineTuned",
        "BatchNorm",
        "SpectralNorm",
        "SeveralLosses",
        "Groups",
        "Mixup",
        "Augmented",
    ],
)
def test_small_models(finished, workload):
    """With four ranks, most ranks have no row of some parameters."""
    ours, theirs = (finished(f"--log-every 1 {flags}", 4, f"small:{workload}") for flags in (FULL, ""))
    assert_same_training(ours, theirs)
    assert ours.records("start")[0]["reduction"] == "sharded"


@pytest.mark.parametrize("rule", [rule for rule in OPTIMIZERS if rule != "rprop"])  # rprop is refused, see below
def test_optimizers(finished, rule):
    ours, theirs = (finished(f"--rule {rule} {flags}", 2, "small:Optimizers") for flags in (FULL, ""))
    assert_same_training(ours, theirs)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions(finished, precision):
    flags = f"--epochs 3 --precision {precision} --optimizer adamw --lr 0.003"
    ours, theirs = finished(f"{flags} {FULL}", 2), finished(flags, 2)
    assert deviation(ours.losses, theirs.losses) < 0.05
    assert ours.losses != finished(f"{flags} {FULL}".replace(precision, "fp32"), 2).losses, "it was not computed in it"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norm_in_lower_precisions(tmp_path, precision):
    """PyTorch takes its weights in the precision of its statistics alone."""
    flags, ways = f"--epochs 1 --precision {precision}", (FULL, "--reduction flat")  # under ddp fp16 skips other steps
    ours, theirs = (train(tmp_path / f"run{way}", f"{flags} {way}", 2, workload="small:BatchNorm", code=0) for way in ways)
    assert deviation(ours.losses, theirs.losses) < 0.05


@pytest.mark.parametrize("nodes", [1, 2])
def test_hybrid(finished, tmp_path, nodes):
    job = train(tmp_path / "run", f"{RUN} --sharding hybrid --clip-norm 0.5", ranks=ranks.on_nodes(nodes, 4 // nodes), code=0)
    assert_same_training(job, finished(f"{RUN} --clip-norm 0.5", 4))


@pytest.mark.parametrize("where", ["rank 0", "rank 1", "both"])
def test_a_model_that_cannot_be_built_is_one_line_and_2(tmp_path, where):
    """Also where a node's ranks build it one after another for lack of memory."""
    fails = dict(both="True").get(where, f"torch.distributed.get_rank() == {where[-1]}")
    body = "torch.zeros(3).sum().item()\n        if " + fails + ":\n            return undefined_name"
    source = f"    def model(self, config):\n        {body}\n        return super().model(config)\n"
    (tmp_path / "mine.py").write_text(f"from small import *\n\nclass Mine(Small):\n{source}")
    job = train(tmp_path / "run", f"--workload {tmp_path / 'mine.py'} {FULL}", 2, code=2)
    lines = [line for text in job.err for line in text.splitlines() if not line.endswith("rank 1 failed")]
    assert len(lines) == 1 and re.search(r"the model of --workload mine, line \d+ \(model\): NameError: .*_name", lines[0])


# ---- stopped, and resumed by others -------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["", "--optimizer adamw --lr 0.003 --lr-schedule cosine"])
def test_a_stopped_run_is_resumed_to_the_bit(finished, tmp_path, flags):
    flags = f"{RUN} {FULL} {flags}"
    train(tmp_path / "run", flags, 2, faults={1: at_step(17, signalled(signal.SIGTERM))}, code=75)
    assert_same_run(train(tmp_path / "run", flags, 2, code=0), finished(flags, 2))


@pytest.mark.parametrize(
    "first, then",
    [((FULL, 2), ("", 4)), (("", 2), (FULL, 4)), ((FULL, 4), (FULL, 3)), ((FULL, 1), (FULL, 4)), ((FULL, 4), ("", 1))],
)
def test_handed_over_it_is_the_same_training(finished, tmp_path, first, then):
    """Stopped within an epoch, with momentum: from ddp to sharded, back, and to another world size."""
    flags = f"{RUN} --optimizer adamw --lr 0.003"
    stop = {0: at_step(17, signalled(signal.SIGTERM))}
    (more, size), (others, another) = first, then
    train(tmp_path / "run", f"{flags} {more}", size, faults=stop, code=75)
    assert_same_training(train(tmp_path / "run", f"{flags} {others}", another, code=0), finished(flags, 1))


@pytest.mark.parametrize("workload", ["Tied", "Frozen", "FineTuned", "BatchNorm", "Groups"])
def test_small_models_are_handed_over(finished, tmp_path, workload):
    workload = f"small:{workload}"
    stop = {0: at_step(10, signalled(signal.SIGTERM))}
    train(tmp_path / "run", "--log-every 1", 4, workload=workload, faults=stop, code=75)
    job = train(tmp_path / "run", f"--log-every 1 {FULL}", 4, workload=workload, code=0)
    assert_same_training(job, finished("--log-every 1 ", 4, workload))


@pytest.mark.parametrize("rule", ["nadam", "asgd", "counting"])
def test_optimizers_are_handed_over(finished, tmp_path, rule):
    """Optimizers with numbers beside tensors, and with tensors that are not shaped like parameters."""
    flags, workload = f"--rule {rule} ", "small:Optimizers"
    stop = {0: at_step(10, signalled(signal.SIGTERM))}
    train(tmp_path / "run", f"{flags}{FULL}", 2, workload=workload, faults=stop, code=75)
    assert_same_training(train(tmp_path / "run", f"{flags}{FULL}", 4, workload=workload, code=0), finished(flags, 2, workload))


@pytest.mark.parametrize("workload", ["", "small:Tied", "small:Optimizers"])
def test_of_equal_numbers_the_bytes_are_equal(finished, tmp_path, workload):
    """A sharded run reads ddp's snapshot and writes the same bytes; also with 4 ranks, which few tensors' rows divide by."""
    flags = "--rule nadam" if workload == "small:Optimizers" else "--optimizer adamw"
    reference = finished(flags, 2, workload).snapshot.read_bytes()
    for world_size in (2, 4):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        (folder / "snapshot.safetensors").write_bytes(reference)
        faults = dict.fromkeys(range(world_size), saving_at_once)
        job = train(folder, f"{flags} {FULL} --epochs 99", world_size, workload=workload, faults=faults, code=75)
        (ours, document), (theirs, other) = (
            snapshot.read(folder / f"{name}.safetensors") for name in ("snapshot", "snapshot.prev")
        )
        assert (job.snapshot.read_bytes() == reference) == (world_size == other["world_size"])
        assert [*ours] == [*theirs] and all(bytes(snapshot.memory(ours[n])) == bytes(snapshot.memory(theirs[n])) for n in ours)
        assert {name for name in document if document[name] != other[name]} <= {"world_size", "document_crc32"}


def saving_at_once() -> None:
    """Save as if stopped before the first step."""
    from ddp_core.trainer import Trainer

    Trainer._run_epoch = _stop


def _stop(trainer, epoch: int, first: int) -> bool:
    return True


def test_a_snapshot_read_one_tensor_at_a_time_is_the_same(finished, tmp_path):
    path = finished(f"{RUN} {FULL}", 2).snapshot
    (tensors, document), (stored, other) = snapshot.read(path), snapshot.read(path, lazily=True)
    assert document == other and tensors.keys() == stored.keys()
    assert all(torch.equal(tensors[name], snapshot.load(stored[name])) for name in tensors)
    good = path.read_bytes()
    damages = {
        "checksum of": good[:-1] + bytes([good[-1] ^ 1]),
        "its header tells of": good[:-8],
        "cannot be": re.sub(rb'"shape":\[\d', b'"shape":[9', good, count=1),
    }
    for words, content in damages.items():
        (tmp_path / "broken").write_bytes(content)
        with pytest.raises(SnapshotError, match=words):
            snapshot.read(tmp_path / "broken", lazily=True)


# ---- failures -----------------------------------------------------------------------------------------------------


def test_a_nan_on_one_rank_stops_all_before_the_optimizer_uses_it(tmp_path):
    flags = f"{RUN} {FULL}"
    good = train(tmp_path / "run", f"{flags} --epochs 1", 2, code=0).snapshot_hash()
    job = train(tmp_path / "run", flags, 2, faults={1: at_step(5, poisoning_the_next_gradient)}, code=6)
    assert "not finite at step 20 " in job.error
    assert job.snapshot_hash() == good


def poisoning_the_next_gradient() -> None:
    """On this rank only, backward() gets NaN as the next loss, and the record does not."""
    from ddp_core.guard import Guard

    weighted = Guard.weighted

    def poisoned(guard, loss):
        Guard.weighted = weighted
        return weighted(guard, loss) * torch.nan

    Guard.weighted = poisoned


def test_a_snapshot_that_does_not_fit_ends_the_run_on_all_ranks_and_the_one_before_stays(finished, tmp_path):
    """Rank 0 has stopped writing, but the other ranks send all their rows."""
    flags = f"{RUN} {FULL}"
    job = train(tmp_path / "run", flags, 2, faults={0: at_step(20, files_limited_to(100_000))}, code=8)
    assert "free space" in job.error
    assert step_of(job) == 14 and not list(job.run_dir.glob(".*"))
    assert_same_run(train(tmp_path / "run", flags, 2, code=0), finished(flags, 2))


@pytest.mark.parametrize("killed", [0, 3])
def test_a_rank_that_dies_ends_all_others(tmp_path, killed):
    job = train(tmp_path / "run", f"{RUN} {FULL}", 4, faults={killed: at_step(20, signalled(signal.SIGKILL))})
    assert job.codes == [-9 if rank == killed else 7 for rank in range(4)]
    assert any(f"rank {killed} died or hangs at step 2" in text for text in job.err), job.err


def test_replicas_that_diverge_are_named(tmp_path):
    """Rank 3 has the same rows as rank 1 on the other node."""
    flags, odd = f"{RUN} --sharding hybrid", {3: at_step(3, flipping_a_bit)}
    job = train(tmp_path / "run", flags, ranks=ranks.on_nodes(2, 2), faults=odd, code=7)
    assert "the parameters of rank 3 differ from rank 1's" in job.err[0]


def flipping_a_bit() -> None:
    import gc

    from ddp_core.trainer import Trainer

    (trainer,) = (one for one in gc.get_objects() if type(one) is Trainer)
    rows = next(trainer.model.parameters()).detach().to_local()
    rows.view(torch.int64)[0, 0] ^= 1 << 3


@pytest.mark.parametrize(
    "flags, workload, words",
    [
        ("--sharding full --reduction flat", "", "--reduction flat"),
        ("--sharding full --reduction canonical", "", "--reduction canonical"),
        ("--sharding full --compile", "", "--compile"),
        ("--offload", "", "--offload"),
        ("--sharding full --offload --precision fp16", "", "--precision bf16"),
        ("--sharding full", "small:Experts", "unused_parameters = True"),
        ("--sharding full", "test_sharding:Muon", "take another optimizer"),
        ("--sharding full --rule rprop", "small:Optimizers", "take another optimizer"),
        ("--sharding full", "test_sharding:FusedSgd", "take another optimizer"),
        ("--sharding full", "test_sharding:Scalar", "scalar"),
        ("--sharding full", "small:Turned", "non-contiguous"),
        ("--sharding full", "small:Hooks", "0.weight has a hook, which its parts would not have"),
        ("--sharding full", "test_sharding:Stranger", "shards() returned Linear"),
        ("--checkpoint-activations", "small:BatchNorm", "changes 1.running_mean"),
        ("--checkpoint-activations", "small:Mixup", "NumPy's generator"),
    ],
)
def test_refused_with_one_line(tmp_path, flags, workload, words):
    assert words in train(tmp_path / "run", flags, 2, workload=workload, code=2).error


def test_hybrid_needs_the_ranks_of_a_node_in_a_row(tmp_path):
    port = free_port()
    dealt = [Rank(r, 4, r // 2, 2, r % 2, socket.gethostname(), port, "job-1") for r in range(4)]
    assert "block distribution" in train(tmp_path / "run", "--sharding hybrid", ranks=dealt, code=2).err[0]


class Muon(small.Small):
    """Uses an optimizer that multiplies whole matrices."""

    def optimizer(self, model, config):
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01)


class FusedSgd(small.Small):
    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=0.01, fused=True)


class Scalar(small.Small):
    def model(self, config):
        net = super().model(config)
        net[0].factor = torch.nn.Parameter(torch.tensor(1.0))
        net[0].register_forward_pre_hook(lambda module, inputs: inputs[0] * module.factor)
        return net


class Stranger(small.Small):
    def shards(self, model):
        return [torch.nn.Linear(1, 1)]


def test_shards_are_what_is_in_the_largest_list_else_in_the_largest_sequence():
    net, sequence = torch.nn.Module(), torch.nn.Sequential(torch.nn.Linear(9, 9))
    net.few, net.more = torch.nn.Sequential(torch.nn.Linear(1, 1)), sequence
    assert small.Small().shards(net) == [*sequence]
    net.heads = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    net.body = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    assert small.Small().shards(net) == [*net.body]


# ---- the model is built in parts ----------------------------------------------------------------------------------


class Looks(small.Small):
    """The model reads its parameters while it is built."""

    def model(self, config):
        net = super().model(config)
        assert net[0].weight.abs().max().item() < 1
        return net


class KeepsATensor(small.Small):
    """The model has a tensor that is neither parameter nor buffer, and a buffer that is not saved."""

    def model(self, config):
        net = super().model(config)
        net[0].scale = torch.tensor([2.0], dtype=torch.float64)
        net[0].register_buffer("shift", torch.tensor([0.5]), persistent=False)
        net[0].register_forward_pre_hook(lambda module, inputs: inputs[0] * module.scale + module.shift)
        return net


class KeepsABuffer(KeepsATensor):
    def model(self, config):
        net = super().model(config)
        del net[0].scale
        net[0].register_buffer("scale", torch.tensor([2.0]), persistent=False)
        return net


class KeepsATensorBesideIt(small.Small):
    """The workload stores a tensor in a dictionary, and its loss needs that tensor."""

    def model(self, config):
        self.scales = dict(outputs=torch.tensor([2.0], dtype=torch.float64))
        return super().model(config)

    def loss(self, outputs, batch):
        return super().loss(outputs * self.scales["outputs"], batch)


@pytest.mark.parametrize(
    "workload, in_turn", [("Looks", True), ("KeepsATensor", True), ("KeepsABuffer", False), ("KeepsATensorBesideIt", True)]
)
def test_models_that_cannot_be_built_without_numbers_are_built_in_turn(finished, workload, in_turn):
    workload = f"test_sharding:{workload}"
    ours, theirs = (finished(f"--log-every 1 {flags}", 4, workload) for flags in (FULL, ""))
    assert_same_training(ours, theirs)
    assert ("one at a time" in str(ours.records("start")[0]["notes"])) == in_turn


class Counted(small.Small):
    """Prints how often a model was built with real numbers."""

    def model(self, config):
        net = super().model(config)
        print("built on", net[0].weight.device)
        return net


def test_no_rank_but_the_first_has_the_whole_model(tmp_path):
    job = train(tmp_path / "run", FULL, 2, workload="test_sharding:Counted", code=0)
    built = [[line for line in out.splitlines() if line.startswith("built on")] for out in job.out]
    assert built == [["built on meta", "built on cpu"], ["built on meta"]]


# ---- activation checkpointing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ["", "--reduction flat", "--accumulate 2", FULL])
@pytest.mark.parametrize("model", ["Dropout", "DropoutInBlocks"])
def test_activations_computed_again_are_the_same(finished, model, more):
    flags = f"--log-every 1 {more}"
    ours, theirs = (finished(f"{flags} {again}", 2, f"small:{model}") for again in ("--checkpoint-activations", ""))
    assert_same_run(ours, theirs)


def test_gpt_computes_its_blocks_again(flags_of, finished):
    flags = f"{flags_of['gpt']} --precision fp64"
    assert_same_training(finished(f"{flags} {FULL} --checkpoint-activations --offload", 2), finished(flags, 1))


class NormOutside(small.BatchNorm):
    def shards(self, model):
        return [model[0], model[3]]


def test_what_is_not_computed_again_may_change_a_buffer():
    workload, seen = NormOutside(), SimpleNamespace(buffers=["1.running_mean"], others=False)
    sharding.refuse_to_compute_again(workload, workload.model(None), seen)


class Calls(small.Small):
    """Prints when its layer is called for a gradient."""

    def model(self, config):
        return torch.nn.Sequential(Says(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


class Says(torch.nn.Linear):
    def forward(self, inputs):
        if torch.is_grad_enabled():
            print("called for a gradient")
        return super().forward(inputs)


@pytest.mark.parametrize("flags", ["", FULL])
def test_layers_are_computed_twice_if_asked_to(tmp_path, flags):
    """In three steps, after the trial."""
    for again, times in (("", 3), ("--checkpoint-activations", 6)):
        flags_of_run = f"--epochs 1 --steps-per-epoch 3 {flags} {again}"
        job = train(tmp_path / f"run{again}", flags_of_run, workload="test_sharding:Calls", code=0)
        assert job.out[0].partition("\nrank=0 ")[2].count("called for a gradient") == times


# ---- with limited memory ------------------------------------------------------------------------------------------

CAP = 130  # MB that a rank may allocate after its start


class Deep(Gpt):
    """0.8 million parameters per layer: 13 MB with gradients and AdamW's state."""

    defaults = Gpt.defaults | dict(model_size="tiny")

    def flags(self, add):
        super().flags(add)
        add("--layers", type=int, required=True)

    def model(self, config):
        return initial_parameters(GPT(config.layers, 4, 256, 64), config.seed)


def capped() -> None:
    """Like `ulimit -v`. The libraries that a sharded run imports later are loaded before."""
    ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX: each thread's arena would take 64 MB of addresses
    threading.stack_size(2**20)  # default stacks take 8 MB
    import ddp_core.sharding
    import torch._dynamo  # noqa: F401

    assert ddp_core.sharding
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + CAP * 2**20,) * 2)


@pytest.mark.timeout(400, method="thread")
def test_a_model_four_times_as_large_trains_under_the_same_cap(monkeypatch, tmp_path):
    """Under ddp, 2 layers fit and 8 do not. Sharded over 4 ranks, 8 fit, also when saved and resumed."""
    monkeypatch.setattr(ranks, "SECONDS", 100.0)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "text.txt").write_bytes(b"the loss falls and falls and falls; " * 72)
    flags = f"--steps-per-epoch 1 --global-batch-size 4 --data-dir {tmp_path}/texts"

    def job(name: str, layers: int, size: int, more: str = "") -> Job:
        faults = dict.fromkeys(range(size), capped)
        return train(tmp_path / name, f"{flags} --layers {layers} {more}", size, workload="test_sharding:Deep", faults=faults)

    assert job("small", 2, 1).codes == [0]
    whole = job("whole", 8, 1)
    assert whole.codes == [7] and "out of memory" in whole.error
    assert job("parts", 8, 4, FULL).codes == [0] * 4
    resumed = job("parts", 8, 4, f"{FULL} --epochs 2")
    assert resumed.codes == [0] * 4, resumed.err
    assert resumed.records("start")[-1]["step"] == 1 and step_of(resumed) == 2


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [False, True])
def test_layers_are_put_away_after_their_forward_and_where_they_were_asked_to(monkeypatch, offload):
    asked = []
    net = Gpt().model(SimpleNamespace(model_size="tiny", seed=0))
    monkeypatch.setattr(sharding, "fully_shard", lambda unit, **words: asked.append(words))
    config = SimpleNamespace(precision="fp32", offload=offload, checkpoint_activations=False)
    with suppress(AttributeError):  # this model has no shards
        list(sharding._shard(Gpt(), config, net, None, torch.device("cpu")))
    assert asked[0]["reshard_after_forward"] is True
    assert isinstance(asked[0]["offload_policy"], CPUOffloadPolicy) is offload


def test_hybrid_needs_as_many_ranks_on_every_node():
    numbers = torch.tensor([4.0, -2.0, 0.0])
    peers = SimpleNamespace(rank=0, local_rank=0, local_world_size=4, world_size=6, reduce=lambda most: (None, numbers))
    with pytest.raises(UsageError, match="not 2 to 4 ranks a node"):
        sharding._mesh(peers, torch.device("cpu"), SimpleNamespace(sharding="hybrid", timeout=9))


class Rows:
    """Stands for the rows of an offloaded tensor; the gathered rows give their device."""

    def __init__(self, device: str = "cpu"):
        self.device, self.full_tensor = device, lambda: device

    def to(self, device: str) -> "Rows":
        return Rows(device)


def test_what_is_offloaded_is_gathered_on_the_device_where_its_backend_reaches(monkeypatch):
    monkeypatch.setattr(sharding, "DTensor", Rows)
    writers = SimpleNamespace(tensors={"model.weight": Rows()}, trainer=SimpleNamespace(device="cuda"))
    assert sharding.Writers._whole(writers, "model.weight") == "cuda"


def test_the_norm_of_offloaded_gradients_is_summed_on_the_device(monkeypatch):
    places = []
    monkeypatch.setattr(sharding.dist, "all_reduce", lambda square, group: places.append((square.device.type, square.dtype)))
    reduction = SimpleNamespace(
        device=torch.device("meta"), peers=SimpleNamespace(data=None), world_size=2, ranks_per_replica=2
    )
    sharding.Sharded.norm(reduction, torch.ones(()))
    assert places == [("meta", torch.float64)]
