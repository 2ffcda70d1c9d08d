"""The demo pair from nothing: tasks, text, target, answers and head."""
