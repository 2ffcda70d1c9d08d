"""HTTP around an engine: what is let in, what is asked and answered, what is counted, and the process that serves."""
