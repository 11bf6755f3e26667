"""The HTML report: its data and the page around it."""
