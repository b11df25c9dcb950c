"""A flight simulator of the control plane: the product's own decisions and bytes on a virtual clock, from one seed.

`clock` schedules processes; `memory` and `storage` stand in for what a machine gives; `seams` puts them where the product
asks for them; `job` plays ranks and machines, `agents` what agents decide, `voting` a restore of all ranks over `group`;
`states` says what they train, `rules` what must be true at every moment, `watches` what is looked at on the way. `plan`
draws faults from a seed, with `hazards`, `start_hazards` and `endings`; `reports` tells what others met, `mutants` plants `bugs`
and `more_bugs`, `forecast` compares with what `flashckpt plan` calculates. `python -m simulation` runs it.
"""
