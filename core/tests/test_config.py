"""Flags: defaults, rules for batch sizes, what defines a problem, and errors that name the flag and its value.

python -m pytest core/tests/test_config.py
"""

import dataclasses
import re
import subprocess
import sys

import pytest
import ranks
from ddp_core.config import TrainConfig, parse
from ddp_core.errors import ExitCode, UsageError, WorkloadError
from ddp_core.workload import BUILT_IN, find
from small import Groups, Small

WORLD_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 96)

# Flags that change each field of TrainConfig.
CHANGES = {
    "workload": "--workload=regression",
    "epochs": "--epochs 7",
    "steps_per_epoch": "--steps-per-epoch 5",
    "global_batch_size": "--global-batch-size 48",
    "accumulate": "--accumulate 2",
    "shards": "--reduction canonical --shards 4",
    "optimizer": "--optimizer adamw",
    "lr": "--lr 0.3",
    "momentum": "--momentum 0.5",
    "weight_decay": "--weight-decay 0.01",
    "lr_schedule": "--lr-schedule cosine",
    "warmup_steps": "--warmup-steps 3",
    "clip_norm": "--clip-norm 1",
    "precision": "--precision fp64",
    "seed": "--seed 1",
    "device": "--device cpu",
    "backend": "--backend gloo",
    "reduction": "--reduction flat",
    "deterministic": "--deterministic",
    "compile": "--compile",
    "sharding": "--sharding full",
    "checkpoint_activations": "--checkpoint-activations",
    "offload": "--sharding full --offload",
    "workers": "--workers 2",
    "row_seeds": "--row-seeds off",
    "stage_data": "--stage-data off",
    "run_dir": "--run-dir elsewhere",
    "new_run_dir": "--new-run-dir elsewhere",
    "fresh": "--fresh",
    "save_every": "--save-every 2",
    "save_minutes": "--save-minutes 0",
    "max_shard_size": "--max-shard-size 500MB",
    "save_steps": "--save-steps 5",
    "eval_every": "--eval-every 2",
    "log_every": "--log-every 2",
    "log_seconds": "--log-seconds 0",
    "grace": "--grace 60",
    "rendezvous_timeout": "--rendezvous-timeout 5",
    "timeout": "--timeout 5",
    "profile": "--profile 3",
    "debug": "--debug",
}
OWN = {  # flags of the built-in workloads
    "data_dir": "--workload gpt --data-dir texts",
    "model_size": "--workload gpt --model-size tiny",
    "channels_last": "--workload mnist --data-dir idx --channels-last",
}


def config(flags: str, world_size: int = 1) -> TrainConfig:
    return parse(flags.split(), world_size)


FIELDS = [field.name for field in dataclasses.fields(TrainConfig) if field.metadata]


@pytest.mark.parametrize("name", [*FIELDS, *OWN])
def test_every_choice_has_a_flag(name):
    flags = (CHANGES | OWN)[name]
    workload = re.match(r"--workload \w+ |", flags)[0]
    assert getattr(config(flags), name) != getattr(config(workload), name)


def test_problem_holds_the_choices_that_determine_the_losses_and_no_others():
    free = {"epochs", "accumulate", "device", "backend", "reduction", "deterministic", "compile", "workers", "shards"}
    free |= {"sharding", "checkpoint_activations", "offload", "stage_data"}
    free |= {"run_dir", "new_run_dir", "fresh", "save_every", "save_minutes", "save_steps", "eval_every", "log_every"}
    free |= {"max_shard_size", "log_seconds", "grace", "rendezvous_timeout", "timeout", "profile", "debug"}
    assert config("").problem().keys() == CHANGES.keys() - free
    # A cosine schedule covers all epochs, so their number is part of the problem.
    assert config("--lr-schedule cosine").problem().keys() == CHANGES.keys() - free | {"epochs"}
    # --data-dir and --channels-last of the workloads are declared with remembered=False.
    assert config("--workload gpt").problem().keys() == CHANGES.keys() - free | {"model_size"}
    assert config("--workload mnist").problem().keys() == CHANGES.keys() - free


def test_a_schedule_of_the_workload_s_own_may_be_laid_out_over_the_epochs_too():
    assert "epochs" in parse([], 1, workload=find(Groups)).problem()
    assert "epochs" not in parse([], 1, workload=find(Small)).problem()


@pytest.mark.parametrize("line, reads", [("return config.epochs", True), ("return 1  # not config.epochs", False)])
@pytest.mark.parametrize("name", ["mine.py", "beside.py"])
def test_so_may_what_else_reads_the_epochs(tmp_path, name, line, reads):
    (tmp_path / "mine.py").write_text("import beside\nfrom small import *\n\nclass Mine(Small):\n    pass\n")
    (tmp_path / "beside.py").write_text("")
    with (tmp_path / name).open("a") as file:
        file.write(f"\ndef length(config):\n    {line}\n")
    assert ("epochs" in parse([], 1, workload=find(str(tmp_path / "mine.py"))).problem()) == reads


