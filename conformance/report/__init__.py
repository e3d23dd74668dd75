"""The conformance report: what was checked, on which rung and when, as Markdown and as an HTML page."""
