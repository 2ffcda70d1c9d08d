"""The decode loop: draft, verify, accept, commit; requests, logits processing, and timings of whole cycles."""
