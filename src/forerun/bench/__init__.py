"""Floor 4: measurements, proofs and workloads over the engine."""
