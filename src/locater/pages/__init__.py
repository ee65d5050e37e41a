"""One-file pages: the report and the explorer."""
