"""Reports on plans: HTML pages, Markdown, CSV and pictures."""
