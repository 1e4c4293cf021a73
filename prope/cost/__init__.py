"""What a training step costs: FLOPs, bytes, collectives, seconds."""
