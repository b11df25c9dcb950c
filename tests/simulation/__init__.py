"""A flight simulator of the control plane: the product's own decisions and bytes on a virtual clock, from one seed.

`clock` schedules processes; `memory`, `storage` and `network` stand in for what a machine gives; `seams` puts them where
the product asks for them; `job` plays ranks and machines, `agents` what agents decide; `rules` holds what must
be true at every moment;
`plan` draws faults from a seed; `mutants` plants bugs that it has to find. `python -m simulation` runs it.
"""
