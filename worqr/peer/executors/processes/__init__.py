"""Warm worker processes for handlers with ``runs_in="process"``: one run each at a time. A cancelled run is killed with all its
child processes.

`Children` (pool) is the peer's side: it starts processes on demand, keeps them warm, and gives each run one of its own.
`process` is one of them as seen by the peer, `output` what it writes to its standard error, `frames` the wire between the two
sides, `naming` how the process finds a function. `child` is the program that runs there, and `lifeline` ends it with its parent.

Only bytes are transferred: payloads, records and results unchanged, functions and exceptions by their names.
"""
