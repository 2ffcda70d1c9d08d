"""The options of loading and decoding: names, defaults, meanings and checks. Imports no torch."""