@pytest.mark.parametrize("text, size", [("4096", 4096), ("500MB", 500_000_000), ("2gb", 2 * 10**9), ("1TB", 10**12)])
def test_a_size_is_read(text, size):
    assert config(f"--max-shard-size {text}").max_shard_size == size
    assert config("").max_shard_size == config("--max-shard-size 2GB").max_shard_size


@pytest.mark.parametrize("text", ["0", "0GB", "-1", "2GiB", "1.5GB", "GB", "many", "9" * 16, "\u0663MB"])
def test_what_is_no_size_is_named(text):
    with pytest.raises(UsageError, match=r"--max-shard-size: .* is not a size like 2GB, 500MB or 4096 \(bytes\)"):
        config(f"--max-shard-size={text}")


def test_problem_is_the_same_at_every_world_size_that_fits():
    problems = [config("", world_size).problem() for world_size in WORLD_SIZES]
    assert all(problem == problems[0] for problem in problems)


@pytest.mark.parametrize("workload", BUILT_IN)
def test_no_default_is_left_open(workload):
    assert None not in dataclasses.asdict(config(f"--workload {workload}")).values()
    assert config(f"--workload {workload}").run_dir == f"runs/{workload}"


@pytest.mark.parametrize("workload", BUILT_IN)
def test_a_flag_wins_over_the_default_of_the_workload(workload):
    flags = "--epochs 9 --lr 0.25 --momentum 0.5 --optimizer adamw --global-batch-size 8"
    chosen = config(f"--workload {workload} {flags}")
    values = (chosen.epochs, chosen.lr, chosen.momentum, chosen.optimizer, chosen.global_batch_size)
    assert values == (9, 0.25, 0.5, "adamw", 8)


@pytest.mark.parametrize("workload", BUILT_IN)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_default_batches_divide_by_the_world_sizes_of_the_machines(workload, world_size):
    assert config(f"--workload {workload}", world_size).global_batch_size % world_size == 0


def test_a_batch_per_rank_grows_with_the_world():
    assert config("--per-rank-batch-size 10", 3).global_batch_size == 30
    assert config("--workload regression", 4).global_batch_size == 4 * find("regression").defaults["per_rank_batch_size"]


def test_scale_lr_multiplies_by_the_world_size_and_nothing_else_does():
    assert config("--lr 0.25 --scale-lr", 4).lr == 1.0
    assert config("--lr 0.25", 4).lr == 0.25


@pytest.mark.fault(25)
def test_a_batch_that_does_not_divide_lists_what_fits():
    with pytest.raises(UsageError) as caught:
        config("--global-batch-size 100", 8)
    message = str(caught.value)
    assert "--global-batch-size 100" in message and "8 ranks" in message
    assert "96 or 104" in message  # batch sizes for this world size
    assert "1, 2, 4, 5, 10, 20, 25, 50, 100 ranks" in message  # world sizes for this batch size


def test_a_batch_below_the_world_size_lists_only_what_trains():
    with pytest.raises(UsageError, match="take 8, or"):
        config("--global-batch-size 4", 8)


def test_accumulate_counts_in_the_division():
    assert config("--global-batch-size 96 --accumulate 3", 4).accumulate == 3
    with pytest.raises(UsageError, match=r"--global-batch-size 96.*4 ranks.*--accumulate 5: take 80 or 100$"):
        config("--global-batch-size 96 --accumulate 5", 4)
    with pytest.raises(UsageError, match=r"--per-rank-batch-size 10.*--accumulate 3"):
        config("--per-rank-batch-size 10 --accumulate 3", 2)


