"""What worqr costs and how fast it is, each figure beside the limit it could reach at best: ``python -m benchmarks``.

One module per subject, each with one ``measure(plan, server)`` that returns tables; `SUBJECTS` in `__main__` lists
them. `measuring` has what a figure is, `server` the bare client, `child` and `children` the processes beside this one.
Nothing here asserts a time: a table says which bars of the design are met, and the reader looks at the machine it ran
on.

Whatever is measured runs in turn with its limit, on one private server, and is compared pair by pair. So a neighbour
that takes half of the machine halves both, and the ratio stands.
"""
