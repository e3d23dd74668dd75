"""Tests of the harness, the certificate, the report and the virtual clusters."""
