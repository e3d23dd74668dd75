"""The checks of the clauses of SPEC.md."""
