"""Training, so far of small byte-level targets."""
