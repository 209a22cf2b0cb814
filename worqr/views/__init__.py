"""What people see of a mesh, described once for the terminal, ``worqr top``, the pages and the live numbers.

`tables` has the columns and the notes of each list, `values` how numbers, times and ids are written.
"""
