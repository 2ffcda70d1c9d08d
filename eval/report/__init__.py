"""What stored results say: tables, intervals, pictures, and the page docs/results.md."""
