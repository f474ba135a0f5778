"""The board: a page that shows runs, live and finished, from their metrics.jsonl alone."""
