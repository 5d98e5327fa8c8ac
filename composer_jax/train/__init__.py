"""State, optimizer, losses, one jitted step, and the loop of continued pretraining and SFT."""
