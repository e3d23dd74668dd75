"""Tests of the harness, the report and the virtual clusters."""
