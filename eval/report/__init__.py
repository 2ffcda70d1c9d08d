"""Tables and plots of stored results."""
