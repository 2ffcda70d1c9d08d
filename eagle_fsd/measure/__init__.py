"""Answers to question files under many settings: methods compared, grading, the search for a setting."""
