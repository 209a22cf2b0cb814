"""The chores of the mesh, done by the peer that holds the leader's lease.

`leader` has the lease and the rounds, `failure_detector` the judgement of heartbeats. `sweeper` gives back the claims of dead
workers, `scanner` reads the queues, `due_jobs` enqueues jobs when they are due, and `schedule_ticker` fires schedules.
"""
