"""Which sample is trained when: permutations, mixtures, schedules and cursors, pure arithmetic.

In: lengths, seeds, positions. Out: indices, and state from which any number of ranks can continue.
May import: sampler.errors; numpy.
"""
