"""The consuming side of the mesh, one duty per file.

`peer` is the object that applications hold, `engine` runs it, `session` keeps it registered, `scheduler` has its free slots.
`consumer` requests tasks for handlers, `manual_consumer` those that are taken by hand; `running` runs handlers, `settling` ends
claims, `control_channel` receives wake-ups and cancellations, `consumer_shutdown` leaves queues, `leading` does the leader's
chores.
"""
