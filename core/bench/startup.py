"""Seconds from the start of the processes to the first step and to the end, phase by phase.

    python core/bench/startup.py                    # worlds of 1, 2 and 4: about 2 minutes on two cores
    python core/bench/startup.py --world-sizes 8 --rounds 5 --workload gpt

Real processes: each runs `python -c`, builds its Rank from the environment and calls ddp_core.run. The phases are the
`seconds` of run.jsonl, which count from run(); `python` is what the interpreter took before. First steps of one world
are seen at its first reconciliation. The last column names the heavy modules that a finished rank 0 has imported.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Report, interleave, spread

PROGRAM = """
import json, os, sys, time
began = time.time()
import ddp_core
names = dict(rank="RANK", world_size="WORLD_SIZE", local_rank="RANK", local_world_size="WORLD_SIZE")
names |= dict(node_rank="NODE", master_addr="MASTER_ADDR", master_port="MASTER_PORT", job_id="JOB")
code = ddp_core.run(lambda environ: ddp_core.Rank.read(environ, **names))
if os.environ["RANK"] == "0":
    with open(os.environ["NOTE"], "w") as note:
        json.dump(dict(began=began, modules=sorted(sys.modules)), note)
sys.exit(code)
"""
HEAVY = ("numpy", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.fx.experimental")


def start(world_size: int, flags: list[str]) -> tuple[dict[str, float], list[str]]:
    """When each phase of rank 0 ended, in seconds from before the first process; the heavy modules it has imported."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "note.json"
        job = dict(WORLD_SIZE=world_size, NODE=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, JOB="bench", NOTE=note)
        environ = {"OMP_NUM_THREADS": "1"} | os.environ | {name: str(value) for name, value in job.items()}
        command = [sys.executable, "-c", PROGRAM, *flags, "--run-dir", f"{folder}/run"]
        began = time.time()
        ranks = [
            subprocess.Popen(command, env=environ | {"RANK": str(rank)}, stdout=subprocess.DEVNULL)
            for rank in range(world_size)
        ]
        codes = [rank.wait(timeout=300) for rank in ranks]
        total = time.time() - began
        if any(codes):
            raise SystemExit(f"exit codes {codes} in a world of {world_size}")
        seen = json.loads(note.read_text())
        records = [json.loads(line) for line in (Path(folder) / "run/run.jsonl").read_text().splitlines()]
    python = seen["began"] - began
    phases = {name: python + seconds for name, seconds in records[-1]["seconds"].items() if name != "training"}
    heavy = [name for name in HEAVY if name in seen["modules"]]
    return {"python": python} | phases | {"end": total}, heavy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--workload", default="digits")
    parser.add_argument("--flags", default="", help="further flags of the training program, in one word")
    parser.add_argument("--rounds", type=int, default=5, help="counted ones; one more comes first (default: 5)")
    parser.add_argument("--out", type=Path, help="write the output there: Markdown, or raw figures for *.json")
    args = parser.parse_args()
    report = Report(args.out, "# Start-up: seconds spent in each phase of rank 0, as median (min..max)")
    flags = ["--workload", args.workload, "--epochs", "1", "--steps-per-epoch", "10", *args.flags.split()]
    runs: dict[int, list[dict]] = {size: [] for size in args.world_sizes}
    modules = {}

    def turn(world_size: int) -> float:
        times, modules[world_size] = start(world_size, flags)
        runs[world_size].append(times)
        return runs[world_size][-1]["end"]

    interleave({str(size): lambda size=size: turn(size) for size in args.world_sizes}, args.rounds)
    phases = list(runs[args.world_sizes[0]][0])
    report.table("ranks", *phases, "to the first step", "heavy modules")
    for size, (_, *times) in runs.items():
        report.raw[str(size)] = times
        ends = [[0.0, *run.values()] for run in times]
        spent = [spread([end[i + 1] - end[i] for end in ends], 2) for i in range(len(phases))]
        first = spread([run["first_step"] for run in times], 2)
        report.row(str(size), *spent, first, ", ".join(modules[size]) or "none")
    report.close()


if __name__ == "__main__":
    main()
