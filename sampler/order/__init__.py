"""Which sample is trained when: permutations, mixtures, schedules and cursors, pure arithmetic.

In: lengths, seeds, positions. Out: indices, and state that any number of ranks can go on from.
May import: sampler.errors; numpy.
"""
