"""Parts that benchmarks share: processes, servers, networks, reports."""
