"""Live runs under random faults, and the proof that nothing was lost."""
