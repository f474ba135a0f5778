"""One rank of each benchmark: `python -m andon.bench.ranks.NAME TASK` prints its results as JSON."""
