"""What benchmarks are made of: processes, servers, links, reports."""
