"""Compares our program with an expert's DDP loop, Lightning and Accelerate, in one run, as ratios.

python core/bench --out figures.md                                 # everything; README.md says how long it takes
python core/bench steps --workloads digits --world-sizes 2
python core/bench loader startup --rounds 3
python core/bench --device cuda
"""

import argparse
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import device
import loader
import startup
import steps
from common import Report, parsed


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python core/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["steps", "loader", "startup", "device"]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)} (default: all)")
    parser.add_argument("--workloads", nargs="+", choices=list(steps.FLAGS), default=list(steps.FLAGS), help="of steps")
    parser.add_argument("--world-sizes", nargs="+", type=int, metavar="N", help="default: 1 2 4 (startup 2; loader, device 1)")
    parser.add_argument("--rounds", type=int, default=7, help="counted ones; one more comes first (default: 7)")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the output there, and raw figures to FILE.json")
    args = parsed(parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends the contestants and removes their folders
    if unknown := set(args.parts) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: take some of {', '.join(parts)}")
    chosen, common = args.parts or parts, ["--device", args.device]
    report = Report(args.out, "Ours, an expert's DDP loop, Lightning and Accelerate, side by side")
    try:
        if "steps" in chosen:
            steps.measure(report, args.workloads, args.world_sizes or [1, 2, 4], args.rounds, common)
        if "loader" in chosen:
            loader.measure(report, args.world_sizes or [1], args.rounds, common)
        if "startup" in chosen:
            startup.measure(report, args.world_sizes or [2], args.rounds, common)
        if "device" in chosen:
            device.measure(report, args.device, args.world_sizes or [1], args.rounds, common)
    finally:
        report.close()


if __name__ == "__main__":
    main()
