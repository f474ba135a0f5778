"""Helpers of the tests: processes, networks, groups, small models, the oracle."""
