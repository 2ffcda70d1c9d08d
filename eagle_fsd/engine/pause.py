"""When to stop drafting for a while, and when to try again."""

from __future__ import annotations

SHORTEST_PAUSE, LONGEST_PAUSE = 16, 128  # cycles without drafting
MEMORY = 8  # drafted cycles that decide about a pause


class Pause:
    """Stops drafting for a while where it does not pay, and tries again: ever more rarely, as long as it fails.

    Requests may share one, so that each begins with what the last one learned.
    """

    def __init__(self) -> None:
        self.gain = 1.0  # running mean of what a drafted cycle emits beyond its cost
        self.left, self.length = 0, SHORTEST_PAUSE // 2

    def begin(self) -> None:
        """A new request: try at once, and not too rarely. No success is trusted for long."""
        self.left, self.length, self.gain = 0, min(self.length, LONGEST_PAUSE // 2), min(self.gain, 1.0)

    def drafts(self) -> bool:
        """Whether the next cycle drafts."""
        self.left -= 1
        return self.left < 0

    def learn(self, gain: float) -> None:
        """Take note of a drafted cycle: tokens emitted, less its cost in cycles without drafting."""
        self.gain += (gain - self.gain) / MEMORY
        if gain > 0:
            self.length = max(self.length // 2, SHORTEST_PAUSE // 2)
        elif self.gain < 0:
            self.left = self.length = min(2 * self.length, LONGEST_PAUSE)
