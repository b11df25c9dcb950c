"""The pure cores: layout arithmetic, tables, manifests, slots, lineage, read planning. No I/O, no torch."""
