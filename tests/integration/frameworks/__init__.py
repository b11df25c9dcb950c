"""What training may hold, case by case: restored exactly, or refused before the first step is done.

`case` says what a case is, the modules named in `cases` hold them, `run` runs one, `table` writes docs/compatibility.md.
"""
