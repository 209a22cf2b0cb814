"""Worker processes for handlers with ``runs_in="process"``. Each process runs one task at a time, and stays for the next one.

`pool` is the peer's side: it starts processes on demand, and assigns each run a process. `protocol` has the frames
between the two sides, and the names by which a process imports functions. `worker_main` is the program of the process, which
ends together with its parent. A cancelled run is killed with all its child processes.

Only bytes are transferred: payloads, records and results unchanged, functions and exceptions by their names.
"""
