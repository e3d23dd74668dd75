"""Is a scientist's own program right? What the suite asks of ours, asked of theirs, and the place of the mistake.

    nox -s conformance -- --workload path/to/mine.py [--site NAME]

There is no golden trace of their program, so one is made: fp64, one rank, on the CPU. Everything else is compared with it.

    runs.py        the program in ranks, by a site's train.py, also changed on the way: dropout off, files listed backwards
    witness.py     what the file calls while it runs, and on which line: clocks, generators, seeds, other ranks
    examine.py     a few of its rows, read twice, trained on and looked at again
    promises.py    what is promised, what was measured, and the likeliest reason where they differ
    report.py      the folder to attach to a paper or a ticket
"""
