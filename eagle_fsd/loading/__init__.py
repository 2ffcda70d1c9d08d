"""From files to a pair of target and drafter."""
