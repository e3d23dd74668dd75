"""The report: what was checked, on which rung and when, as Markdown and as a page."""
