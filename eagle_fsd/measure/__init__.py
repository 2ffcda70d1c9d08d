"""Methods side by side on the same questions: answers, times, grades, and what they say."""
