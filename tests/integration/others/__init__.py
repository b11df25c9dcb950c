"""Programs of others with a small change, killed twice: their sources are given by the caller, nothing of them is here."""
