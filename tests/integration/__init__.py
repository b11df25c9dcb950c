"""flashckpt together with software that its authors did not write."""
