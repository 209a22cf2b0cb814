"""worqr beside other task queues: the same figures for each, in turns, on one private server.

``python -m benchmarks.rivals`` measures, and prints a table. `contender` reads what there is to measure, `environments` installs
it, `children` starts and ends its processes, `figures` measures, `results` keeps what was measured, `charts` and `page` show it.
A contender is one file in ``contenders/``; ``contenders/driver.py`` describes the protocol.
"""
