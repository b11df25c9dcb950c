"""Which sample is trained when: permutations, cursors. Pure.

In: lengths, seeds, positions. Out: indices, and state from which any number of ranks can continue.
"""