@pytest.mark.parametrize(
    "flags, world_size, shards",
    [
        ("", 1, 8),
        ("", 4, 8),
        ("", 8, 8),
        ("--shards 12", 3, 12),
        ("--shards 12", 1, 12),
        ("--shards 3 --global-batch-size 9", 1, 3),
        ("--per-rank-batch-size 10 --shards 4", 4, 4),
    ],
)
def test_canonical_shards_are_the_micro_batches_of_all_ranks(flags, world_size, shards):
    chosen = config(f"--reduction canonical {flags}", world_size)
    assert (chosen.shards, chosen.accumulate) == (shards, shards // world_size)
    assert chosen.deterministic, "an accelerator's default kernels need not repeat"


@pytest.mark.parametrize(
    "flags, world_size, named",
    [
        ("--shards 4", 1, "--shards 4 is for --reduction canonical, not ddp"),
        ("--shards 4 --reduction flat", 2, "--shards 4 is for --reduction canonical, not flat"),
        (
            "--global-batch-size 48 --accumulate 7",
            1,
            "--global-batch-size 48 does not divide by --accumulate 7: take 42 or 49$",
        ),
        ("--global-batch-size 48 --accumulate 5", 2, "48 does not divide by 2 ranks x --accumulate 5: take 40 or 50$"),
        ("mine.py", 1, r"unrecognized arguments: mine.py \(is it --workload mine.py\? "),
        ("--reduction canonical --accumulate 2", 2, "--accumulate 2: with --reduction canonical raise --shards 8"),
        ("--reduction canonical --shards 5", 1, "--shards 5 is not 1 ranks x .* take 1, 2, 4, 8, 16, 32$"),
        ("--reduction canonical", 3, "--shards 8 is not 3 ranks x .* take 3, 6, 12, 24, 48, 96$"),
        ("--reduction canonical", 16, "--shards 8 is not 16 ranks x .* take 16, 32$"),
        ("--reduction canonical --shards 12", 4, "--shards 12 is not 4 ranks x .* take 4, 8, 16, 32$"),
        ("--reduction canonical --global-batch-size 20", 2, "--global-batch-size 20: take 2, 4$"),
    ],
)
def test_flags_that_do_not_fit_are_named_with_what_does(flags, world_size, named):
    with pytest.raises(UsageError, match=named) as caught:
        config(flags, world_size)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flag, value",
    [
        *(
            (flag, value)
            for flag in ("--epochs", "--accumulate", "--shards", "--save-every")
            for value in ("0", "-1", "1.5", "x")
        ),
        *((flag, value) for flag in ("--global-batch-size", "--per-rank-batch-size") for value in ("0", "-8", "many")),
        *(("--lr", value) for value in ("0", "-0.1", "nan", "inf", "fast")),
        *((flag, value) for flag in ("--momentum", "--weight-decay", "--clip-norm") for value in ("-0.1", "nan", "x")),
        *((flag, value) for flag in ("--save-minutes", "--log-seconds", "--grace") for value in ("-1", "inf", "often")),
        *((flag, value) for flag in ("--seed", "--steps-per-epoch", "--warmup-steps") for value in ("-1", "0.5", "x")),
        *((flag, value) for flag in ("--save-steps", "--workers") for value in ("-1", "0.5", "x")),
        *((flag, value) for flag in ("--timeout", "--rendezvous-timeout") for value in ("0", "-1", "nan", "inf")),
        *((flag, "x") for flag in ("--workload", "--optimizer", "--precision", "--device", "--backend", "--row-seeds")),
        *(("--reduction", value) for value in ("x", "auto")),
        ("--seed", str(2**64)),  # the order of samples is computed with 64 bits
        ("--timeout", "1e15"),  # too many seconds for a timeout
    ],
)
def test_a_bad_value_is_an_error_that_names_flag_and_value(flag, value):
    with pytest.raises((UsageError, WorkloadError)) as caught:
        parse([f"{flag}={value}"], 1)
    assert flag in str(caught.value) and value in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.code == ExitCode.USAGE == 2


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--no-such-flag 3", "--no-such-flag"),
        ("--epoch 3", "--epoch"),  # no abbreviations: a flag added later would change their meaning
        ("extra", "extra"),
        ("--global-batch-size 8 --per-rank-batch-size 8", "--per-rank-batch-size"),
        ("--model-size tiny", "--model-size tiny"),
        ("--data-dir there", "--data-dir there"),
        ("--channels-last", "--channels-last"),
    ],
)
def test_flags_that_do_not_belong_are_named(flags, named):
    with pytest.raises(UsageError) as caught:
        config(flags)
    assert named in str(caught.value)


def test_a_usage_error_is_one_line_of_rank_0_and_exit_code_2_on_all(tmp_path):
    job = ranks.train(tmp_path / "run", "--global-batch-size 7", world_size=2, code=2)
    assert "--global-batch-size 7" in job.error
    assert job.err[1] == "", "rank 1 repeats what rank 0 has said"
    assert not job.run_dir.exists()


def test_the_rank_is_asked_for_before_torch_is_imported_and_flags_are_read_after():
    """An MPI library may have to start before torch. The workload imports torch, and has its own flags."""
    program = """
import sys
from ddp_core import Rank, run

def rank(environ):
    assert "torch" not in sys.modules
    return Rank.single()

code = run(rank, ["--epochs", "none"])
try:
    run(lambda environ: Rank.single(), ["--help"])
except SystemExit as end:
    code += end.code or 0
sys.exit(code)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "--epochs" in ended.stderr and "'none'" in ended.stderr
    assert "exit codes: 0 done" in " ".join(ended.stdout.split())
