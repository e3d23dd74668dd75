"""What runs the checks: pytest options and verdicts, ranks under mpiexec or submitted jobs, references, site.toml."""
