"""Copying live state into a slot beside training: plan, copy threads, devices, this rank's segment."""
