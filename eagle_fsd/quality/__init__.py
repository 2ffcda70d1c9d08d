"""Promises about quality: their statistics, what other settings would have done, stored calibrations."""
