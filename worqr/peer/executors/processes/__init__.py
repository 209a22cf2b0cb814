"""Warm worker processes for handlers with ``runs_in="process"``: one run each at a time. A cancelled run is killed with all its
child processes.

`ProcessPool` (pool) is the peer's side: it starts processes on demand, keeps them warm, and gives each run one of its own.
`worker` is one of them as the peer sees it, `stderr_pump` passes on its standard error, and `protocol` has the frames between the
two sides. `worker_main` is the program that runs there. `importable` names a function so that the process can import it, and
`lifeline` ends the process together with its parent.

Only bytes are transferred: payloads, records and results unchanged, functions and exceptions by their names.
"""
