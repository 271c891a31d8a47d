"""The report: prose with slots instead of numbers, filled in from rows, as Markdown, HTML and JSON."""
