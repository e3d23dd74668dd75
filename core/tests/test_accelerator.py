"""The core on an accelerator, with a stand-in for it (stand_in.py): devices, groups, precision, copies.

python -m pytest core/tests/test_accelerator.py
"""

import re
from types import SimpleNamespace

import pytest
import torch
from ddp_core.order import DROPOUT, seed_generators, word
from ranks import Job, assert_same_run, train
from small import Small
from stand_in import accelerator

DIGITS = "--workload digits --precision fp64 --epochs 2 --steps-per-epoch 5"
ON = "--device auto"  # after ranks.FLAGS, which contain --device cpu


def on(tmp_path, flags: str, world_size: int = 2, kind: str = "cuda", code: int = 0, workload: str = "", **seen) -> Job:
    faults = {rank: accelerator(kind, **seen) for rank in range(world_size)}
    return train(tmp_path / kind, f"{flags} {ON}", world_size, faults=faults, workload=workload, code=code)


def said(job: Job, what: str) -> list[list[str]]:
    """The stand-in's lines that begin with this, for each rank."""
    return [re.findall(rf"^stand-in: {what} (.*)$", text, re.MULTILINE) for text in job.out]


# ---- the same training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, backend, reduction", [("cuda", "nccl", "ddp"), ("xpu", "xccl", "flat"), ("cuda", "nccl", "canonical")]
)
def test_it_is_the_training_of_the_cpu_on_a_device_a_rank(finished, tmp_path, kind, backend, reduction):
    job = on(tmp_path, f"{DIGITS} --reduction {reduction}", kind=kind)
    assert_same_run(job, finished(f"{DIGITS} --reduction {reduction}", 2))
    assert said(job, "current") == [["0"], ["1"]]
    assert said(job, "group") == [[f"{backend} {kind}:0"], [f"{backend} {kind}:1"]], "a group is made for the rank's own device"
    [start] = job.records("start")
    names = ("device", "device_index", "backend", "device_name")
    assert [[row[name] for name in names] for row in start["ranks"]] == [
        [f"{kind}:{index}", index, backend, f"stand-in {index}"] for index in range(2)
    ]
    assert said(job, "patience") == [["80"], ["80"]], "a hang ends with 7 if the control group notices it first"
    assert f"2 on {kind}" in job.out[0]
    assert "page-locked" in job.out[0] and job.records("snapshot")[-1]["copy"] > 0, "snapshots are not saved beside training"


@pytest.mark.parametrize("workload", ["BatchNorm", "Groups", "Experts"])
@pytest.mark.fault(41)
def test_any_model_and_optimizer_trains_there_and_goes_on_on_the_cpu(finished, tmp_path, workload):
    """AdamW's step count may be on either device; buffers and flags are on the accelerator."""
    workload = f"small:{workload}"
    job = on(tmp_path, "--epochs 2 --clip-norm 1", workload=workload)
    assert_same_run(job, finished("--epochs 2 --clip-norm 1", 2, workload))
    job.snapshot.unlink()  # resume at the previous epoch
    job = train(tmp_path / "cuda", "--epochs 2 --clip-norm 1", 2, workload=workload, code=0)
    assert [record["step"] > 0 for record in job.records("start")] == [False, True]
    assert_same_run(job, finished("--epochs 2 --clip-norm 1", 2, workload))


class Curious(Small):
    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        assert loss.item() < 1e9  # tutorials print this at every step
        return loss


@pytest.mark.parametrize("flags", ["", "--reduction flat", "--reduction canonical", "--clip-norm 1 --accumulate 2", "gpt"])
def test_no_step_waits_for_the_device(flags_of, tmp_path, flags):
    """Results of steps are read once a second only, when the ranks exchange messages."""
    job = on(tmp_path, flags_of.get(flags, f"{DIGITS} {flags}"))
    assert said(job, "a step waits") == [[], []]


def test_a_step_that_waits_is_seen(tmp_path):
    job = on(tmp_path, "", workload="test_accelerator:Curious")
    assert said(job, "a step waits") == [["item"], ["item"]]


@pytest.mark.parametrize("workload, workers", [("Augmented", 1), ("EvaluatedOneByOne", 0)])
def test_rows_that_are_read_one_by_one_are_copied_there_a_batch_ahead(finished, tmp_path, workload, workers):
    job = on(tmp_path, f"--epochs 2 --workers {workers}", workload=f"small:{workload}")
    assert_same_run(job, finished("--epochs 2", 2, f"small:{workload}"))
    assert "pinned" in job.out[1]


@pytest.mark.parametrize("free, stay", [(2**30, True), (1000, False)])
def test_rows_live_on_the_device_where_a_quarter_of_its_memory_holds_them(finished, tmp_path, free, stay):
    job = on(tmp_path, DIGITS, free=free)
    assert_same_run(job, finished(DIGITS, 2))
    assert ("pinned" in job.out[0]) != stay


def test_text_in_a_mapped_file_is_copied_batch_by_batch(flags_of, finished, tmp_path):
    flags = f"{flags_of['gpt']} --precision fp64 --epochs 1 --steps-per-epoch 2"
    assert_same_run(on(tmp_path, flags), finished(flags, 2))


