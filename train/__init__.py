"""Training: the verifiable-task generator, the text, the demo target and the draft head."""
