"""From byte ranges back to live state: sources, the choice of the restore point, filling, the collectives around it."""
