"""Certificates: the suite's checks for a scientist's own program. They name the line of each mistake.

    nox -s conformance -- --workload path/to/mine.py [--site NAME]

The program has no golden trace, so one is made: fp64, one rank, on the CPU. Every other run is compared with it.

    runs.py        runs the program in N ranks with a site's train.py; can change it: dropout off, folders listed backwards
    witness.py     records which calls the file makes, and on which line: clocks, generators, seeds, rank variables
    examine.py     reads a few rows twice, trains on them, and compares them again
    promises.py    judges each promise: the measurement, and the likeliest reason for a difference
    report.py      writes the folder to attach to a paper or a ticket
"""
