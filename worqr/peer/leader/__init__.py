"""The chores of the mesh, which the peer does that holds the leader's lease.

`leader` has the lease and the checks of workers, and `failure_detector` decides which of them are dead. `sweeper` gives back the
claims of dead workers. `scanner` reads the queues. `due_jobs` enqueues jobs when they are due. `schedule_ticker` fires schedules.
"""