@pytest.mark.fault(19)
def test_a_gradient_that_is_not_finite_is_found_there_too(tmp_path):
    assert "is not finite at step" in on(tmp_path, "--workload regression --lr 1000", code=6).error


class Exhausted(Small):
    def schedule(self, step, total_steps, config):
        if step == 3:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return 1.0


@pytest.mark.parametrize("flags, words", [("", "raise --accumulate 1"), ("--reduction canonical", "raise --shards 8")])
@pytest.mark.fault(28)
def test_memory_that_does_not_suffice_is_told_with_the_flags_that_save_some(tmp_path, flags, words):
    job = on(tmp_path, flags, 1, workload="test_accelerator:Exhausted", code=7)
    assert "out of memory on cuda:0 at step 3: lower --global-batch-size 16" in job.error and words in job.error


# ---- which device -------------------------------------------------------------------------------------------------


def test_a_launcher_that_shows_each_rank_one_device_has_them_all_at_index_0(tmp_path):
    """Their uuids show that these are different devices."""
    faults = {rank: accelerator("cuda", count=1, name=f"uuid-{rank}-") for rank in range(2)}
    job = train(tmp_path / "run", f"{DIGITS} {ON}", 2, faults=faults, code=0)
    assert said(job, "current") == [["0"], ["0"]]
    assert [row["device_index"] for row in job.records("start")[0]["ranks"]] == [0, 0]


@pytest.mark.fault(15)
def test_two_ranks_on_one_device_are_refused_by_nccl_s_name_and_not_by_gloo_s(tmp_path):
    job = on(tmp_path, DIGITS, 2, count=1, code=3)
    assert "ranks 0 and 1 share one device" in job.error and "cuda:0" in job.error
    job = on(tmp_path, f"{DIGITS} --backend gloo", 3, count=2)
    assert said(job, "current") == [["0"], ["1"], ["0"]] and said(job, "group") == [["gloo None"]] * 3


@pytest.mark.fault(14)
def test_a_rank_beyond_the_devices_takes_none_that_is_another_s(tmp_path):
    job = on(tmp_path, DIGITS, 3, count=2, code=3)
    assert "local_rank=2, but torch sees 2 cuda devices" in job.error and "no mask is set" in job.error


@pytest.mark.parametrize(
    "flags, code, words", [("--device cuda", 3, "sees no cuda device"), ("--backend nccl", 2, "--backend nccl")]
)
def test_a_device_of_another_kind_and_its_backend_are_refused(tmp_path, flags, code, words):
    faults = {0: accelerator("xpu")}
    assert words in train(tmp_path / "run", f"{DIGITS} {ON} {flags}", faults=faults, code=code).error


def test_the_cpu_can_be_asked_for_where_there_is_an_accelerator(finished, tmp_path):
    job = train(tmp_path / "run", DIGITS, 2, faults={rank: accelerator("cuda") for rank in range(2)}, code=0)
    assert said(job, "current") == [[], []] and said(job, "group") == [["gloo None"]] * 2
    assert_same_run(job, finished(DIGITS, 2))


# ---- precision and random numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision, matmul", [("fp32", "highest"), ("tf32", "high")])
def test_products_are_tf32_where_that_was_asked_for_and_nowhere_else(tmp_path, precision, matmul):
    job = on(tmp_path, f"--workload digits --epochs 1 --steps-per-epoch 1 --precision {precision}", 1)
    assert said(job, "matmul") == [[f"{matmul} cudnn {precision == 'tf32'}"]]


@pytest.mark.parametrize(
    "flags, kernels, workspace",
    [("", [], "None"), ("--deterministic", ["True"], ":4096:8"), ("--reduction canonical", ["True"], ":4096:8")],
)
@pytest.mark.fault(26)
def test_kernels_that_repeat_are_chosen_where_that_was_asked_for(tmp_path, flags, kernels, workspace):
    job = on(tmp_path, f"--workload digits --epochs 1 --steps-per-epoch 1 {flags}", 1)
    assert said(job, "deterministic") == [kernels] and said(job, "workspace") == [[workspace]]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_is_the_device_s(finished, tmp_path, precision):
    flags = f"--workload digits --epochs 1 --steps-per-epoch 5 --precision {precision}"
    job = on(tmp_path, flags)
    assert said(job, "autocast") == [[f"cuda torch.{dict(bf16='bfloat16', fp16='float16')[precision]}"]] * 2
    assert said(job, "scaler") == [["cuda"] if precision == "fp16" else []] * 2
    assert job.losses == finished(flags, 2).losses


@pytest.mark.parametrize("index", [0, 1])
def test_the_generators_that_are_seeded_are_the_cpu_s_and_this_device_s(monkeypatch, index):
    generators = [torch.Generator().manual_seed(7) for _ in range(2)]
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(default_generators=generators))
    seed_generators(torch.device("cuda", index), DROPOUT, 3, 4, 5)
    seeds = [7, 7]
    seeds[index] = word(DROPOUT, 3, 4, 5)
    assert [generator.initial_seed() for generator in generators] == seeds
    assert torch.default_generator.initial_seed() == word(DROPOUT, 3, 4, 5)
