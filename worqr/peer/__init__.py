"""The consuming side of the mesh, one duty per file.

`peer` is the whole, `membership` its registration, `capacity` its room, `claiming` and `claims` take tasks (for handlers, and
by hand), `running` runs handlers, `settling` ends claims, `cancelling` hears of cancels, `leading` does the mesh's chores.
"""
