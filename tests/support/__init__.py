"""Helpers of the tests: servers, child processes, a proxy that makes faults, and how a run is ordered and sampled."""
