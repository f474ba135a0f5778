"""One rank of each benchmark, started by `python -m andon.bench.ranks MODULE TASK`."""
