"""Labels: what became of a session, as signals with masks and one reward, all at one age after its last edit."""
