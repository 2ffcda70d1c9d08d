"""What training a draft head is made of: its settings, objectives, steps, states and evaluation."""
