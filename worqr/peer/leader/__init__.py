"""The chores of the mesh, which the peer does that holds the leader's lease.

`leader` has the lease, decides which workers are dead, and enqueues jobs when they are due. `sweeper` gives back the claims of
dead workers. `scanner` reads the queues. `schedule_ticker` fires schedules.
"""
