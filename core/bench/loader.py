"""Rows a second through torch's DataLoader with 2 workers: read one by one, with some work for each (images.py).

`bare` is a loop over torch's DataLoader with the same 2 workers, Dataset, order, model and DistributedDataParallel. Its
workers live from epoch to epoch, and are not seeded for each row.
"""

from pathlib import Path

from common import Report, spread
from steps import race

CONTESTANTS = {
    "ours": ("ours", []),
    "bare": ("bare", []),
    "ours, --row-seeds off": ("ours", ["--row-seeds", "off"]),
}
FLAGS = ["--workload", str(Path(__file__).with_name("images.py")), "--workers", "2", "--global-batch-size", "64"]
TURN = 3.0  # seconds: long, since our workers have read four batches before a turn begins


def measure(report: Report, world_sizes: list[int], rounds: int, common: list[str]) -> None:
    report.say(f"\n## Rows a second through DataLoader with 2 workers a rank, median (min..max) of {rounds} rounds")
    report.table(*("ranks", "ours", "bare DataLoader", "ours / bare", "--row-seeds off / bare", "seeds, us a row"))
    for size in world_sizes:
        found = race(CONTESTANTS, [*FLAGS, *common], size, rounds, TURN)
        rate = {name: [64e6 / us for us in result["us"]] for name, result in found.items()}
        on, off = rate["ours"], rate["ours, --row-seeds off"]
        want = f"rows a second through DataLoader, ranks: {size}, ours / bare"
        row = [spread(on), spread(rate["bare"]), report.want(want, on, rate["bare"], least=0.95)]
        # For the whole rank, which reads with two workers at a time.
        seeds = spread([1e6 / a - 1e6 / b for a, b in zip(on, off, strict=True)], 1)
        without = report.want(f"{want}, --row-seeds off", off, rate["bare"], least=0.95)
        report.row(str(size), *row, without, seeds)
        report.raw[f"loader {size}"] = found
